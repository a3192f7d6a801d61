"""Blocks: the interface of datasets that are stored in blocks of adjacent samples.

    BlockDataset    the interface: samples by index, and where each block begins
    BlockReader     base class of readers: a subclass reads one block and takes samples from it

A block is what one read of the storage gives: a row group, a chunk, a few MiB of an archive. Its
samples are adjacent. The block order (:class:`penstock.BlockOrder`) shuffles so that few blocks are
needed at a time, and a reader keeps the blocks it used last.
"""

from __future__ import annotations

import functools
import operator
import os
import sys
import threading
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from penstock.errors import BadArgument
from penstock.order.samplers import BlockOrder, check_block_starts

if TYPE_CHECKING:
    import numpy.typing as npt

NUM_MIXED = 16
"""Number of blocks that the block order of a reader shuffles together."""
_NUM_TOUCHED = 2 * NUM_MIXED
_WHOLE_FROM, _WHOLE_SHARE = 4, 8
"""See :class:`BlockTouches`."""


class BlockDataset(Protocol):
    """A dataset of indexed samples, stored in blocks.

    A dataset can also have ``__getitems__(indices)``, which returns a list of samples. The engine
    then loads each batch with one call. Datasets whose samples draw random numbers do not have it,
    because each sample has its own randomness.
    """

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Any: ...

    @property
    def block_starts(self) -> npt.NDArray[np.int64]:
        """Index of the first sample of each block, ascending, followed by the number of samples."""
        ...


class BlockReader:
    """Base class of datasets that read their storage in blocks.

    A subclass passes the block starts to ``__init__`` and has two methods: ``_read_block`` reads a
    block, ``_sample`` takes a sample from it. The base class adds indexing, batches, the block
    order, and a cache of the last blocks in each process. Pickling does not include the cache.

    Open files do not reach other processes. A subclass opens them in ``_read_block``, or keeps them
    in :class:`~penstock.sources.source_files.SourceFiles`.

    Args:
        block_starts: Index of the first sample of each block, followed by the number of samples.
        transforms: Functions of a field's value, by field name. The subclass applies them.
        fields: Names of the fields, for the error about a transform without one.

    Example:
        A reader of text files, with a block for each file and a sample for each line:

        >>> import pathlib, tempfile, penstock
        >>> class TextLines(penstock.BlockReader):
        ...     def __init__(self, paths):
        ...         self.paths = list(paths)
        ...         counts = [len(path.read_text().splitlines()) for path in self.paths]
        ...         super().__init__(np.cumsum([0, *counts]))
        ...
        ...     def _read_block(self, block):
        ...         return self.paths[block].read_text().splitlines()
        ...
        ...     def _sample(self, content, row):
        ...         return {"text": content[row]}
        >>> folder = pathlib.Path(tempfile.mkdtemp())
        >>> _ = (folder / "a.txt").write_text("one\\ntwo\\n")
        >>> _ = (folder / "b.txt").write_text("three\\n")
        >>> lines = TextLines(sorted(folder.glob("*.txt")))
        >>> len(lines), lines[-1], lines.block_starts.tolist()
        (3, {'text': 'three'}, [0, 2, 3])
        >>> order = lines.block_order(seed=1)
        >>> [batch["text"] for batch in penstock.DataLoader(lines, batch_size=3, sampler=order)]
        [['one', 'three', 'two']]
    """

    cache_bytes = 64 << 20
    """Limit of the cache of blocks in each process."""

    def __init__(
        self,
        block_starts: npt.ArrayLike,
        *,
        transforms: Mapping[str, Callable[[Any], Any]] | None = None,
        fields: Sequence[str] = ("jpg",),
    ) -> None:
        self._block_starts = check_block_starts(block_starts)
        self._length = int(self._block_starts[-1])
        self._transforms = check_transforms(transforms, fields)
        self._cache: BlockCache | None = None

    # -- for subclasses --------------------------------------------------------------------------

    def _read_block(self, block: int) -> Any:
        """Read and return the content of a block."""
        raise NotImplementedError

    def _sample(self, content: Any, row: int) -> Any:
        """Return sample ``row`` of a block, counted from its first sample."""
        raise NotImplementedError

    def _take(self, block: int, rows: list[int]) -> list[Any]:
        """Return samples of one block. Override it to read less than whole blocks."""
        content = self._block(block)
        return [self._sample(content, row) for row in rows]

    # -- samples ---------------------------------------------------------------------------------

    def __len__(self) -> int:
        return self._length

    @property
    def block_starts(self) -> npt.NDArray[np.int64]:
        """Index of the first sample of each block, followed by the number of samples."""
        return self._block_starts

    @property
    def num_blocks(self) -> int:
        return len(self._block_starts) - 1

    def __getitem__(self, index: int) -> Any:
        place = resolve_index(index, self._length)
        starts = self._block_starts.data  # searchsorted takes ten times as long for one number
        block = bisect_right(starts, place) - 1
        return self._take(block, [place - starts[block]])[0]

    @property
    def __getitems__(self) -> Callable[[Sequence[int]], list[Any]]:
        """Load several samples. Not available with transforms, whose randomness is per sample."""
        if self._transforms:
            raise AttributeError("samples with transforms are loaded one by one")
        if type(self).__getitem__ is not BlockReader.__getitem__:
            raise AttributeError("this class overrides __getitem__")
        return self._many

    def _many(self, indices: Sequence[int]) -> list[Any]:
        """Return the samples in the given order. Each block is needed once."""
        places = np.array([resolve_index(index, self._length) for index in indices], np.int64)
        blocks = self._block_starts.searchsorted(places, side="right") - 1
        rows = places - self._block_starts[blocks]
        wanted: dict[int, list[int]] = {}
        for order, block in enumerate(blocks.tolist()):
            wanted.setdefault(block, []).append(order)
        samples: list[Any] = [None] * len(places)
        for block, orders in wanted.items():
            for order, sample in zip(orders, self._take(block, rows[orders].tolist()), strict=True):
                samples[order] = sample
        return samples

    def block_order(
        self, *, seed: int = 0, num_mixed: int = NUM_MIXED, **keywords: Any
    ) -> BlockOrder:
        """Return a shuffled order that needs few blocks at a time. Pass it as ``sampler=``.

        Args:
            seed: A 64-bit integer.
            num_mixed: Number of blocks whose samples are shuffled together.
            keywords: Other options of :class:`penstock.BlockOrder`.
        """
        return BlockOrder(
            self._length,
            block_starts=self._block_starts,
            seed=seed,
            num_mixed=num_mixed,
            **keywords,
        )

    # -- object storage --------------------------------------------------------------------------

    @property
    def follow_epoch(self) -> Callable[..., None]:
        """Publishes a loader's order to the cache. Exists for object storage only."""
        follow: Callable[..., None] = self._remote().follow
        return functools.partial(follow, self)

    @property
    def count_network(self) -> Callable[[], dict[str, Any]]:
        """Counts downloads. Exists for object storage only."""
        count: Callable[[], dict[str, Any]] = self._remote().count_network
        return count

    @property
    def plan_notes(self) -> Sequence[str]:
        """Notes for the plan of a loader."""
        found = getattr(self, "_files", None)
        return list(getattr(found, "plan_notes", ()))

    def _remote(self) -> Any:
        return getattr(self, "_files", None)  # local files have no such methods

    # -- cache -----------------------------------------------------------------------------------

    def _cached_blocks(self) -> BlockCache:
        """Return this process's cache. A forked process begins with an empty one."""
        cache = self._cache
        if cache is None or cache.process != os.getpid():
            cache = self._cache = BlockCache(self.cache_bytes)
        return cache

    def _block(self, block: int) -> Any:
        """Return a block's content from the cache, or read it."""
        cache = self._cached_blocks()
        content = cache.get(block)
        if content is None:
            content = self._read_block(block)
            cache.put(block, content)
        return content

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_cache": None}


class BlockCache:
    """The blocks used last in one process, up to a number of bytes. The last one always stays.

    Example:
        >>> cache = BlockCache(max_bytes=10)
        >>> for block in range(3):
        ...     cache.put(block, np.zeros(4, np.uint8))
        >>> cache.get(0), cache.get(2), len(cache)
        (None, array([0, 0, 0, 0], dtype=uint8), 2)
    """

    draws_nothing = True

    def __init__(self, max_bytes: int) -> None:
        self.process = os.getpid()
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._blocks: OrderedDict[int, tuple[Any, int]] = OrderedDict()
        self._mutex = threading.Lock()

    def __len__(self) -> int:
        return len(self._blocks)

    def __contains__(self, block: int) -> bool:
        return block in self._blocks

    def get(self, block: int) -> Any:
        """Return the content of a block, or None."""
        with self._mutex:
            found = self._blocks.get(block)
            if found is None:
                return None
            self._blocks.move_to_end(block)
            return found[0]

    def put(self, block: int, content: Any) -> None:
        num_bytes = count_bytes(content)
        with self._mutex:
            if block in self._blocks:  # another thread has read it too
                return
            self._blocks[block] = content, num_bytes
            self._num_bytes += num_bytes
            while self._num_bytes > self._max_bytes and len(self._blocks) > 1:
                _, (_, removed) = self._blocks.popitem(last=False)
                self._num_bytes -= removed


class BlockTouches:
    """How many samples of each block were wanted recently, to decide when to read blocks whole.

    A block is read whole once 4 of its samples and an 8th of them were wanted, while few other
    blocks were. A block order does so soon, and a random order over many blocks seldom does.

    Example:
        >>> touches = BlockTouches()
        >>> [touches.add(7, num_rows=2, num_samples=32) for _ in range(3)]
        [False, True, False]
    """

    def __init__(self) -> None:
        self._touched: OrderedDict[int, int] = OrderedDict()
        self._mutex = threading.Lock()

    def __reduce__(self) -> tuple[Any, ...]:
        return BlockTouches, ()

    def add(self, block: int, num_rows: int, num_samples: int) -> bool:
        """Note that samples of a block are wanted. Returns True if it should be read whole."""
        with self._mutex:
            num_rows += self._touched.pop(block, 0)
            if num_rows >= max(_WHOLE_FROM, num_samples // _WHOLE_SHARE):
                return True
            self._touched[block] = num_rows
            if len(self._touched) > _NUM_TOUCHED:
                self._touched.popitem(last=False)
            return False


def count_bytes(content: Any) -> int:
    """Return the approximate size of a block in memory.

    Example:
        >>> count_bytes({"x": np.zeros(4, np.int64), "y": [np.zeros(3, np.uint8)]})
        35
    """
    found = getattr(content, "nbytes", None)
    if isinstance(found, int):
        return found
    if isinstance(content, (list, tuple)):
        return sum(count_bytes(one) for one in content)
    if isinstance(content, Mapping):
        return sum(count_bytes(one) for one in content.values())
    return sys.getsizeof(content)


def resolve_index(index: Any, length: int) -> int:
    """Return an index in 0 .. length - 1. Negative ones count from the end, as in a list."""
    try:
        place = operator.index(index)
    except TypeError:
        raise TypeError(f"a sample index must be an integer, not {index!r}") from None
    if not -length <= place < length:
        raise IndexError(f"index {place} is out of range for {length} samples")
    return place + length if place < 0 else place


def refuse_unknown_fields(names: Iterable[str], fields: Sequence[str]) -> None:
    """Raise BadArgument for the first name that is not a field."""
    for name in names:
        if name not in fields:
            raise BadArgument(
                f"the samples have no field {name!r}; their fields are {', '.join(fields)}"
            )


class ReadOptions(NamedTuple):
    """The options of :func:`penstock.open_dataset` that all formats have."""

    columns: Sequence[str] | str | None = None
    decode: bool = True
    transforms: Mapping[str, Callable[[Any], Any]] | None = None
    allow_pickle: bool = False

    def choose(self, names: Sequence[str], path: str) -> list[str]:
        """Return the fields to load: those asked for, in that order, or all of ``names``.

        Raises:
            BadArgument: A field that was asked for does not exist.
        """
        columns: Any = self.columns
        if columns is None:
            return list(names)
        is_list = isinstance(columns, Iterable) and not isinstance(columns, str)
        chosen = list(columns) if is_list else [columns]
        unknown = [name for name in chosen if name not in names]
        if unknown or not chosen:
            raise BadArgument(
                f"{path} has no field {unknown[0]!r}; its fields are {', '.join(map(str, names))}"
                if unknown
                else "columns= is empty, so samples would have no fields",
                remedy=f"columns=[{names[0]!r}], or no columns= for all fields" if names else None,
            )
        return [str(name) for name in chosen]


def check_transforms(
    transforms: Any, fields: Sequence[str] = ("image",)
) -> dict[str, Callable[[Any], Any]]:
    """Return the transforms as a dict.

    Args:
        fields: Fields of the samples. The error for a function without a field names one of them.
    """
    if transforms is None:
        return {}
    if not isinstance(transforms, Mapping):
        field = next((one for one in fields if one in ("image", "jpg")), [*fields, "image"][0])
        raise BadArgument(
            "transforms= must be a dict from field names to functions",
            remedy=f"transforms={{{field!r}: penstock.RandomResizedCrop(224)}}",
        )
    for name, transform in transforms.items():
        if not callable(transform):
            raise BadArgument(
                f"the transform of {name!r} is {transform!r}, which is not callable",
                remedy=f"transforms={{{name!r}: function}}",
            )
    return dict(transforms)
