"""Pickles the user's objects for the workers, and exceptions for the way back."""
