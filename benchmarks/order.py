"""Measures the cost of a shuffle before and after its first batch.

python benchmarks/order.py --repeats 3 --save my-laptop
"""

from __future__ import annotations

import sys

from front import run
from order_cases import CASES

if __name__ == "__main__":
    question = "Measures the cost of a shuffle before and after its first batch."
    sys.exit(run("order", question, CASES, sys.argv[1:]))
