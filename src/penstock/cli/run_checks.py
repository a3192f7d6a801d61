"""What was typed behind ``penstock run``, as plain values, checked before the script begins.

Without torch: it is imported by the script, or not at all.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from penstock.errors import BadArgument

MAX_RESTARTS = 1_000_000


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """What was typed.

    Args:
        target: A script, or with ``is_module`` a module.
        conv: For :func:`penstock.conv.bypass_convolutions`; None: as ``PENSTOCK_CONV`` says.
        trace: A file that gets the timeline of all loaders.
        patch: Options for :func:`penstock.patch`.
    """

    target: str
    arguments: tuple[str, ...] = ()
    is_module: bool = False
    seed: int | None = None
    conv: str | None = None
    trace: str | None = None
    patch: dict[str, Any]


def make_options(
    *,
    target: str,
    arguments: Sequence[str] | None = None,
    is_module: bool = False,
    seed: int | None = None,
    workers: str | None = None,
    start_method: str | None = None,
    persistent_workers: bool = False,
    on_error: str = "raise",
    max_bad: float | None = None,
    bad_samples_file: str | None = None,
    max_restarts: int = 100,
    sample_timeout_s: float | None = None,
    conv: str | None = None,
    trace: str | None = None,
) -> RunOptions:
    """From the command's parameters. Files are meant from where the command was typed."""
    return RunOptions(
        target=target,
        arguments=tuple(arguments or ()),
        is_module=is_module,
        seed=seed,
        conv=conv,
        trace=trace and os.path.abspath(trace),  # the script may go elsewhere
        patch={
            "num_workers": int(workers) if workers and workers != "auto" else workers,
            "multiprocessing_context": start_method,
            "persistent_workers": persistent_workers,
            "on_error": on_error,
            "max_bad": int(max_bad) if max_bad is not None and max_bad % 1 == 0 else max_bad,
            "bad_samples_file": bad_samples_file and os.path.abspath(bad_samples_file),
            "max_restarts": max_restarts,
            "sample_timeout_s": sample_timeout_s,
        },
    )


def check_options(options: RunOptions) -> None:
    """Say at once what would else be found out when the script has imported torch.

    Raises:
        BadArgument: A value is none.
    """
    seed, request = options.seed, options.patch
    if seed is not None and not -(1 << 63) <= seed < 1 << 64:
        raise BadArgument(f"--seed {seed} does not fit in 64 bits", remedy="--seed 0")
    bad, timeout_s, restarts = (
        request["max_bad"],
        request["sample_timeout_s"],
        request["max_restarts"],
    )
    if bad is not None and not (0 <= bad < 1 or (isinstance(bad, int) and bad >= 1)):
        raise BadArgument(
            f"--max-bad {bad} is neither a number of samples nor a part of them below 1",
            remedy="--max-bad 100, or --max-bad 0.01",
        )
    if timeout_s is not None and not 0 < timeout_s < math.inf:
        raise BadArgument(
            f"--sample-timeout-s {timeout_s} is no number of seconds above 0",
            remedy="--sample-timeout-s 60",
        )
    if not 0 <= restarts <= MAX_RESTARTS:
        raise BadArgument(
            f"--max-restarts {restarts} is no number from 0 to {MAX_RESTARTS}",
            remedy="--max-restarts 100",
        )
    file = request["bad_samples_file"]
    if file is not None and not os.path.isdir(os.path.dirname(file)):
        raise BadArgument(
            f"--bad-samples-file: there is no folder {os.path.dirname(file)!r}",
            remedy=f"mkdir -p {os.path.dirname(file)}",
        )
    if options.trace is not None:
        from penstock.options import check_trace

        check_trace("trace", options.trace)
