"""``penstock run`` with torch: the engine under a script, and the summary at the end."""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from support import scripts

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
legacy = pytest.mark.legacy
posix = pytest.mark.skipif(sys.platform == "win32", reason="fork, signals and gloo as on POSIX")

SCRIPT = """
import random, torch
from torch.utils.data import DataLoader

class Noisy:
    def __len__(self):
        return 24
    def __getitem__(self, i):
        return i, random.random(), torch.rand(2)

def epoch(**arguments):
    arguments = {"batch_size": 2, "shuffle": True, "num_workers": 2, **arguments}
    return [[part.tolist() for part in batch] for batch in DataLoader(Noisy(), **arguments)]
"""
PLAIN = f"{SCRIPT}\nprint([epoch() for _ in range(2)])"
KILLED = f"""{SCRIPT}
import os, signal
def disturbed():
    options = dict(batch_size=2, shuffle=True, num_workers=2, prefetch_factor=1)
    batches = iter(DataLoader(Noisy(), **options))
    seen = [next(batches)]
    os.kill(batches._workers[0].pid, signal.SIGKILL)
    return [[part.tolist() for part in batch] for batch in [*seen, *batches]]
print([disturbed() for _ in range(2)])
"""
SETTINGS = f"""{SCRIPT}
import multiprocessing, os, sys
def double(x):
    return 2 * x
class Pooled(Noisy):
    def __init__(self, function):
        self.function = function
    def __getitem__(self, i):
        with multiprocessing.get_context("fork").Pool(1) as pool:
            return 2 * pool.map(self.function, [-i])[0]
def child():
    epoch()
    sys.exit(5)
if __name__ == "__main__":
    multiprocessing.set_start_method("fork")
    with multiprocessing.Pool(2) as pool:
        assert pool.map(double, [1, 2]) == [2, 4]
    loader = DataLoader(Pooled(abs), batch_size=4, num_workers=1)
    assert [n for batch in loader for n in batch.tolist()] == [2 * i for i in range(24)]
    epoch()
    process = multiprocessing.Process(target=child)
    process.start()
    process.join()
    print("child", process.exitcode, multiprocessing.get_start_method(), flush=True)
    list(DataLoader(Pooled(double), num_workers=1))
"""
STRANGE = f"""{SCRIPT}
import multiprocessing, sys, types
multiprocessing.set_start_method("spawn")
sys.modules["timm"] = types.SimpleNamespace(__version__="99.1")
print(len(epoch(num_workers=500)) + len(epoch(num_workers=0)))
"""
BAD = f"""{SCRIPT}
class Broken(Noisy):
    def __getitem__(self, i):
        return 1 // (i % 6)
print([len(batch) for batch in DataLoader(Broken(), batch_size=6)])
"""
FAILING = f"""{SCRIPT}
class Broken(Noisy):
    def __getitem__(self, i):
        raise LookupError("no such image")
list(DataLoader(Broken(), batch_size=6))
"""
NESTED = """
import subprocess, sys
command = [sys.executable, "-m", "penstock", "run", "inner.py"]
print(subprocess.run(command, capture_output=True, text=True, check=True).stderr.strip())
"""
ASKED_FIRST = f"""
import importlib.util, sys
importlib.util.find_spec("torch")  # as transformers and datasets do before anybody imports it
sys.modules["torch"] = None
try:
    import torch
except ImportError:
    del sys.modules["torch"]
{PLAIN}"""
OURS_FIRST = f"""
from penstock.loader import DataLoader as first
from torch.utils.data import DataLoader as patched
import penstock, sys
assert first is penstock.DataLoader and issubclass(first, patched)
assert sys.modules["penstock.loader"].__spec__.origin.endswith("loader.py")
{PLAIN}"""
EARLY = """
import random
drawn = [random.random()]
random.seed(42)
import numpy
drawn += [numpy.random.random(), random.random()]
import torch
drawn += [numpy.random.random(), random.random(), torch.rand(1).item()]
print(drawn)
"""
WANDERING = f"""
import os, sys, types, warnings
warnings.simplefilter("error")
sys.modules["timm"] = types.SimpleNamespace(__version__="99.1")
os.makedirs("elsewhere")
os.chdir("elsewhere")
{BAD}
print(os.listdir("."), sorted(os.listdir("..")))
"""
OWN = """
from penstock import DataLoader

class Torn:
    def __len__(self):
        return 8
    def __getitem__(self, i):
        if i == 5:
            raise ValueError("torn")
        return i

def load(**options):
    loader = DataLoader(Torn(), batch_size=8, num_workers=1, **options)
    return [batch.tolist() for batch in loader]

print(load(), load(on_error=lambda index, error: -1))
"""
CASES: dict[str, tuple[str, tuple[str, ...]]] = {
    "asked first": (ASKED_FIRST, ("--seed", "7")),
    "early": (EARLY, ("--seed", "7")),
    "kept": (OURS_FIRST, ("--seed", "7", "--persistent-workers")),
    "wandering": (WANDERING, ("--on-error", "skip", "--bad-samples-file", "bad.jsonl")),
    "seeded": (PLAIN, ("--seed", "7")),
    "seeded, inline": (PLAIN, ("--seed", "7", "--workers", "0")),
    "seeded, killed": (KILLED, ("--seed", "7")),
    "unseeded": (PLAIN, ()),
    "settings": (SETTINGS, ()),
    "strange": (STRANGE, ()),
    "failing": (FAILING, ()),
    "nested": (NESTED, ()),
    "own": (OWN, ("--on-error", "skip", "--workers", "0")),
    "own, without options": (OWN, ()),
}
LEGACY = ("early", "kept", "seeded", "seeded, inline", "seeded, killed", "unseeded")
"""Programs that the legacy leg runs. Skipping the others saves half a minute."""


@pytest.fixture(scope="module")
def ends(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    root = tmp_path_factory.mktemp("runs")
    names = LEGACY if request.config.option.markexpr.startswith("legacy") else CASES

    def run(name: str) -> subprocess.CompletedProcess[str]:
        source, options = CASES[name]
        folder = root / name.replace(" ", "-")
        folder.mkdir()
        (folder / "program.py").write_text(source)
        (folder / "inner.py").write_text(f"{SCRIPT}\nepoch(num_workers=0)")
        return subprocess.run(
            [sys.executable, "-m", "penstock", "run", *options, "program.py"],
            capture_output=True,
            text=True,
            cwd=folder,
            timeout=240,
            check=False,
        )

    return scripts.run_all(run, list(names))


def end_of(name: str, ends: dict[str, Any], status: int = 0) -> Any:
    end = scripts.told(ends[name])
    assert end.returncode == status, end.stderr
    return end


@legacy
def test_a_seed_gives_the_same_bits_each_time_with_and_without_workers(
    ends: dict[str, Any],
) -> None:
    seeded = end_of("seeded", ends).stdout
    assert seeded == end_of("seeded, inline", ends).stdout
    assert seeded == end_of("kept", ends).stdout
    assert seeded != end_of("unseeded", ends).stdout


def test_torch_may_be_asked_for_before_it_is_imported(ends: dict[str, Any]) -> None:
    end = end_of("asked first", ends)
    assert end.stdout == end_of("seeded", ends).stdout
    assert "2 loaders ran on Penstock's engine" in end.stderr


def test_options_also_apply_to_penstock_s_own_loaders(ends: dict[str, Any]) -> None:
    end = end_of("own", ends)
    assert end.stdout == "[[0, 1, 2, 3, 4, 6, 7]] [[0, 1, 2, 3, 4, -1, 6, 7]]\n"
    lines = [line for line in end.stderr.splitlines() if line.startswith("penstock: ")]
    assert lines[0] == "penstock: the script uses Penstock's DataLoader itself"
    assert lines[1].startswith("penstock: note: --on-error: also for penstock.DataLoader")
    assert lines[2].startswith("penstock: note: --workers: not for penstock.DataLoader")
    assert "the script forked" not in end.stderr  # the fork server may be a fork of the script
    control = end_of("own, without options", ends, status=1)
    assert "ValueError: torn" in control.stderr
    assert "DataLoader itself, so nothing was changed" in control.stderr


@legacy
def test_our_own_loader_may_be_the_first_that_needs_torch(ends: dict[str, Any]) -> None:
    assert "2 loaders ran on Penstock's engine" in end_of("kept", ends).stderr


@legacy
def test_a_seed_counts_from_the_first_line_and_the_script_s_own_seeds_stay(
    ends: dict[str, Any],
) -> None:
    drawn = json.loads(end_of("early", ends).stdout)
    asked, own, numpy = random.Random(7), random.Random(42), np.random.RandomState(7)
    assert drawn[0] == asked.random()
    assert [drawn[2], drawn[4]] == [own.random(), own.random()]
    assert [drawn[1], drawn[3]] == [numpy.random_sample(), numpy.random_sample()]
    assert drawn[5] == torch.rand(1, generator=torch.Generator().manual_seed(7)).item()


def test_a_script_that_makes_warnings_errors_is_not_ended_by_ours(ends: dict[str, Any]) -> None:
    end = end_of("wandering", ends)
    assert end.stdout.startswith("[5, 5, 5, 5]\n")
    assert "penstock: timm 99.1 is untested" in end.stderr


def test_files_are_written_where_the_command_was_typed(ends: dict[str, Any]) -> None:
    shown = end_of("wandering", ends).stdout.splitlines()[-1]
    assert shown == "[] ['bad.jsonl', 'elsewhere', 'inner.py', 'program.py']"


@legacy
@posix
def test_killed_workers_change_nothing_and_are_reported(ends: dict[str, Any]) -> None:
    end = end_of("seeded, killed", ends)
    assert end.stdout == end_of("seeded", ends).stdout
    # At most two of 12 batches are in flight, so a worker killed after the first batch is noticed.
    assert "penstock: recovered: 2 lost worker(s) were replaced" in end.stderr


@legacy
def test_the_report_is_one_line_where_nothing_happened(ends: dict[str, Any]) -> None:
    report = "penstock: 2 loaders ran on Penstock's engine"
    assert end_of("unseeded", ends).stderr.splitlines() == [report]
    assert end_of("seeded", ends).stderr.splitlines() == [f"{report}; seed 7"]
    nothing = "penstock: no DataLoader was iterated, so nothing was changed; seed 7"
    assert end_of("early", ends).stderr.splitlines() == [nothing]


@posix
def test_start_methods_pools_and_forks_of_the_script_s_own_work(ends: dict[str, Any]) -> None:
    end = end_of("settings", ends, status=1)  # its last line fails
    assert end.stdout == "child 5 fork\n"
    # Two from its pool and one that it forks. Processes forked by a worker do not count.
    notes = [line for line in end.stderr.splitlines() if "note:" in line]
    assert len(notes) == 1
    assert "the script forked 3 process(es)" in notes[0]


def test_a_start_method_of_the_script_s_own_is_for_its_own_processes(ends: dict[str, Any]) -> None:
    end = end_of("strange", ends)
    assert end.stdout == "24\n"
    assert "note: the script sets multiprocessing's start method to 'spawn'" in end.stderr


@posix
def test_a_pool_in_a_worker_that_needs_the_script_is_told_what_to_do(ends: dict[str, Any]) -> None:
    """torch's workers cannot create a pool at all. A pool that runs a module's function works."""
    lines = end_of("settings", ends, status=1).stderr.splitlines()
    assert any("PicklingError" in line for line in lines)
    assert any("Try: put the function in a module" in line for line in lines)


def test_a_library_outside_its_tested_range_is_a_line_and_the_script_runs(
    ends: dict[str, Any],
) -> None:
    end = end_of("strange", ends)
    assert end.stdout == "24\n"
    assert len(re.findall(r"^penstock: note: timm 99\.1 is untested", end.stderr, re.M)) == 1


def test_what_is_changed_is_in_the_report(ends: dict[str, Any]) -> None:
    end = end_of("strange", ends)
    assert end.stdout == "24\n"
    changed = [line for line in end.stderr.splitlines() if "changed:" in line]
    assert len(changed) == 1
    assert "num_workers=500 becomes" in changed[0]


def test_bad_samples_are_left_out_and_reported(ends: dict[str, Any]) -> None:
    end = end_of("wandering", ends)
    assert end.stdout.startswith("[5, 5, 5, 5]\n")
    assert "4 bad sample(s) were skipped or replaced" in end.stderr


def test_an_error_in_a_sample_ends_the_script_with_its_own_line_first(ends: dict[str, Any]) -> None:
    lines = end_of("failing", ends, status=1).stderr.splitlines()
    assert lines[0] == "Traceback (most recent call last):"
    assert "program.py" in lines[1]
    assert any(line.startswith("LookupError: ") for line in lines)


def test_a_run_inside_a_run_reports_what_it_changed(ends: dict[str, Any]) -> None:
    assert end_of("nested", ends).stdout == "penstock: 1 loader ran on Penstock's engine\n"


RANKS = f"""{SCRIPT}
import torch.distributed as dist
from torch.utils.data.distributed import DistributedSampler
dist.init_process_group("gloo")
data = Noisy()
seen = epoch(shuffle=False, sampler=DistributedSampler(data), batch_size=4)
indices = [i for batch in seen for i in batch[0]]
both = [None, None]
dist.all_gather_object(both, indices)
if dist.get_rank() == 0:
    print(sorted(both[0] + both[1]) == list(range(24)))
plain = [i for batch in epoch(shuffle=False) for i in batch[0]]
assert plain == list(range(24))  # nothing is shared out that the script does not share out
dist.destroy_process_group()
"""


@posix
def test_under_torchrun_each_rank_runs_the_script_and_reports(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(RANKS)
    torchrun = ["-m", "torch.distributed.run", "--nproc_per_node", "2", "--standalone"]
    end = subprocess.run(
        [sys.executable, *torchrun, "-m", "penstock", "run", "--seed", "0", "program.py"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        timeout=240,
        check=False,
    )
    assert end.returncode == 0, end.stderr
    assert end.stdout == "True\n"
    for rank in (0, 1):
        assert f"penstock (rank {rank}): 2 loaders ran on Penstock's engine; seed 0" in end.stderr


def test_starting_up_costs_little_more_than_python(tmp_path: Path) -> None:
    """About 0.07 s of processor time, which excludes other programs."""
    (tmp_path / "program.py").write_text("pass")

    def time_s(*command: str) -> float:
        start = os.times()
        subprocess.run([sys.executable, *command, "program.py"], cwd=tmp_path, check=True)
        end = os.times()
        return sum(end[2:4]) - sum(start[2:4])  # user and system time of children

    time_s("-m", "penstock", "run")  # writes the bytecode
    pairs = [(time_s(), time_s("-m", "penstock", "run")) for _ in range(5)]
    more_s = min(ours for _, ours in pairs) - min(py for py, _ in pairs)
    print(f"{more_s:.3f} s more processor time than python")
    assert more_s < 0.5
