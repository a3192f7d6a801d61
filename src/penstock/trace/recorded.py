"""What a loader was told about tracing, and what it can say of its run: the part about that."""

from __future__ import annotations

import os
import time
import warnings
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from penstock.errors import BadArgument, BadTrace
from penstock.machine.host import memory_bytes, usable_cores
from penstock.trace.record import BATCH, LEASE, Record
from penstock.trace.recorder import Recorder, Tracing, make_recorder
from penstock.trace.transform_spans import trace_steps

if TYPE_CHECKING:
    from penstock import Timeline

SUFFIXES = (".json", ".json.gz", ".html")


@dataclass(frozen=True, kw_only=True)
class Stats:
    """How a loader does just now: over the last few thousand batches of its present epoch.

    Args:
        stall_share: Of the time, the part in which the training loop waited for a batch.
        step_share: The part that it worked with the batches.
        num_ready: Batches that were loaded and waited to be taken, at the last look.
    """

    num_batches: int = 0
    batches_per_s: float = 0.0
    samples_per_s: float = 0.0
    stall_share: float = 0.0
    step_share: float = 0.0
    num_ready: int = 0
    is_off: bool = False
    """Nothing is known: the loader was told to note nothing."""

    def __str__(self) -> str:
        if self.is_off:
            return "nothing is known: tracing is off (trace=False, or PENSTOCK_TRACE=0)"
        return (
            f"{self.num_batches} batches, {self.samples_per_s:,.0f} samples/s; "
            f"waiting {self.stall_share:.0%}, step {self.step_share:.0%}, {self.num_ready} ready"
        )


class Recorded:
    """The trace keyword of a DataLoader, ``timeline()`` and ``stats()``."""

    trace: Any = None
    dataset: Any
    batch_size: int | None
    _recorder: Recorder | None = None

    def _settle_trace(self, trace: Any) -> None:
        self.trace = trace
        self._asked = checked_trace(trace)

    def _trace_setup(self) -> dict[str, Any]:
        """For the engine's Setup: who takes notes."""
        if self._recorder is None:
            asked = getattr(self, "_asked", None)
            self._recorder = make_recorder(asked)
            if self._recorder.traces_steps:
                trace_steps()  # for what is loaded in this process
            if isinstance(asked, Tracing) and asked.file is not None:
                _claim(os.fspath(asked.file), self)
                writer = _Writer(self._recorder, os.fspath(asked.file))
                self._recorder.on_end = writer.write_sometimes
                # When the loader is gone, or at the end of the program.
                weakref.finalize(self, writer.write)
        return {"log": self._recorder}

    def _close_trace(self) -> None:
        """Write what there is, where that was asked for."""
        if self._recorder is not None:
            self._recorder.on_end()

    def _note_facts(self, setup: Any) -> None:
        """What the timeline should know about this loader."""
        if self._recorder is not None:
            self._recorder.facts.update(
                dataset=type(self.dataset).__name__,
                batch_size=self.batch_size,
                num_workers=setup.num_workers,
                pool=setup.pool,
                start_method=setup.start_method,
                prefetch_factor=setup.depth,
                in_order=setup.in_order,
                cores=usable_cores(),
                memory_bytes=memory_bytes()[0],
                persistent_workers=bool(getattr(self, "persistent_workers", False)),
                collate_fn=_name_collate(getattr(self, "collate_fn", None)),
                is_off=self._recorder.ring is None,
                device=None if setup.make_prefetcher is None else str(getattr(self, "device", "")),
            )

    def timeline(self) -> Timeline:
        """Where the time went so far: of the whole run with ``trace=``, else of its last part.

        Example:
            >>> from penstock import DataLoader
            >>> loader = DataLoader(range(8), batch_size=4, num_workers=1)
            >>> for batch in loader:
            ...     pass
            >>> timeline = loader.timeline()
            >>> timeline.num_batches, [lane.name for lane in timeline.lanes][:2]
            (2, ['main', 'worker 0'])
        """
        import penstock  # the front page knows who draws; this room does not

        return penstock.Timeline(self._records())

    def _records(self) -> dict[str, Any]:
        return (self._recorder or Recorder()).records()

    def stats(self) -> Stats:
        """Rates and waits just now; asking costs about a millisecond, being asked nothing.

        Example:
            >>> from penstock import DataLoader
            >>> loader = DataLoader(range(8), batch_size=4)
            >>> for batch in loader:
            ...     pass
            >>> loader.stats().num_batches
            2
        """
        if self._recorder is None:
            return Stats()
        is_off = self._recorder.ring is None
        return Stats(is_off=True) if is_off else _stats(self._recorder.recent())


def _name_collate(collate_fn: Any) -> str:
    from torch.utils.data import default_collate

    is_default = collate_fn is None or collate_fn is default_collate
    return "default" if is_default else "own"


def _stats(spans: list[Record]) -> Stats:
    batches = [span for span in spans if span.kind == BATCH]
    batches = [span for span in batches if span.pass_ == batches[-1].pass_]
    if not batches:
        return Stats()
    first_ns = batches[0].b or batches[0].start_ns
    total_ns = max(1, batches[-1].end_ns - first_ns)
    inline = {(span.pass_, span.batch): span for span in spans if span.kind == LEASE}
    stall_ns = 0
    for span in batches:
        load = inline.get((span.pass_, span.batch))
        stall_ns += span.a if load is None else load.end_ns - load.start_ns
    return Stats(
        num_batches=len(batches),
        batches_per_s=len(batches) * 1e9 / total_ns,
        samples_per_s=sum(span.rows for span in batches) * 1e9 / total_ns,
        stall_share=min(1.0, stall_ns / total_ns),
        step_share=sum(span.start_ns - span.b for span in batches if span.b) / total_ns,
        num_ready=batches[-1].part,
    )


_claims: weakref.WeakValueDictionary[str, Recorded] = weakref.WeakValueDictionary()
"""Which loader of this process writes to which file."""


def _claim(path: str, loader: Recorded) -> None:
    path = os.path.realpath(path)
    if _claims.get(path, loader) is not loader:
        text = f"two loaders write their trace to {path}: only that of the last one stays there"
        warnings.warn(f"{text}\n  Try: a trace= of its own for each", stacklevel=2)
    _claims[path] = loader


class _Writer:
    """Writes what a recorder holds to a file; knows the loader no longer."""

    def __init__(self, recorder: Recorder, path: str) -> None:
        import penstock

        self._recorder = recorder
        self._path = path
        self._timeline = penstock.Timeline  # now: at the end of the program it may be too late
        self._owner = os.getpid()
        self._written_s = self._took_s = 0.0
        self._has_failed = False

    def write_sometimes(self) -> None:
        """At the end of an epoch; not of each, where epochs are short and the file is long."""
        if time.monotonic() - self._written_s > 20 * self._took_s:
            self.write()

    def write(self) -> None:
        if os.getpid() != self._owner:
            return
        start_s = time.monotonic()
        try:
            self._timeline(self._recorder.records()).save(self._path)
        except BadTrace as error:  # a full disk, say: no reason to lose the training as well
            if not self._has_failed:
                warnings.warn(f"{error}\n  The run goes on without its trace.", stacklevel=2)
            self._has_failed = True
        self._written_s = time.monotonic()
        self._took_s = self._written_s - start_s


def checked_trace(trace: Any) -> Any:
    """None, False (off), or a Tracing.

    Example:
        >>> checked_trace("run.json").file
        'run.json'
    """
    if trace is None or trace is False:
        return trace
    if trace is True:
        return Tracing()
    if isinstance(trace, (str, os.PathLike)):
        trace = Tracing(file=trace)
    is_sound = isinstance(trace, Tracing) and isinstance(trace.file, (str, os.PathLike, type(None)))
    if not is_sound:
        raise BadArgument(
            f"trace={trace!r} is no path, no Tracing(...), and neither True nor False",
            remedy="DataLoader(..., trace='run.json')",
        )
    path = None if trace.file is None else os.fspath(trace.file)
    if path is not None and not path.endswith(SUFFIXES):
        raise BadArgument(
            f"trace={path!r}: a trace is written to {', '.join(SUFFIXES)}",
            remedy="DataLoader(..., trace='run.json'), or 'run.html' to look at",
        )
    if path is not None:
        _check_place(path)
    return trace


def _check_place(path: str) -> None:
    """Can a file be made there? Asked now, and not after the first epoch."""
    folder = os.path.dirname(path)
    if folder and not os.path.isdir(folder):
        if folder.startswith("~"):
            what, remedy = "only shells know '~'", f"trace=os.path.expanduser({path!r})"
        elif os.path.exists(folder):
            what, remedy = f"{folder!r} is a file, no folder", "DataLoader(..., trace='run.json')"
        else:
            what, remedy = f"there is no folder {folder!r}", f"mkdir -p {folder}"
        raise BadArgument(f"trace={path!r}: {what}", remedy=remedy)
    beside = os.path.join(folder, f".{os.path.basename(path)}.{os.getpid()}")
    try:
        with open(beside, "xb"):
            pass
        os.unlink(beside)
    except FileExistsError:
        pass  # another loader of this process writes just now
    except (OSError, ValueError) as error:
        raise BadArgument(
            f"trace={path!r} cannot be written: {getattr(error, 'strerror', None) or error}",
            remedy="DataLoader(..., trace='/tmp/run.json'), or another folder that is yours",
        ) from None
