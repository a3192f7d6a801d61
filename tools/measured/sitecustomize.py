"""Starts coverage in every Python process of `make coverage`. See tools/coverage.sh."""

import coverage

coverage.process_startup()
