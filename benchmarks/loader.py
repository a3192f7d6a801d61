"""Compares Penstock's loader with PyTorch's on this machine. See benchmarks/README.md.

python benchmarks/loader.py --only a,b --repeats 7 --save my-laptop
"""

from __future__ import annotations

import sys

from cases import CASES
from front import run

if __name__ == "__main__":
    question = "Compares Penstock's loader with PyTorch's on this machine."
    sys.exit(run("loader", question, CASES, sys.argv[1:]))
