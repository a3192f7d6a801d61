"""Worker side (process or thread): entry points, the loading loop, and the worker status."""
