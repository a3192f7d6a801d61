"""Marks for tests that need an NVIDIA GPU, checked without opening it."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest


def has_cuda() -> bool:
    """Return True if CUDA is available. Checked in a subprocess, so that this one opens no GPU."""
    if not os.path.exists("/dev/nvidiactl"):
        return False
    code = "import torch; raise SystemExit(not torch.cuda.is_available())"
    return subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


needs_cuda = pytest.mark.skipif(not has_cuda(), reason="there is no CUDA GPU here")
