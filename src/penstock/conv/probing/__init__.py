"""Probes the machine's convolution library, in child processes that may die."""
