"""``seed_all`` and ``seeded``: all generators and switches that make a run repeatable, in one call.

A repeatable run also needs a loader with ``seed=``, the same data and the same machine. Whatever
cannot be set inside a running process is reported, with the way to set it.
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
"""The two values with which cuBLAS is repeatable; the first is the faster one, with 24 MB more."""


Restore = Callable[[], object]


@dataclass(frozen=True, kw_only=True)
class SeedReport:
    """What :func:`seed_all` did, and what it could not do."""

    seed: int
    done: tuple[str, ...]
    cannot: tuple[str, ...]

    def __str__(self) -> str:
        lines = [f"seed {self.seed}", *(f"  set: {text}" for text in self.done)]
        return "\n".join([*lines, *(f"  not set: {text}" for text in self.cannot)])


def seed_all(seed: int, deterministic: bool | str = True, benchmark: bool = False) -> SeedReport:
    """Seed Python's, NumPy's and torch's generators, and switch torch to repeatable algorithms.

    Args:
        seed: A whole number of 64 bits (of which torch's generator on the CPU uses the lower 32).
        deterministic: True: an operation that has no repeatable form raises. ``"warn"``: it warns.
            False: torch is free to choose.
        benchmark: May cuDNN (MIOpen) time its algorithms and take the fastest? Another one may win
            in the next run, so True with ``deterministic`` is only for shapes that never change.

    Returns:
        What was set, and what cannot be set in a running process. Print it.

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
            f"deterministic={deterministic!r} is not known; it is one of True, False, 'warn'",
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
    """:func:`seed_all` for a while: afterwards everything is as it was.

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
    """NumPy's global generator, by a seed of 64 bits."""
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

    Newer versions import the compiler to set its flag, too (1.6 s in 2.13). While it is not
    imported, an environment variable does the same.
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
    """Older torch leaves its workspace to cuBLAS, which reads this variable when it starts."""
    import torch

    if torch.version.cuda is None or not _needs_workspace():
        return
    value = os.environ.setdefault(_WORKSPACE, _WORKSPACES[0])
    if value not in _WORKSPACES:
        cannot.append(
            f"{_WORKSPACE}={value} was set before; repeatable are {' and '.join(_WORKSPACES)}"
        )
    elif torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        cannot.append(
            f"the GPU is in use already: {_WORKSPACE}={value} holds only if it was set before. "
            "Call seed_all first, or set it in the shell"
        )
    else:
        done.append(f"{_WORKSPACE}={value}")


def _needs_workspace() -> bool:
    """Does this torch refuse matrix products without the variable? Its own description says so.

    The check and the sentence left torch together (pull request 161749). Without docstrings
    (``python -OO``) it is set to be safe.
    """
    import torch

    text = torch.use_deterministic_algorithms.__doc__
    return text is None or _WORKSPACE in text


def _check_hash_seed(done: list[str], cannot: list[str]) -> None:
    asked = os.environ.get("PYTHONHASHSEED", "random")
    if not sys.flags.hash_randomization:
        done.append("the order of sets of strings: PYTHONHASHSEED=0 since the start")
    elif asked.isdigit() and int(asked):  # the flag tells nothing then: it is 1 either way
        done.append(
            f"the order of sets of strings, if PYTHONHASHSEED={asked} was set before Python started"
        )
    else:
        cannot.append(
            "the order of sets of strings, which Python fixes when it starts. "
            "Try: PYTHONHASHSEED=0 python train.py"
        )


# -- putting things back ---------------------------------------------------------------------------


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
    """The generators of accelerators that run already; none is started to ask."""
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
            # What seed_all left there waits for the start: have it followed by what was there.
            saved.append(partial(module.manual_seed_all, first_seed))
    mps: Any = getattr(torch, "mps", None)
    if mps is not None and torch.backends.mps.is_available():
        saved.append(partial(mps.set_rng_state, mps.get_rng_state()))
    return saved
