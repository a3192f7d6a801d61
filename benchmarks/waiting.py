"""Compares loaders on samples that wait: for 20 ms, for a web server, and between decoding.

python benchmarks/waiting.py --only a,b --repeats 3 --save my-laptop
"""

from __future__ import annotations

import sys

from front import run
from waiting_cases import CASES

if __name__ == "__main__":
    question = "Compares loaders on samples that wait."
    sys.exit(run("waiting", question, CASES, sys.argv[1:]))
