"""How fast are shuffled rows of mapped files, beside other formats and a bare copy?

python benchmarks/store.py --repeats 5 --save my-laptop

Peers take part where they are installed: pip install litdata webdataset datasets mosaicml-streaming
"""

from __future__ import annotations

import sys

from front import run
from packed_cases import CASES

if __name__ == "__main__":
    question = "How fast are shuffled rows of mapped files, beside other formats and a bare copy?"
    sys.exit(run("packed_sets", question, CASES, sys.argv[1:]))
