"""Begins to measure coverage in each Python that `make coverage` starts; see tools/coverage.sh."""

import coverage

coverage.process_startup()
