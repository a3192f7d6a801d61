"""Compares num_workers="auto" with fixed numbers of workers.

python benchmarks/auto.py --only d,e --repeats 3 --save my-laptop
"""

from __future__ import annotations

import sys

from auto_cases import CASES
from front import run

if __name__ == "__main__":
    question = 'Compares num_workers="auto" with fixed numbers of workers.'
    sys.exit(run("auto", question, CASES, sys.argv[1:]))
