"""Starting worker processes: from a nursery, spawned, or forked by request."""
