"""In a worker process or thread: its entry points, the loading loop, and its visible status."""
