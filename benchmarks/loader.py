"""Is Penstock's loader faster than PyTorch's, here and now? See benchmarks/README.md.

python benchmarks/loader.py --only a,b --repeats 7 --save my-laptop
"""

from __future__ import annotations

import sys

from cases import CASES
from front import run

if __name__ == "__main__":
    question = "Is Penstock's loader faster than PyTorch's, here and now?"
    sys.exit(run("loader", question, CASES, sys.argv[1:]))
