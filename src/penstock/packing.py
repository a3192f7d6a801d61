"""``penstock.pack``: writes a packed set with the loader's workers.

pack() --- inspect_source: a few samples ---> PackSpec
       --- map(write piece, numbers) -> worker processes (or the caller's ``map``)
       <-- a record per piece ---------
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

from penstock.errors import BadArgument, TooManyBad, warn_user
from penstock.loader import DataLoader
from penstock.machine.collect import quick_facts
from penstock.options import check_count
from penstock.order.sample_randomness import SampleRandomness
from penstock.sources.pack_source import SHARD_BYTES, EncodedSamples, inspect_source
from penstock.sources.packed import Packed
from penstock.sources.packed_writer import Map, PackSpec, pack_into, refuse_finished
from penstock.verify.hashing import digest

_NUM_TWICE, _LONGEST_S = 4, 1.0
"""Number of samples loaded twice to detect randomness, and the time limit for it."""
PIECE_S, LONG_PIECE_S = 2.0, 30.0
"""Duration of a piece where there are few shards for each worker, and where there are many."""
_MAX_PIECES = 4096


def pack(
    dataset: Any,
    path: str | os.PathLike[str],
    *,
    fields: Any = None,
    workers: int | str = "auto",
    map: Map | None = None,
    on_error: Any = "raise",
    max_bad: float | None = None,
    seed: int = 0,
    shard_bytes: int = SHARD_BYTES,
    progress: bool | None = None,
) -> Packed:
    """Write a dataset to a folder that can be read at memory speed.

    If packing is interrupted at any time, even by ``kill -9``, the same call continues from the
    last finished piece, which is a few seconds of work. The result is identical, byte for byte.
    Nothing is ever overwritten.

    Args:
        dataset: Any object with ``len()`` and ``dataset[i]``. Samples are numbers, arrays, tensors,
            text, bytes, images, or a tuple or dict of them.
        path: A folder that is empty, does not exist yet, or contains an unfinished run of the same
            packing. Or an address in object storage, such as ``s3://bucket/set``: shards are
            uploaded while the next ones are packed, the manifest last.
        fields: Names for the fields of a tuple, or a dict from names to :class:`penstock.Field`
            (or just a dtype).
        workers: Number of worker processes. "auto" means one per core. With 0, this process loads
            and writes.
        map: Replaces the worker processes. Called as ``map(function, numbers)``. Results can arrive
            in any order.
        on_error: Policy for a sample that raises: "raise", "skip", "replace" (by a different
            sample), or a function of (index, error). ``Packed.bad_samples`` keeps the list.
        max_bad: Maximum number of bad samples (a count, or a fraction below 1.0). More are an
            error.
        seed: Seed for random samples. Packing twice with the same seed gives the same bytes.
        shard_bytes: Approximate size of each file.
        progress: Show a progress bar. If None, it is shown if stderr is a terminal.

    Returns:
        The packed set, opened.

    Raises:
        CannotPack: A sample differs in form from the first ones, or needs pickle to be stored.
        AlreadyThere: ``path`` already contains something.
        CannotWrite: The disk is full, or ``path`` is not writable.
        TooManyBad: There are more bad samples than ``max_bad``. The good samples are packed.

    Warns:
        UserWarning: Samples are random. Random transforms are frozen when packed.

    Example:
        >>> import tempfile, numpy as np, penstock
        >>> folder = tempfile.mkdtemp() + "/digits"
        >>> images = np.arange(2 * 3 * 4, dtype=np.uint8).reshape(2, 3, 4)
        >>> packed = penstock.pack(list(zip(images, [7, 5])), folder, fields=["image", "label"])
        >>> packed[1][1], np.load(folder + "/image-00000.npy").shape
        (5, (2, 3, 4))
    """
    target = os.fspath(path)
    is_remote = "://" in target
    if is_remote:
        from penstock.sources.remote.set_copy import refuse_set, upload_while_packing

        refuse_set(target)
    else:
        if ":" in target:
            from penstock.sources.remote.address import refuse_single_slash

            refuse_single_slash(target)
        refuse_finished(target)
    if max_bad is not None and on_error == "raise":
        warn_user(
            f"max_bad={max_bad} has no effect, because on_error='raise' stops at the first bad "
            "sample. Try: pack(..., on_error='skip', max_bad=...)"
        )
    random_check = _RandomSampleCheck()
    spec, fetch = inspect_source(
        dataset,
        fields=fields,
        on_error=on_error,
        seed=seed,
        shard_bytes=shard_bytes,
        on_probe=random_check.note,
    )
    random_check.warn(fetch)
    if map is not None and not callable(map):
        raise BadArgument(f"map={map!r} must be callable", remedy="map=executor.map")
    num_workers = _checked_workers(workers)
    if not is_remote:  # shards are uploaded as they are finished
        spec = replace(spec, piece_rows=choose_piece_rows(spec, num_workers))
    map = map or pool_map(num_workers)
    with bar("packing", spec.num_samples, progress) as tell:

        def write(folder: str, map: Map, max_kept: int | None = None) -> None:
            pack_into(folder, spec, fetch, map=map, on_progress=tell, max_kept=max_kept)

        if is_remote:
            upload_while_packing(target, spec, write, map)
        else:
            write(target, map)
    packed = Packed(target)
    _check_bad(target, packed.bad_samples, spec.num_samples, max_bad)
    return packed


class _RandomSampleCheck:
    """Warns if samples are random, because packing freezes them."""

    def __init__(self) -> None:
        self._seen: dict[int, bytes] = {}

    def note(self, index: int, sample: Any) -> None:
        if len(self._seen) < _NUM_TWICE:
            with contextlib.suppress(Exception):
                self._seen[index] = digest(sample)

    def warn(self, samples: EncodedSamples) -> None:
        """Load a few samples again with a different seed, and warn if one differs."""
        others = SampleRandomness(samples.seed + 1)
        limit = time.monotonic() + _LONGEST_S
        for index, before in self._seen.items():
            try:
                again = digest(others.call(samples.get, index, index))
            except Exception:  # on_error handles bad samples
                continue
            if again != before:
                warn_user(
                    f"sample {index} is different each time it is loaded, but the packed sample is "
                    "the same in every epoch. Pack the dataset without its random transforms, and "
                    "pass those to Packed(..., transforms=)"
                )
                return
            if time.monotonic() > limit:
                return


def choose_piece_rows(spec: PackSpec, workers: int) -> int:
    """Return the number of samples that a worker packs at a time, or 0 for whole shards.

    A set with few shards is split further, so that all workers have work, the progress bar moves,
    and an interruption loses seconds. With many shards, joining pieces costs more than it gains.

    Example:
        >>> spec = PackSpec(num_samples=600, shard_rows=600, form="value", fields=(),
        ...                 fingerprint="", attributes={}, sample_bytes=8, sample_s=0.1)
        >>> choose_piece_rows(spec, workers=2), choose_piece_rows(replace(spec, sample_s=1e-3), 2)
        (20, 0)
    """
    is_split = spec.num_shards < 4 * max(1, workers)
    rows = int((PIECE_S if is_split else LONG_PIECE_S) / max(spec.sample_s, 1e-9))
    rows = max(1, rows, -(-spec.num_samples // _MAX_PIECES))
    return rows if rows < spec.shard_rows else 0


def pool_map(workers: int) -> Map:
    """Return a ``map`` that uses the loader's workers. An item is retried if its worker dies."""

    def run(function: Callable[[int], Any], items: Iterable[int]) -> Iterator[Any]:
        results = _Results(function, list(items))
        num_workers = min(workers, len(results)) if len(results) > 1 else 0
        depth: dict[str, Any] = {"prefetch_factor": 1} if num_workers else {}
        yield from DataLoader(
            results,
            batch_size=None,
            num_workers=num_workers,
            collate_fn=_as_it_is,
            in_order=False,
            randomness="worker",
            on_error="raise",  # also below `penstock run --on-error skip`
            sample_timeout_s=None,
            **depth,
        )

    return run


class _Results:
    """A dataset whose samples are the results of ``function`` for each item."""

    def __init__(self, function: Callable[[int], Any], items: list[int]) -> None:
        self._function = function
        self._items = items

    def __len__(self) -> int:
        return len(self._items)

    def __getitem__(self, place: int) -> Any:
        return self._function(self._items[place])


def _as_it_is(result: Any) -> Any:
    return result


def _checked_workers(workers: int | str) -> int:
    if workers == "auto":
        return quick_facts().usable_cores
    return check_count("workers", workers, 0, 4096)


def _check_bad(
    folder: str, bad: list[tuple[int, str]], num_samples: int, max_bad: float | None
) -> None:
    if max_bad is None:
        return
    most = max_bad * num_samples if 0 < max_bad < 1 else max_bad
    if (num_bad := len(bad)) > most:
        raise TooManyBad(
            f"{num_bad} of {num_samples} samples are bad, more than max_bad={max_bad} allows",
            where=f"{folder}, which was packed anyway. Packed({folder!r}).bad_samples lists them",
            num_bad=num_bad,
        ) from RuntimeError("sample {}: {}".format(*bad[-1]))


@contextlib.contextmanager
def bar(name: str, num_samples: int, request: bool | None) -> Iterator[Callable[[int, int], None]]:
    """Show a progress bar with rate and remaining time. Yields the function that updates it."""
    if not (sys.stderr.isatty() if request is None else request):
        yield lambda done, total: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn(name),
        BarColumn(),
        TextColumn("{task.completed:.0f}/{task.total:.0f} samples, {task.fields[rate]}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True)) as shown:
        task = shown.add_task(name, total=num_samples, rate="")

        def tell(done: int, total: int) -> None:
            samples = num_samples * done / max(1, total)
            speed = shown.tasks[0].speed
            shown.update(task, completed=samples, rate=f"{speed:.0f}/s" if speed else "")

        yield tell
