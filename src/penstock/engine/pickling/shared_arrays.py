"""Shares large arrays of the parent with the workers without a second copy (Linux).

This maps shared memory over the user's arrays. It is done only if a copy does not fit in free
memory, or if the user requests it (``PENSTOCK_SHARE_ARRAYS=1``).

    before   parent's pages (anonymous)                 the pickle file would hold a second copy
    after    parent's pages --private map--> memfd <--private map-- every worker

The bytes are copied to a memfd in chunks, and each chunk is mapped over the pages it came from. The
array keeps its address, content and owner, and the machine holds one copy of it. Both sides map it
privately, so a process that writes gets its own copy of the page.

The following conditions are checked each time. If one does not hold, the array is copied and the
reason is recorded:

- Nothing writes between the copy and the mapping, because no other thread runs Python code.
- The memory is a block that glibc's malloc allocated with mmap, as its header shows. Freeing it is
  one munmap, and resizing it falls back to a copy. Other allocators reuse pages and rely on madvise
  to zero them. In a file mapping, madvise restores the file's content instead.
- No device or driver uses the pages. They are not locked, registered or pinned.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
import sys
import threading
import weakref
from collections.abc import Iterable
from itertools import pairwise
from types import FrameType
from typing import Any, NamedTuple

import numpy as np

from penstock.engine.memory.shared_file import SharedFile
from penstock.engine.pickling.process_maps import (
    MemoryMapping,
    address_of,
    covers,
    is_unwritten,
    list_mappings,
)

VARIABLE = "PENSTOCK_SHARE_ARRAYS"
"""``1``: share whenever it is safe. ``0``: never. Not set: only if a copy does not fit."""
_COPY_SHARE = 0.8
"""Fraction of free memory available for copies. Batches and workers need the rest."""
CHUNK_BYTES = 16 << 20
"""The amount that exists twice at any time while an array is moved."""
_PAGE = mmap.PAGESIZE
_HEADER_BYTES = 16
_IS_MMAPPED = 2
_HARMLESS_FLAGS = frozenset(
    ("rd", "wr", "mr", "mw", "me", "ac", "nr", "hg", "nh", "mg", "sd", "dd", "sr", "rr")
)
"""VmFlags of /proc/self/smaps for permissions, accounting and advice. Flags for locked memory, for
memory registered with a driver (not inherited by forks) and for userfaultfd are not included."""
_HARMLESS_THREADS = ("tqdm", "ipykernel", "IPython", "zmq", "debugpy", "_pydevd_bundle")
"""Packages whose threads never access the user's arrays."""
_HARMLESS_BARE = ("penstock.device.on_demand_thread",)
"""Modules whose threads, started without ``threading``, do not access them either."""
_OTHER_GPU_LIBRARIES = ("cupy", "pycuda", "numba.cuda", "jax", "tensorflow")
_NAME = "/memfd:penstock"


class SharedBuffer(NamedTuple):
    """An array backed by a memfd: ``num_bytes`` bytes at offset ``start`` of ``file``."""

    file: SharedFile
    start: int
    address: int
    num_bytes: int


def whole_pages(address: int, num_bytes: int) -> tuple[int, int]:
    """Return the first and the last page boundary inside a range.

    Example:
        >>> whole_pages(mmap.PAGESIZE + 16, 3 * mmap.PAGESIZE) == (
        ...     2 * mmap.PAGESIZE, 4 * mmap.PAGESIZE)
        True
    """
    return -(-address // _PAGE) * _PAGE, (address + num_bytes) // _PAGE * _PAGE


class CopyBudget:
    """Decides which large buffers are copied: those that fit in free memory.

    Args:
        free_bytes: Free memory. 0 means unknown, and everything is copied.
    """

    def __init__(self, free_bytes: int) -> None:
        self._free_bytes = free_bytes
        self._left_bytes = int(free_bytes * _COPY_SHARE) if free_bytes else sys.maxsize
        self._setting = os.environ.get(VARIABLE)

    def why_share(self, num_bytes: int) -> str:
        """Return why a buffer should be shared, or an empty string if it should be copied."""
        if self._setting == "1":
            return f"{VARIABLE}=1"
        if num_bytes <= self._left_bytes:
            self._left_bytes -= num_bytes
            return ""
        return f"a copy does not fit in {self._free_bytes / 1e9:.2f} GB of free memory"


def share_buffer(view: memoryview, owners: Iterable[Any] = ()) -> SharedBuffer | str:
    """Back a buffer with a memfd. Return the reason if that is not possible.

    Called only by the thread that starts the workers.

    Args:
        owners: The user's tensors. The buffer of a tensor refers only to a temporary view of it.
    """
    reason = _why_not_here()
    if reason:
        return reason
    owner, block = _block_behind(view, owners)
    if owner is None:
        return f"the memory belongs to {type(view.obj).__name__}, not to NumPy or torch"
    address = address_of(view)
    mappings = list_mappings(0, sys.maxsize, with_flags=True)
    under = [one for one in mappings if one.start < address + view.nbytes and one.end > block - 1]
    known = _shared.get(address)
    if known is not None and _is_unchanged(known, view, under):
        return known
    reason = _why_not(under, block, address + view.nbytes) or _why_pinned(view, mappings)
    if reason:
        return reason
    made = _move_to_memfd(view, address)
    if isinstance(made, SharedBuffer):
        weakref.finalize(owner, _shared.pop, address, None).atexit = False
        _shared[address] = made
    return made


_shared: dict[int, SharedBuffer] = {}
"""Shared buffers by address. An entry and its descriptor are freed with the array or tensor."""


def _is_unchanged(known: SharedBuffer, view: memoryview, under: list[MemoryMapping]) -> bool:
    """Return True if the buffer is still mapped to the memfd and was not written to."""
    low, high = whole_pages(known.address, known.num_bytes)
    if known.num_bytes != view.nbytes or not covers(under, low, high):
        return False
    inode = str(os.fstat(known.file.fd).st_ino)
    for mapping in under:
        if mapping.end <= low or mapping.start >= high:
            continue
        first = max(low, mapping.start)
        is_ours = mapping.name.startswith(_NAME) and mapping.file[1] == inode
        is_in_place = mapping.offset_of(first) == known.start + first - known.address
        if not is_ours or not is_in_place or mapping.rights != "rw-p":
            return False
    for begin, end in ((0, low - known.address), (high - known.address, known.num_bytes)):
        if os.pread(known.file.fd, end - begin, known.start + begin) != view[begin:end]:
            return False  # the edges are outside the mapping, so they are compared
    return is_unwritten(low, high)


# -- conditions ------------------------------------------------------------------------------------


def _why_not_here() -> str:
    if os.environ.get(VARIABLE) == "0":
        return f"{VARIABLE}=0"
    if sys.platform != "linux" or sys.maxsize < 2**32:
        return "only 64-bit Linux can map a file over memory that is in use"
    if platform.libc_ver()[0] != "glibc":
        return "the C library is not glibc"
    busy = _busy_threads()
    if busy:
        return f"another thread is running and might write to it ({busy[0]})"
    return ""


def _busy_threads() -> list[str]:
    """Return the threads that run Python code and may hold the user's arrays."""
    own = threading.get_ident()
    threads = {thread.ident: thread for thread in threading.enumerate()}
    frames = sys._current_frames()
    found = []
    for ident in {*frames, *threads} - {own}:
        thread = threads.get(ident)
        if ident in frames and _starting_module(frames[ident]) in _HARMLESS_BARE:
            continue
        target = getattr(thread, "_target", None) or type(thread)
        if str(getattr(target, "__module__", "")).split(".")[0] not in _HARMLESS_THREADS:
            found.append(thread.name if thread is not None else f"number {ident}")
    return sorted(found)


def _starting_module(frame: FrameType) -> str:
    """Return the module of the function that started a thread."""
    while frame.f_back is not None:
        frame = frame.f_back
    return str(frame.f_globals.get("__name__"))


def _block_behind(view: memoryview, owners: Iterable[Any]) -> tuple[Any, int]:
    """Return the owner of a buffer's memory and the address of its malloc block."""
    owner: Any = view.obj
    while isinstance(owner, np.ndarray) and owner.base is not None:
        owner = owner.base
    if isinstance(owner, np.ndarray):
        return owner, int(owner.ctypes.data)
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(owner, torch.Tensor):
        return None, 0
    block = _storage_address(owner)
    lasting = (tensor for tensor in owners if _storage_address(tensor) == block)
    return next(lasting, owner), block


def _storage_address(tensor: Any) -> int:
    storage = tensor.untyped_storage() if hasattr(tensor, "untyped_storage") else tensor.storage()
    return int(storage.data_ptr())


def _why_not(under: list[MemoryMapping], block: int, end: int) -> str:
    """Return why this is not an mmap block of glibc in ordinary memory, or an empty string."""
    if not covers(under, block - _HEADER_BYTES, end):
        return "its memory mappings are unknown"
    for mapping in under:
        is_own = mapping.name.startswith(_NAME)  # shared earlier and written to since
        if mapping.rights != "rw-p" or (mapping.name and not is_own):
            return f"it is not in ordinary private memory ({mapping.rights} {mapping.name})"
        strange = mapping.flags - _HARMLESS_FLAGS
        if strange or not mapping.flags:
            return f"its memory is locked, registered or otherwise special ({sorted(strange)})"
    padding, size = (ctypes.c_size_t.from_address(block - back).value for back in (16, 8))
    size, kind = size & ~7, size & 7
    begin, length = block - _HEADER_BYTES - padding, padding + size
    if length % _PAGE == _PAGE - _HEADER_BYTES:  # from glibc 2.43 on, without the header
        length += _HEADER_BYTES
    is_block = kind == _IS_MMAPPED and begin % _PAGE == 0 and length % _PAGE == 0
    if not is_block or begin + length < end:
        return "it is not a separate block of glibc's malloc"
    return ""


def _why_pinned(view: memoryview, mappings: list[MemoryMapping]) -> str:
    if not any("libcuda.so" in one.name or "libamdhip64" in one.name for one in mappings):
        return ""
    others = [name for name in _OTHER_GPU_LIBRARIES if name in sys.modules]
    if others:
        return f"{others[0]} may have pinned it for a GPU"
    torch = sys.modules.get("torch")
    if torch is None:
        return "a GPU driver is loaded, and it is unknown whether the memory is pinned"
    if torch.cuda.is_initialized():
        flat = np.frombuffer(view, dtype=np.uint8)
        pieces = (flat[start : start + 1] for start in range(0, view.nbytes, CHUNK_BYTES))
        if any(torch.from_numpy(piece).is_pinned() for piece in pieces):
            return "it is pinned for a GPU"
    return ""


# -- moving to a memfd -----------------------------------------------------------------------------


def _move_to_memfd(view: memoryview, address: int) -> SharedBuffer | str:
    """Copy a buffer into a memfd and map the memfd over it, chunk by chunk.

    A failure part way is harmless, because the chunks already mapped hold the same bytes.
    """
    file = SharedFile.create()
    if not file.is_sparse:
        return "memfd is not available"
    start = address % _PAGE  # same offset in the page, as mmap requires
    low, high = whole_pages(address, view.nbytes)
    edges = [address, *range(low, high, CHUNK_BYTES), high, address + view.nbytes]
    try:
        file.grow(start + view.nbytes)
        for begin, end in pairwise(edges):
            _write(file, view[begin - address : end - address], start + begin - address)
            if low <= begin < high:
                failure = _map_over(begin, end - begin, file, start + begin - address)
                if failure:
                    return failure
    except OSError as error:
        return f"copying failed ({error})"
    return SharedBuffer(file, start, address, view.nbytes)


def _write(file: SharedFile, piece: memoryview, offset: int) -> None:
    while piece.nbytes:
        written = os.pwrite(file.fd, piece, offset)
        piece, offset = piece[written:], offset + written


def _map_over(address: int, num_bytes: int, file: SharedFile, offset: int) -> str:
    """Map a part of the file over memory that holds the same bytes. Return any error."""
    rights = mmap.PROT_READ | mmap.PROT_WRITE
    number = _call_mmap(address, num_bytes, rights, mmap.MAP_PRIVATE, file.fd, offset)
    if not number:
        return ""
    # The kernel may have removed the old pages before the failure. Restore the bytes.
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    if _call_mmap(address, num_bytes, rights, flags, -1, 0):
        if not covers(list_mappings(address, address + num_bytes), address, address + num_bytes):
            raise MemoryError(f"{num_bytes} bytes of an array were lost: {os.strerror(number)}")
    else:
        target = (ctypes.c_char * num_bytes).from_address(address)
        os.preadv(file.fd, [memoryview(target).cast("B")], offset)
    return f"mapping failed ({os.strerror(number)})"


def _call_mmap(address: int, num_bytes: int, rights: int, flags: int, fd: int, offset: int) -> int:
    """Call mmap(2) at a fixed address. Return 0 or the errno. Does not release the GIL."""
    libc = ctypes.PyDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [
        *(ctypes.c_void_p, ctypes.c_size_t),
        *(ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64),
    ]
    map_fixed = 0x10
    placed = libc.mmap(address, num_bytes, rights, flags | map_fixed, fd, offset)
    return 0 if placed == address else ctypes.get_errno() or 1
