"""Pickling of user objects for the workers, and of exceptions for the parent."""
