"""In the training process: iterators, dispatch, worker pools, fork server, restarts, reports."""
