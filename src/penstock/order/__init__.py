"""Sampling: orders, splits, ranks, per-sample randomness and resuming, as functions of the seed."""
