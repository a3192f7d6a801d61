"""Training-process side: iterators, dispatch, worker pools, fork server, restarts, reports."""
