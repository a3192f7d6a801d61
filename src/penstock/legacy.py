"""Replacements for helper functions that projects wrote for data loading on Windows and ROCm.

``from penstock.legacy import create_dataloader`` replaces the project's own module. The names,
arguments and results are the same. Most of the problems that these functions worked around do not
exist with Penstock. Each docstring says what remains. Importing this module does not import torch,
because some of the functions must be called before torch is imported.

    create_dataloader, get_safe_num_workers, ...    penstock.DataLoader and the plan
    set_seed, verify_reproducibility                penstock.seed_all and penstock.verify
    setup_rocm_multiprocessing, patch_dataloader    penstock.patch
"""

from __future__ import annotations

import multiprocessing
import os
import warnings
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from penstock.machine.collect import machine, quick_facts
from penstock.planning.amd_override import VARIABLE, check_override
from penstock.planning.decisions import make_plan
from penstock.planning.inputs import LoaderRequest, Workload
from penstock.planning.plan import Choice
from penstock.planning.quantities import size
from penstock.planning.safety import USUAL_REQUESTS, choose_safe_workers, tabulate_safe_workers

if TYPE_CHECKING:
    from penstock.loader import DataLoader

__all__ = [
    "create_dataloader",
    "get_recommended_num_workers",
    "get_safe_num_workers",
    "get_safe_num_workers_table",
    "is_windows",
    "patch_dataloader",
    "print_dataloader_config",
    "print_rocm_info",
    "print_safe_num_workers_table",
    "set_seed",
    "setup_rocm_multiprocessing",
    "verify_reproducibility",
]

WHY_NOT_ZERO = (
    "workers do not rerun your script, lambdas and classes defined in the script work in them, the "
    "dataset is serialized only once, and the number of workers does not change the batches"
)
_ONLY_WITH_WORKERS = ("persistent_workers", "prefetch_factor", "multiprocessing_context")
_ROCM_VARIABLES = ("MIOPEN_DEBUG_CONV_IMPLICIT_GEMM", VARIABLE, "ROCM_PATH")


# -- loaders ---------------------------------------------------------------------------------------


def is_windows() -> bool:
    """Return True on Windows.

    Example:
        >>> import sys
        >>> is_windows() == (sys.platform == "win32")
        True
    """
    return quick_facts().os == "win32"


def create_dataloader(
    dataset: Any,
    batch_size: int | None = 1,
    shuffle: bool = False,
    num_workers: int | str = 0,
    pin_memory: bool | None = None,
    drop_last: bool = False,
    seed: int | None = None,
    force_zero_workers_on_windows: bool = False,
    **kwargs: Any,
) -> DataLoader[Any]:
    """Create a loader suited to this machine. It is reproducible if a seed is given.

    Args:
        num_workers: As in torch, or ``"auto"``. A number that the machine cannot support is
            reduced with a warning.
        pin_memory: If None, memory is pinned if torch has a GPU.
        seed: Determines the order and randomness of the samples, independent of the workers.
        force_zero_workers_on_windows: Use no workers on Windows. Not needed with Penstock:
            :data:`WHY_NOT_ZERO` gives the reasons, and ``loader.plan.notes`` shows them on Windows.
        **kwargs: Other arguments of :class:`penstock.DataLoader`.

    Example:
        >>> loader = create_dataloader(range(6), batch_size=3, shuffle=True, num_workers=2, seed=42)
        >>> sorted(i for batch in loader for i in batch.tolist())
        [0, 1, 2, 3, 4, 5]
    """
    import torch

    from penstock.loader import DataLoader

    safe = _choose(num_workers, force_zero_workers_on_windows)
    _warn_of(num_workers, safe)
    if safe.value == 0 and num_workers != 0:  # torch rejects these arguments without workers
        kwargs = {name: kwargs[name] for name in kwargs if name not in _ONLY_WITH_WORKERS}
    loader: DataLoader[Any] = DataLoader(
        dataset,
        batch_size,
        shuffle,
        num_workers=safe.value,
        pin_memory=torch.cuda.is_available() if pin_memory is None else pin_memory,
        drop_last=drop_last,
        seed=seed,
        **kwargs,
    )
    if is_windows() and safe.value:
        loader._notes.setdefault(f"num_workers={safe.value} on Windows, not 0: {WHY_NOT_ZERO}")
    return loader


def get_recommended_num_workers() -> int:
    """Return the number of workers that the plan chooses for an unmeasured dataset.

    It is one worker per core that this process can use, limited by memory and open files. CPU
    affinity, container quotas and the number of ranks are taken into account. The same rule applies
    on Windows. ``num_workers="auto"`` measures the dataset and gives a better number.

    Example:
        >>> get_recommended_num_workers() >= 1
        True
    """
    return int(make_plan(quick_facts(), LoaderRequest(), Workload()).num_workers.value)


def get_safe_num_workers(
    num_workers: int, force_zero_on_windows: bool = False, warn: bool = True
) -> int:
    """Return ``num_workers``, reduced if this machine cannot support that many.

    Args:
        force_zero_on_windows: As in :func:`create_dataloader`.
        warn: Warn if the number is reduced.

    Example:
        >>> get_safe_num_workers(0), get_safe_num_workers(1)
        (0, 1)
    """
    safe = _choose(num_workers, force_zero_on_windows)
    if warn:
        _warn_of(num_workers, safe)
    return int(safe.value)


def _choose(num_workers: int | str, force_zero_on_windows: bool) -> Choice:
    if force_zero_on_windows and num_workers and is_windows():
        reason = f"zero workers on Windows were requested but are not needed: {WHY_NOT_ZERO}"
        return Choice(0, reason, "asked")
    if isinstance(num_workers, str):
        return Choice(num_workers, "as requested", "asked")
    return choose_safe_workers(quick_facts(), num_workers)


def _warn_of(num_workers: int | str, safe: Choice) -> None:
    """Warn if the number differs. Must be called directly by a public function (``stacklevel``)."""
    if safe.value != num_workers:
        text = f"num_workers={num_workers!r} becomes {safe.value}: {safe.reason}"
        warnings.warn(text, stacklevel=3)


def get_safe_num_workers_table(requested: Iterable[int] = USUAL_REQUESTS) -> dict[int, int]:
    """Return a dict from each requested number of workers to the number that is safe here.

    Example:
        >>> list(get_safe_num_workers_table())
        [0, 1, 2, 4, 8]
        >>> get_safe_num_workers_table((0, 1))
        {0: 0, 1: 1}
    """
    table = tabulate_safe_workers(quick_facts(), requested)
    return {asked: int(safe.value) for asked, safe in table.items()}


def print_safe_num_workers_table(requested: Iterable[int] = USUAL_REQUESTS) -> None:
    """Print the table of safe worker counts, with a reason for each row.

    Example:
        >>> print_safe_num_workers_table((0, 1))
        Safe num_workers
          requested  0 -> safe  0  (as requested)
          requested  1 -> safe  1  (as requested)
    """
    print("Safe num_workers")
    for asked, safe in tabulate_safe_workers(quick_facts(), requested).items():
        print(f"  requested {asked:>2} -> safe {safe.value:>2}  ({safe.reason})")


def print_dataloader_config(
    num_workers: int | str, batch_size: int, seed: int | None = None, shuffle: bool = False
) -> None:
    """Print the plan of a loader with these arguments, with a reason for each choice.

    Example:
        >>> print_dataloader_config(num_workers=0, batch_size=32, seed=42, shuffle=True)
        DataLoader
          batch_size          32
          shuffle             True
          seed                42 (the same order and randomness in each run)
          ...
          num_workers         0 (asked: num_workers was given)
          ...
    """
    plan = make_plan(
        quick_facts(), LoaderRequest(num_workers=num_workers, batch_size=batch_size), Workload()
    )
    told = "drawn like torch's base seed" if seed is None else "the same order and randomness"
    rows = {
        "batch_size": str(batch_size),
        "shuffle": str(shuffle),
        "seed": f"None ({told})" if seed is None else f"{seed} ({told} in each run)",
        **{name: str(choice) for name, choice in plan.choices.items()},
    }
    _print_rows("DataLoader", rows)
    for text in plan.warnings:
        print(f"  warning: {text}")


# -- seeds -----------------------------------------------------------------------------------------


def set_seed(seed: int, deterministic: bool = True, benchmark: bool = False) -> dict[str, Any]:
    """Seed every generator, and switch torch to deterministic algorithms where they exist.

    An operation without a deterministic algorithm warns, so existing training code keeps running.
    With :func:`penstock.seed_all` it raises.

    Returns:
        A dict of the arguments ``seed``, ``deterministic`` and ``benchmark``, and of the settings
        that were ``set`` and ``not_set``.

    Example:
        >>> import random
        >>> info = set_seed(42, deterministic=False)
        >>> first = random.random()
        >>> info["seed"], set_seed(42, deterministic=False) == info, random.random() == first
        (42, True, True)
    """
    from penstock.order.seeding import seed_all

    told = seed_all(seed, "warn" if deterministic else False, benchmark)
    return {
        "seed": seed,
        "deterministic": deterministic,
        "benchmark": benchmark,
        "set": list(told.done),
        "not_set": list(told.cannot),
    }


def verify_reproducibility(verbose: bool = True) -> bool:
    """Return True if a small training run gives bit-identical results twice on each device.

    It uses torch's current settings: deterministic algorithms after ``set_seed(...,
    deterministic=True)``, otherwise torch's defaults. All state is restored afterwards. To check a
    loader, use :func:`penstock.verify`.

    Example:
        >>> verify_reproducibility(verbose=False)
        True
    """
    import torch

    from penstock.verify.training import MODES, verify_training

    is_on = torch.are_deterministic_algorithms_enabled()
    verdict = verify_training(modes={name: mode for name, mode in MODES.items() if mode == is_on})
    if verbose:
        print(verdict)
        if not verdict.is_same and not is_on:
            print("Try: call set_seed(42, deterministic=True) first.")
    return verdict.is_same


# -- ROCm ------------------------------------------------------------------------------------------


def setup_rocm_multiprocessing(force: bool = True, verbose: bool = True) -> None:
    """Set multiprocessing's start method to spawn, for user code that starts processes.

    Penstock's workers do not need this, neither before nor after torch is imported. They are forked
    from a process that has never used a GPU.

    Args:
        force: Replace a start method that is already set.
        verbose: Print the result.

    Example:
        >>> setup_rocm_multiprocessing(verbose=False)
        >>> multiprocessing.get_start_method()
        'spawn'
        >>> multiprocessing.set_start_method(None, force=True)  # restore the default
    """
    try:
        multiprocessing.set_start_method("spawn", force=force)
        told = "multiprocessing uses 'spawn' from now on. Penstock's workers do not need this"
    except RuntimeError as error:
        stays = multiprocessing.get_start_method(allow_none=True)
        told = f"multiprocessing still uses {stays!r}: {error}. Penstock's workers are not affected"
    if verbose:
        print(told)


def patch_dataloader(verbose: bool = True) -> None:
    """Make every ``torch.utils.data.DataLoader`` use Penstock's engine.

    No process with an open GPU is forked. Workers are kept between epochs only if the code sets
    ``persistent_workers=True``, because starting new ones takes milliseconds on Linux.
    :func:`penstock.patch` does the same and takes options. :func:`penstock.unpatch` undoes it.

    Example:
        >>> patch_dataloader()
        torch's DataLoader uses Penstock from now on
        >>> import penstock
        >>> penstock.unpatch()
    """
    from penstock.integrations.patch import patch

    patch()
    if verbose:
        print("torch's DataLoader uses Penstock from now on")


def print_rocm_info() -> None:
    """Print facts about a ROCm machine. Opens no GPU and does not import torch.

    Example:
        >>> print_rocm_info()
        ROCm
          torch ...
          GPUs ...
          start method ...
          workers ...
          cores ...
          MIOPEN_DEBUG_CONV_IMPLICIT_GEMM ...
          HSA_OVERRIDE_GFX_VERSION ...
          ROCM_PATH ...
    """
    facts = machine()
    build = " ".join(filter(None, (facts.torch_build, facts.torch_build_version)))
    cards = [
        f"{gpu.name} ({', '.join(filter(None, (gpu.architecture, _memory(gpu.memory_bytes))))})"
        for gpu in facts.gpus
    ]
    plan = make_plan(facts, LoaderRequest(), Workload())
    rows = {
        "torch": f"{facts.torch} ({build})" if facts.torch else "not installed",
        "GPUs": ", ".join(cards) or "none found",
        "start method": facts.start_method,
        "workers": str(plan.start_method),
        "cores": f"{facts.usable_cores} of {facts.num_cpus} usable",
        **{name: os.environ.get(name) or "not set" for name in _ROCM_VARIABLES},
    }
    _print_rows("ROCm", rows)
    for problem in check_override(facts):
        print(f"  {problem.severity}: {problem.what}. Try: {problem.cure}")


def _memory(num_bytes: int | None) -> str:
    return "" if num_bytes is None else size(num_bytes)


def _print_rows(title: str, rows: dict[str, str]) -> None:
    width = max(len(name) for name in rows)
    print("\n".join([title, *(f"  {name:<{width}}  {value}" for name, value in rows.items())]))


def __getattr__(name: str) -> object:  # lazy, because these names need torch
    if name in ("FallbackConv2d", "apply_full_patch"):
        from penstock import conv

        return getattr(conv, name)
    raise AttributeError(f"module 'penstock.legacy' has no attribute {name!r}")
