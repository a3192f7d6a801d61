"""Measures how fast batches reach the GPU, and how long a training step waits.

See benchmarks/README.md.

python benchmarks/device.py --only a,b --repeats 3 --save h200
"""

from __future__ import annotations

import sys

import torch

from device_cases import CASES
from front import run

if __name__ == "__main__":
    if not torch.cuda.is_available():
        sys.exit("benchmarks/device.py needs a GPU that torch can use. See penstock doctor --gpu.")
    question = "Measures how fast batches reach the GPU, and how long a training step waits."
    sys.exit(run("device", question, CASES, sys.argv[1:]))
