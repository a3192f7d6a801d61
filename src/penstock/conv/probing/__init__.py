"""Tests the machine's convolution library, in child processes that may crash."""
