"""How long until the next batch, after a resume half way through 20 million samples?

python benchmarks/resume.py --repeats 3 --save my-laptop

torchdata's StatefulDataLoader takes part where it is installed (pip install torchdata).
"""

from __future__ import annotations

import sys

from front import run
from resume_cases import CASES

if __name__ == "__main__":
    question = "How long until the next batch, after a resume half way through 20 million samples?"
    sys.exit(run("resume", question, CASES, sys.argv[1:]))
