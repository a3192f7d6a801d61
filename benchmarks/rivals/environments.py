"""Environments of the peers: one virtual environment each, which shares this interpreter's torch.

    HOME/environments/NAME/    a venv whose last entry of sys.path is this interpreter's packages

Installed packages such as torch and torchvision are found and not downloaded again. A peer that
needs a different version of a package gets its own copy. The version of torch is fixed. A peer that
does not support it fails to install, and its rows say so. A peer for another version of Python gets
an environment with its own copy of everything.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

BY_HAND = ("simplejpeg", "opencv-python-headless", "pillow")
"""Packages for decoding and cropping, for peers without their own decoder."""
HELD = ("torch", "torchvision")
LIMIT_S = 900
TOOLS = Path(__file__).resolve().parents[2] / "tools"


@dataclass(frozen=True, kw_only=True)
class Peer:
    """One peer: its environment, and the module in this folder with its contenders.

    Args:
        packages: Packages to install.
        bare: Packages installed without dependencies, which are not needed or take gigabytes.
        python: Version of Python that it needs. Empty for this interpreter's.
    """

    title: str
    module: str
    packages: tuple[str, ...] = ()
    bare: tuple[str, ...] = ()
    python: str = ""

    @property
    def requirements(self) -> tuple[str, ...]:
        own = (*HELD, "numpy", "psutil") if self.python else ()
        return (*self.packages, *own, *BY_HAND)


PEERS = {
    "penstock": Peer(title="Penstock", module="by_penstock"),
    "torch": Peer(title="PyTorch DataLoader", module="by_torch"),
    "torchdata": Peer(title="torchdata", module="by_torchdata", packages=("torchdata",)),
    "grain": Peer(title="Grain", module="by_grain", packages=("grain",)),
    "spdl": Peer(title="SPDL", module="by_spdl", packages=("spdl",)),
    "ffcv": Peer(
        title="FFCV",
        module="by_ffcv",
        packages=("numba", "fastargs", "terminaltables", "assertpy", "tqdm"),
        bare=("ffcv", "pytorch-pfn-extras"),
    ),
    "dali": Peer(title="DALI on the CPU", module="by_dali", packages=("nvidia-dali-cuda120",)),
    "litdata": Peer(title="LitData", module="by_litdata", packages=("litdata",)),
    "mosaic": Peer(
        title="MosaicML Streaming", module="by_mosaic", packages=("mosaicml-streaming",)
    ),
    "webdataset": Peer(title="WebDataset", module="by_webdataset", packages=("webdataset",)),
    "hf": Peer(title="HF datasets", module="by_hf", packages=("datasets",)),
    "lance": Peer(title="LanceDB", module="by_lance", packages=("lancedb",)),
    "dataloader_rs": Peer(
        title="dataloader-rs",
        module="by_dataloader_rs",
        packages=("dataloader-rs",),
        python="3.13",
    ),
}


@dataclass(frozen=True, kw_only=True)
class Environment:
    """The interpreter of a peer, or the reason why there is none."""

    python: str
    trouble: str | None = None


def build(name: str, home: Path) -> Environment:
    """Create or reuse the environment of a peer. A failure is also a result."""
    peer, folder = PEERS[name], home / "environments" / name
    python, done = folder / "bin" / "python", folder / "done.json"
    mark = hashlib.sha256(repr((peer, sys.prefix)).encode()).hexdigest()
    if done.exists():
        found = json.loads(done.read_text("utf-8"))
        if found["mark"] == mark:
            return Environment(python=str(python), trouble=found["trouble"])
    interpreter = _find_python(peer.python) if peer.python else sys.executable
    if not interpreter:
        return Environment(python="", trouble=f"needs Python {peer.python}, which was not found")
    _run([interpreter, "-m", "venv", "--clear", "--without-pip", str(folder)])
    if not peer.python:
        _look_here(folder)
    held = folder / "held.txt"
    held.write_text("".join(f"{line}\n" for line in _held()), "utf-8")
    trouble = None
    for options in (peer.requirements, ("--no-deps", "--no-build-isolation", *peer.bare)):
        if trouble is None and options[-1] != "--no-build-isolation":
            trouble = _install(str(python), held, options)
    done.write_text(json.dumps({"mark": mark, "trouble": trouble}), "utf-8")
    return Environment(python=str(python), trouble=trouble)


def _find_python(wanted: str) -> str:
    return _run(["sh", str(TOOLS / "find_python.sh"), wanted]).stdout.strip()


def _look_here(folder: Path) -> None:
    """Add this interpreter's packages to the end of the environment's path."""
    paths = dict.fromkeys(sysconfig.get_path(kind) for kind in ("purelib", "platlib"))
    target = next(folder.glob("lib/python*/site-packages"))
    (target / "zz_base.pth").write_text("".join(f"{path}\n" for path in paths), "utf-8")


def _held() -> list[str]:
    found = []
    for package in HELD:
        try:
            found.append(f"{package}=={version(package)}")
        except PackageNotFoundError:
            pass
    return found


def _install(python: str, held: Path, options: tuple[str, ...]) -> str | None:
    command = [sys.executable, "-m", "pip", "--python", python, "install", "-q", "--no-compile"]
    command += ["--disable-pip-version-check", "--no-input", "--prefer-binary"]
    ended = _run([*command, "--constraint", str(held), *options])
    return None if ended.returncode == 0 else _reason(ended.stderr)


def _run(command: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)


def _reason(said: str) -> str:
    """Return the most informative line of pip's output, without names of this machine."""
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    for word in ("RuntimeError", "fatal error", "No matching distribution", "ERROR:", "error:"):
        for line in lines:
            if word in line and "/" not in line:
                return line[:160]
    return "pip failed"
