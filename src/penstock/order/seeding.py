"""``seed_all`` and ``seeded``: seed all generators and make torch deterministic.

A reproducible run also needs a loader with ``seed=``, the same data and the same machine. Settings
that cannot be changed inside a running process are reported, together with the way to set them.
"""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from penstock.errors import BadArgument
from penstock.options import check_seed
from penstock.order.global_generators import preserved_generators
from penstock.order.keys import MASK

_INDUCTOR = "TORCHINDUCTOR_DETERMINISTIC"
_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"
_WORKSPACES = (":4096:8", ":16:8")
"""The two values with which cuBLAS is deterministic. The first is faster and uses 24 MB more."""


Restore = Callable[[], object]


@dataclass(frozen=True, kw_only=True)
class SeedReport:
    """Settings that :func:`seed_all` made, and those that it could not make."""

    seed: int
    done: tuple[str, ...]
    cannot: tuple[str, ...]

    def __str__(self) -> str:
        lines = [f"seed {self.seed}", *(f"  set: {text}" for text in self.done)]
        return "\n".join([*lines, *(f"  not set: {text}" for text in self.cannot)])


def seed_all(seed: int, deterministic: bool | str = True, benchmark: bool = False) -> SeedReport:
    """Seed Python's, NumPy's and torch's generators, and switch torch to deterministic algorithms.

    Args:
        seed: A 64-bit integer. torch's CPU generator uses only the lower 32 bits.
        deterministic: True: an operation without a deterministic implementation raises. ``"warn"``:
            it warns. False: torch is free to choose.
        benchmark: True if cuDNN (MIOpen) is allowed to time its algorithms and use the fastest. A
            different one can win in the next run, so combine True with ``deterministic`` only for
            shapes that never change.

    Returns:
        The settings made, and those that cannot be made in a running process. Print it.

    Example:
        >>> import random, penstock
        >>> seeded = penstock.seed_all(1, deterministic=False)
        >>> first = random.random()
        >>> seeded = penstock.seed_all(1, deterministic=False)
        >>> random.random() == first
        True
    """
    value = check_seed("seed", seed)
    if deterministic not in (True, False, "warn"):
        raise BadArgument(
            f"deterministic={deterministic!r} must be True, False or 'warn'",
            remedy="seed_all(0, deterministic=True)",
        )
    cannot: list[str] = []
    done = _seed_generators(value)
    done += _set_flags(deterministic, benchmark)
    if deterministic:
        _set_workspace(done, cannot)
    _check_hash_seed(done, cannot)
    return SeedReport(seed=value, done=tuple(done), cannot=tuple(cannot))


@contextmanager
def seeded(
    seed: int, deterministic: bool | str = True, benchmark: bool = False
) -> Iterator[SeedReport]:
    """Call :func:`seed_all` for the duration of a block, then restore everything.

    Example:
        >>> import random, penstock
        >>> state = random.getstate()
        >>> with penstock.seeded(1, deterministic=False):
        ...     drawn = random.random()
        >>> random.getstate() == state
        True
    """
    put_back = [*_save_devices(), *_save_flags(), *_save_workspace()]
    with preserved_generators():
        try:
            yield seed_all(seed, deterministic, benchmark)
        finally:
            for restore in put_back:
                restore()


def _seed_generators(seed: int) -> list[str]:
    import torch

    bits = seed & MASK
    random.seed(bits)
    seed_numpy(bits)
    torch.manual_seed(seed)
    done = ["Python's random", "NumPy's global generator", "torch on the CPU and every accelerator"]
    opencv: Any = sys.modules.get("cv2")
    if hasattr(opencv, "setRNGSeed"):
        opencv.setRNGSeed(bits & 0x7FFFFFFF)
        done.append("OpenCV's generator of this thread")
    return done


def seed_numpy(bits: int) -> None:
    """Seed NumPy's global generator with 64 bits."""
    np.random.seed(bits if bits < 1 << 32 else [bits & 0xFFFFFFFF, bits >> 32])


# -- torch's switches ------------------------------------------------------------------------------


def _set_flags(deterministic: bool | str, benchmark: bool) -> list[str]:
    import torch

    is_deterministic = bool(deterministic)
    torch.backends.cudnn.deterministic = is_deterministic
    torch.backends.cudnn.benchmark = benchmark
    _use_deterministic(is_deterministic, warn_only=deterministic == "warn")
    library = "MIOpen" if torch.version.hip else "cuDNN"
    done = [
        f"{library}: deterministic={is_deterministic}, benchmark={benchmark}",
        f"torch.use_deterministic_algorithms({is_deterministic}"
        + (", warn_only=True)" if deterministic == "warn" else ")"),
    ]
    if torch.version.hip and _has_miopen_switch():
        torch.backends.miopen.immediate = is_deterministic  # no search, so no race between kernels
        done.append(f"MIOpen: immediate={is_deterministic}")
    return done


def _use_deterministic(is_on: bool, *, warn_only: bool) -> None:
    """torch.use_deterministic_algorithms, without importing torch's compiler.

    Newer versions of torch import the compiler to set its flag too (1.6 s in 2.13). While the
    compiler is not imported, an environment variable has the same effect.
    """
    import torch

    if "torch._inductor" in sys.modules:
        torch.use_deterministic_algorithms(is_on, warn_only=warn_only)
        return
    torch._C._set_deterministic_algorithms(is_on, warn_only=warn_only)
    if is_on:
        os.environ[_INDUCTOR] = "1"
    else:
        os.environ.pop(_INDUCTOR, None)


def _has_miopen_switch() -> bool:
    import torch

    return hasattr(getattr(torch.backends, "miopen", None), "immediate")


def _set_workspace(done: list[str], cannot: list[str]) -> None:
    """Set cuBLAS's workspace variable. Older torch needs it, and cuBLAS reads it at start."""
    import torch

    if torch.version.cuda is None or not _needs_workspace():
        return
    value = os.environ.setdefault(_WORKSPACE, _WORKSPACES[0])
    if value not in _WORKSPACES:
        cannot.append(
            f"{_WORKSPACE}={value} was already set; the deterministic values are "
            f"{' and '.join(_WORKSPACES)}"
        )
    elif torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        cannot.append(
            f"the GPU is already in use: {_WORKSPACE}={value} has an effect only if it was set "
            "before. Call seed_all first, or set it in the shell"
        )
    else:
        done.append(f"{_WORKSPACE}={value}")


def _needs_workspace() -> bool:
    """Return True if this torch refuses matrix products without the variable.

    Decided from the docstring of the torch function. torch removed the check and the sentence about
    it together (pull request 161749). Without docstrings (``python -OO``), returns True to be safe.
    """
    import torch

    text = torch.use_deterministic_algorithms.__doc__
    return text is None or _WORKSPACE in text


def _check_hash_seed(done: list[str], cannot: list[str]) -> None:
    asked = os.environ.get("PYTHONHASHSEED", "random")
    if not sys.flags.hash_randomization:
        done.append("the order of sets of strings: PYTHONHASHSEED=0 was set at startup")
    elif asked.isdigit() and int(asked):  # the flag is 1 whether or not it was set in time
        done.append(
            f"the order of sets of strings, if PYTHONHASHSEED={asked} was set before Python started"
        )
    else:
        cannot.append(
            "the order of sets of strings, which Python fixes at startup. "
            "Try: PYTHONHASHSEED=0 python train.py"
        )


# -- restoring settings ----------------------------------------------------------------------------


def _save_flags() -> list[Restore]:
    import torch

    flags: list[tuple[Any, str]] = [
        (torch.backends.cudnn, "deterministic"),
        (torch.backends.cudnn, "benchmark"),
    ]
    if _has_miopen_switch():
        flags.append((torch.backends.miopen, "immediate"))
    is_on = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    return [
        *(partial(setattr, module, name, getattr(module, name)) for module, name in flags),
        partial(_use_deterministic, is_on, warn_only=warn_only),
    ]


def _save_workspace() -> list[Restore]:
    value = os.environ.get(_WORKSPACE)
    if value is None:
        return [partial(os.environ.pop, _WORKSPACE, None)]
    return [partial(os.environ.__setitem__, _WORKSPACE, value)]


def _save_devices() -> list[Restore]:
    """Save the generators of accelerators that are already initialized. Initializes none."""
    import torch

    first_seed = torch.default_generator.initial_seed()
    saved: list[Restore] = []
    for name in ("cuda", "xpu"):
        module: Any = getattr(torch, name, None)
        if module is None or not hasattr(module, "get_rng_state_all"):
            continue
        if module.is_initialized():
            saved.append(partial(module.set_rng_state_all, module.get_rng_state_all()))
        else:
            # seed_all's seed is queued until the device starts. Queue the original seed after it.
            saved.append(partial(module.manual_seed_all, first_seed))
    mps: Any = getattr(torch, "mps", None)
    if mps is not None and torch.backends.mps.is_available():
        saved.append(partial(mps.set_rng_state, mps.get_rng_state()))
    return saved
