"""What does a shuffle cost before the first batch, and after?

python benchmarks/order.py --repeats 3 --save my-laptop
"""

from __future__ import annotations

import sys

from front import run
from order_cases import CASES

if __name__ == "__main__":
    question = "What does a shuffle cost before the first batch, and after?"
    sys.exit(run("order", question, CASES, sys.argv[1:]))
