"""Convolution algorithms that need no convolution library, one module each."""
