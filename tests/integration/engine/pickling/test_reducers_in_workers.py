"""Objects that are rebuilt in a worker, in a real script."""

from __future__ import annotations

from pathlib import Path

import pytest

from support import scripts

pytestmark = pytest.mark.legacy

SCRIPT = """
import functools
from penstock import DataLoader

@functools.lru_cache
def cached(n):
    return n * n

@functools.singledispatch
def shown(value):
    return -1

@shown.register
def _(value: int):
    return value + 1

class Data:
    def __len__(self): return 4
    @functools.cached_property
    def one(self): return 1
    @functools.lru_cache(maxsize=None)
    def own(self, i): return cached(i) * self.one
    def __getitem__(self, i): return self.own(i) + shown(i)

for workers in (0, 2):
    print([batch.tolist() for batch in DataLoader(Data(), batch_size=4, num_workers=workers)])
"""


def test_a_script_with_caches_of_its_own_loads_in_workers(tmp_path: Path) -> None:
    ended = scripts.run(SCRIPT, tmp_path)
    assert ended.stdout.splitlines() == ["[[1, 3, 7, 13]]"] * 2, ended.stderr
