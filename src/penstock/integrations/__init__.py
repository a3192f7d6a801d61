"""Other people's code on top of Penstock, unchanged: patched loaders, accelerate, scripts."""
