"""Compares shuffled rows of mapped files with other formats and with a bare copy.

python benchmarks/store.py --repeats 5 --save my-laptop

Includes the peers that are installed: pip install litdata webdataset datasets mosaicml-streaming
"""

from __future__ import annotations

import sys

from front import run
from packed_cases import CASES

if __name__ == "__main__":
    question = "Compares shuffled rows of mapped files with other formats and with a bare copy."
    sys.exit(run("packed_sets", question, CASES, sys.argv[1:]))
