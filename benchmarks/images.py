"""Compares random crops from JPEGs with PyTorch's loader and with bare threads.

python benchmarks/images.py --repeats 5 --save my-laptop

Needs torchvision and Pillow. simplejpeg and OpenCV make Penstock faster: pip install
simplejpeg opencv-python-headless.
"""

from __future__ import annotations

import sys

from front import run
from image_cases import CASES

if __name__ == "__main__":
    question = "Compares random crops from JPEGs with PyTorch's loader and with bare threads."
    sys.exit(run("images", question, CASES, sys.argv[1:]))
