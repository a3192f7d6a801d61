"""Measures the time to the next batch after resuming half way through 20 million samples.

python benchmarks/resume.py --repeats 3 --save my-laptop

Includes torchdata's StatefulDataLoader if it is installed (pip install torchdata).
"""

from __future__ import annotations

import sys

from front import run
from resume_cases import CASES

if __name__ == "__main__":
    question = "Measures the time to the next batch after a resume among 20 million samples."
    sys.exit(run("resume", question, CASES, sys.argv[1:]))
