"""Workers that import torchvision leave no temporary folder, even when they are killed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torchvision")

pytestmark = pytest.mark.vision

PROGRAM = """
import os, signal, sys
import torchvision
from penstock import DataLoader

class Data:
    transform = torchvision.transforms.CenterCrop(2)
    def __len__(self): return 8
    def __getitem__(self, index):
        import torchvision
        return index, int("torch.distributed.nn.jit.instantiator" in sys.modules)

def list_folders():
    return set(os.listdir(os.environ["TMPDIR"]))

own = list_folders()  # of this process: torch removes them at its end
for context in (None, "spawn"):
    batches = iter(DataLoader(Data(), batch_size=4, num_workers=1, multiprocessing_context=context))
    print(next(batches)[1].tolist(), sorted(list_folders() - own))
    if sys.argv[1] == "kill":
        os.kill(batches._workers[0].pid, signal.SIGKILL)
    del batches
if sys.argv[1] == "kill":
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("end", ["usual", "kill"])
def test_no_folder_of_a_worker_is_left(tmp_path: Path, end: str) -> None:
    program, folder = tmp_path / "program.py", tmp_path / "temporary"
    program.write_text(PROGRAM)
    folder.mkdir()
    done = subprocess.run(
        [sys.executable, str(program), end],
        capture_output=True,
        text=True,
        timeout=240,
        env={**os.environ, "TMPDIR": str(folder)},
    )
    lines = done.stdout.splitlines()
    assert lines == ["[1, 1, 1, 1] []"] * 2, done.stderr
    left = list(folder.iterdir())
    # A killed program leaves the folder that torch created for it.
    assert len(left) <= (end == "kill")


def test_torch_leaves_one_where_python_does_not_end_in_the_usual_way(tmp_path: Path) -> None:
    """Control: torch owns the folder, and only its exit handler removes it."""
    code = "import os, torchvision; os._exit(0)"
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    subprocess.run([sys.executable, "-c", code], env=environment, timeout=240, check=True)
    names = [path.name for path in tmp_path.rglob("*.py")]
    assert names == ["_remote_module_non_scriptable.py"]
