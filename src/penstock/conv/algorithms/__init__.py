"""Convolutions without a convolution library: one module for each algorithm."""
