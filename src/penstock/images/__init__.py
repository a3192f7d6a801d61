"""Decode, crop and resize images."""
