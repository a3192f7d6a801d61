"""``penstock doctor``: checks this machine and a dataset, and lists problems with fixes."""
