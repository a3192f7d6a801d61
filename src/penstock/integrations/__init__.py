"""Runs other people's code on Penstock unchanged: patched loaders, accelerate, scripts."""
