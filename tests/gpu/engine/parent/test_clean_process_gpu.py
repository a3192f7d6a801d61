"""A process that has opened the GPU is not forked, and one that opens it later may have been."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from support import scripts
from support.cuda_marks import needs_cuda

pytestmark = pytest.mark.gpu

PROGRAM = """
import json
import torch
import penstock
from penstock.engine.parent import fork_server

found = {}


def load(name):
    loader = penstock.DataLoader(range(8), batch_size=4, num_workers=2, device="cuda")
    found[name] = fork_server.current_fork_server().why_fresh
    assert [batch.tolist() for batch in loader] == [[0, 1, 2, 3], [4, 5, 6, 7]]


load("before the GPU is opened")  # and opens it
load("with the same fork server")
fork_server.close_fork_server()
load("after the GPU was opened")
print(json.dumps(found))
"""


@needs_cuda
def test_only_a_process_without_a_gpu_context_is_forked(tmp_path: Path) -> None:
    result = scripts.run(PROGRAM, tmp_path)
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout)
    assert found["before the GPU is opened"] is None
    assert found["with the same fork server"] is None
    assert found["after the GPU was opened"] is not None
