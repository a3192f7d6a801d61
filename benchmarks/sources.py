"""Compares open_dataset with the original reader of each format, on sets that the original wrote.

python benchmarks/sources.py --only tar --repeats 5 --save my-laptop

Formats whose library is not installed are left out. `make env-formats` installs all of them.
"""

from __future__ import annotations

import sys

import source_cases
import source_tables
from front import run

if __name__ == "__main__":
    question = "Compares open_dataset with the original reader of each format."
    sys.exit(run("sources", question, {**source_cases.CASES, **source_tables.CASES}, sys.argv[1:]))
