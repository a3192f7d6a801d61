"""A large array is copied for the workers, or shared if a copy does not fit and sharing is safe."""

from __future__ import annotations

import ctypes
import errno
import gc
import mmap
import os
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from penstock.device.on_demand_thread import OnDemandThread
from penstock.engine.pickling import pickler, shared_arrays
from penstock.engine.pickling.pickler import PickledObjects, PickleFile
from penstock.engine.pickling.process_maps import MemoryMapping, is_unwritten, list_mappings
from support.pickling import arrive

pytestmark = [
    pytest.mark.legacy,
    pytest.mark.skipif(sys.platform != "linux", reason="Linux only"),
]

NUM_BYTES = pickler.LARGE_BYTES + 3 * mmap.PAGESIZE + 40
SLACK = 12 << 20
PAGE = mmap.PAGESIZE


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulate a program without threads by ignoring threads that earlier tests left waiting."""
    if threading.active_count() > 1:
        monkeypatch.setattr(shared_arrays, "_busy_threads", list)


@pytest.fixture(autouse=True)
def short_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulate a machine on which a copy does not fit."""
    monkeypatch.setattr(pickler, "free_memory_bytes", lambda: 1 << 20)


def numbers(num_bytes: int = NUM_BYTES) -> np.ndarray:
    return np.arange(num_bytes // 8)


def pack(value: Any) -> PickleFile:
    return PickledObjects({"value": value}).to_shared_file()


def own_bytes() -> int:
    """Return the anonymous memory of this process in bytes."""
    total = 0
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
        name, *rest = line.split()
        total += int(rest[0]) * 1024 if name == "Anonymous:" else 0
    return total


def is_shared(pickle_file: PickleFile) -> bool:
    shared = ["is not copied" in note for note in pickle_file.notes]
    assert shared
    assert len(pickle_file.location.separate) == sum(shared)
    return all(shared)


def torch_allocates_with_glibc() -> bool:
    """Return False for torch builds with mimalloc (arm64), whose blocks cannot be shared."""
    tensor = torch.empty(NUM_BYTES, dtype=torch.uint8)
    address = tensor.data_ptr()
    if not list_mappings(address - 16, address):
        return False
    size_and_flags = ctypes.c_size_t.from_address(address - 8).value
    return size_and_flags & 7 == 2 and size_and_flags & ~7 >= NUM_BYTES


HAS_GLIBC_TENSORS = sys.platform == "linux" and torch_allocates_with_glibc()
glibc_tensors = pytest.mark.skipif(
    not HAS_GLIBC_TENSORS,
    reason="this build of torch allocates tensors without glibc's malloc, so they are copied",
)


def counting_tensor() -> torch.Tensor:
    return torch.arange(NUM_BYTES // 8)


VALUES: dict[str, Any] = {
    "an array": numbers,
    "rows of an array": lambda: np.arange(NUM_BYTES // 4)[NUM_BYTES // 16 :],
    "columns first": lambda: np.asfortranarray(np.arange(1 << 23, dtype=np.int64).reshape(64, -1)),
    "odd bytes": lambda: np.arange(NUM_BYTES + 7, dtype=np.uint8)[3:],
    "a tensor": counting_tensor,
    "a view of a tensor": lambda: torch.arange(NUM_BYTES // 4)[1000:].view(2, -1),
    "a tensor of NumPy's": lambda: torch.from_numpy(numbers()),
    "a tensor that is not contiguous": lambda: torch.arange(NUM_BYTES // 4).view(-1, 2)[:, 0],
}


def as_array(value: Any) -> np.ndarray:
    return np.ascontiguousarray(value.numpy() if isinstance(value, torch.Tensor) else value)


OF_TORCH = ("a tensor", "a view of a tensor", "a tensor that is not contiguous")


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=glibc_tensors) if name in OF_TORCH else name for name in VALUES],
)
def test_content_and_address_stay_and_workers_see_the_same(name: str) -> None:
    value = VALUES[name]()
    address = as_array(value).ctypes.data if name == "an array" else None
    expected = as_array(value).copy()
    pickle_file = pack(value)
    assert is_shared(pickle_file)
    again = arrive(pickle_file)
    assert type(again) is type(value)
    np.testing.assert_array_equal(as_array(again), expected)
    np.testing.assert_array_equal(as_array(value), expected)
    assert address in (None, as_array(value).ctypes.data)
    pickle_file.close()


def test_nobody_s_writes_are_seen_by_anybody_else() -> None:
    value = numbers()
    pickle_file = pack(value)
    one, other = arrive(pickle_file), arrive(pickle_file)
    middle = len(value) // 2
    value[[0, middle, -1]] = -1
    one[[1, middle + 1, -2]] = -2
    assert [other[place] for place in (0, middle, 1, middle + 1)] == [0, middle, 1, middle + 1]
    assert (value[middle + 1], one[middle]) == (middle + 1, middle)
    pickle_file.close()


def test_there_is_one_copy_and_without_sharing_there_are_two(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    value = numbers()
    before = own_bytes()
    pickle_file = pack(value)
    assert own_bytes() - before < -NUM_BYTES + SLACK  # the pages belong to the file
    pickle_file.close()
    monkeypatch.setattr(pickler, "free_memory_bytes", lambda: 1 << 40)
    value = numbers()
    before = own_bytes()
    pickle_file = pack(value)
    assert abs(own_bytes() - before) < SLACK  # private pages, plus a copy in the pickle file
    assert pickle_file.location.num_bytes > NUM_BYTES
    assert pickle_file.notes == ("a buffer of 0.07 GB is copied once for all workers",)
    pickle_file.close()


def mapping_under(value: Any) -> list[str]:
    address = as_array(value).ctypes.data
    return [one.name for one in list_mappings(address, address + value.nbytes)]


@pytest.mark.parametrize("free", [0, 1 << 40])
def test_where_a_copy_fits_or_nobody_knows_the_user_s_memory_is_not_touched(
    monkeypatch: pytest.MonkeyPatch, free: int
) -> None:
    monkeypatch.setattr(pickler, "free_memory_bytes", lambda: free)
    value = numbers()
    before = mapping_under(value)
    pickle_file = pack(value)
    assert mapping_under(value) == before
    assert not any("memfd" in name for name in before)
    assert pickle_file.location.separate == ()
    assert not shared_arrays._shared
    value.resize(2 * len(value), refcheck=False)  # it is not watched
    np.testing.assert_array_equal(arrive(pickle_file), numbers())
    pickle_file.close()


def test_where_a_copy_does_not_fit_the_note_says_what_was_done() -> None:
    value = numbers()
    pickle_file = pack(value)
    assert any("memfd" in name for name in mapping_under(value))
    (note,) = pickle_file.notes
    assert "a copy does not fit in 0.00 GB of free memory" in note
    assert "shared memory is mapped over the array" in note
    pickle_file.close()


def test_copies_are_counted_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pickler, "free_memory_bytes", lambda: 2 * NUM_BYTES)
    pickle_file = pack([numbers(), numbers()])
    assert ["is not copied" in note for note in pickle_file.notes] == [False, True]
    pickle_file.close()


@pytest.mark.parametrize(("setting", "free"), [("1", 1 << 40), ("0", 1 << 20)])
def test_the_variable_is_obeyed(monkeypatch: pytest.MonkeyPatch, setting: str, free: int) -> None:
    monkeypatch.setattr(pickler, "free_memory_bytes", lambda: free)
    monkeypatch.setenv(shared_arrays.VARIABLE, setting)
    pickle_file = pack(numbers())
    assert is_shared(pickle_file) == (setting == "1")
    assert f"{shared_arrays.VARIABLE}={setting}" in pickle_file.notes[0]
    pickle_file.close()


SOURCES = [numbers, pytest.param(counting_tensor, marks=glibc_tensors)]


@pytest.mark.parametrize("make", SOURCES)
def test_a_second_epoch_uses_the_same_file_until_somebody_writes(make: Any) -> None:
    value = make()
    inodes = []
    for epoch in range(4):
        if epoch == 2:
            value[len(value) // 2] = -1
        pickle_file = pack(value)
        assert is_shared(pickle_file)
        inodes.append(os.fstat(pickle_file.fds[0]).st_ino)
        assert int(arrive(pickle_file)[len(value) // 2]) == int(value[len(value) // 2])
        pickle_file.close()
    assert inodes[0] == inodes[1] != inodes[2] == inodes[3]


@pytest.mark.parametrize("place", [0, -1])
def test_a_write_at_the_edges_is_noticed_too(place: int) -> None:
    value = numbers()
    pack(value).close()
    value[place] = -5
    pickle_file = pack(value)
    assert arrive(pickle_file)[place] == -5
    pickle_file.close()


@pytest.mark.parametrize("make", SOURCES)
def test_the_memory_and_the_descriptor_go_with_the_array(make: Any) -> None:
    def mapped() -> list[Any]:  # parametrized tests may hold shared lists
        return [area for area in list_mappings(0, sys.maxsize) if "memfd:penstock" in area.name]

    def num_memfds() -> int:  # garbage collection may close other descriptors
        links = [os.readlink(entry.path) for entry in os.scandir("/proc/self/fd")]
        return sum(link.startswith("/memfd:penstock") for link in links)

    gc.collect()
    num_before, before = num_memfds(), mapped()
    value = make()
    pack(value).close()
    assert len(shared_arrays._shared) == 1
    assert num_memfds() == num_before + 1
    del value
    gc.collect()
    assert shared_arrays._shared == {}
    assert num_memfds() == num_before
    assert mapped() == before


def test_a_worker_started_after_the_array_is_gone_still_gets_it() -> None:
    pickle_file = pack(numbers())
    gc.collect()
    assert arrive(pickle_file)[7] == 7
    pickle_file.close()


def test_a_forked_child_that_writes_changes_its_own_array_only() -> None:
    value = numbers()
    pack(value).close()
    child = os.fork()
    if child == 0:
        value[:] = 0  # in the child's own pages
        os._exit(int(value.any()))
    assert os.waitpid(child, 0)[1] == 0
    assert value[-1] == len(value) - 1


def test_growing_in_place_copies_because_the_block_is_no_longer_one_mapping(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Unwatched:
        def finalize(self, *_: Any) -> Any:
            return self

        ref = finalize

    value = numbers()
    monkeypatch.setattr(shared_arrays, "weakref", Unwatched())
    pack(value).close()
    monkeypatch.undo()
    shared_arrays._shared.clear()
    value.resize(len(value) * 2, refcheck=False)  # realloc; NumPy refuses it for a watched array
    assert (value[1], value[len(value) // 2 - 1], value[-1]) == (1, len(value) // 2 - 1, 0)


def test_two_views_that_overlap_both_arrive() -> None:
    value = np.arange(2 * NUM_BYTES // 8)
    pickle_file = pack([value[: NUM_BYTES // 8 + 50], value[1000:]])
    one, two = arrive(pickle_file)
    assert one[-1] == NUM_BYTES // 8 + 49
    assert two[0] == 1000
    np.testing.assert_array_equal(value, np.arange(len(value)))
    pickle_file.close()


# -- unsafe cases ----------------------------------------------------------------------------------


def reason_against(value: Any) -> str:
    pickle_file = pack(value)
    assert not is_shared(pickle_file)
    assert pickle_file.location.num_bytes > NUM_BYTES
    np.testing.assert_array_equal(as_array(arrive(pickle_file)), as_array(value))
    pickle_file.close()
    return pickle_file.notes[0]


def test_a_small_array_is_copied_without_a_word() -> None:
    pickle_file = pack(np.zeros(1 << 20))
    assert pickle_file.notes == ()
    assert pickle_file.location.separate == ()
    pickle_file.close()


@pytest.mark.skipif(HAS_GLIBC_TENSORS, reason="tensors come from glibc's malloc here")
def test_a_tensor_of_another_allocator_is_copied() -> None:
    assert "glibc's malloc" in reason_against(counting_tensor())


def test_not_while_another_thread_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(pickler, "free_memory_bytes", lambda: 1 << 20)
    done = threading.Event()
    thread = threading.Thread(target=done.wait, name="busy")
    thread.start()
    try:
        assert "another thread" in reason_against(numbers())
    finally:
        done.set()
        thread.join()


def test_threads_that_only_draw_progress_bars_do_not_count(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.undo()
    done = threading.Event()

    class Monitor(threading.Thread):
        __module__ = "tqdm._monitor"

        def run(self) -> None:
            done.wait()

    before = shared_arrays._busy_threads()
    monitor = Monitor()
    monitor.start()
    try:
        assert shared_arrays._busy_threads() == before
    finally:
        done.set()
        monitor.join()


def test_not_an_array_that_is_mapped_from_a_file(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", numbers())
    mapped = np.load(tmp_path / "a.npy", mmap_mode="r+")
    tensor = torch.from_numpy(np.asarray(mapped))
    assert "not in ordinary private memory" in reason_against(tensor)


def test_not_memory_of_others() -> None:
    block = mmap.mmap(-1, NUM_BYTES + mmap.PAGESIZE)
    assert "belongs to" in reason_against(np.frombuffer(block, np.uint8))
    private = mmap.mmap(-1, NUM_BYTES + 64, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    tensor = torch.frombuffer(private, dtype=torch.uint8)[32:]
    assert "glibc" in reason_against(tensor) or "mappings are unknown" in reason_against(tensor)


def test_not_locked_memory() -> None:
    value = numbers()
    libc = ctypes.CDLL(None, use_errno=True)
    address = ctypes.c_void_p(value.ctypes.data)
    if libc.mlock(address, ctypes.c_size_t(4096)):
        pytest.skip("this user may not lock memory")
    assert "locked" in reason_against(value)
    libc.munlock(address, ctypes.c_size_t(4096))


def test_not_memory_that_forks_do_not_inherit_as_drivers_ask_for() -> None:
    value = numbers()
    low, _ = shared_arrays.whole_pages(value.ctypes.data, value.nbytes)
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.madvise(ctypes.c_void_p(low), ctypes.c_size_t(mmap.PAGESIZE), 10) == 0
    assert "special" in reason_against(value)


def test_not_where_proc_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_arrays, "list_mappings", lambda *_, **__: [])
    assert "mappings are unknown" in reason_against(numbers())


def test_not_with_a_gpu_library_that_may_have_pinned_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def with_driver(*arguments: Any, **keywords: Any) -> Any:
        found = list_mappings(*arguments, **keywords)
        return [
            *found,
            found[-1]._replace(name="/usr/lib/libcuda.so.1"),
        ]

    monkeypatch.setattr(shared_arrays, "list_mappings", with_driver)
    monkeypatch.setattr(shared_arrays, "covers", lambda *_: True)
    monkeypatch.setattr(shared_arrays, "_why_not", lambda *_: "")
    pickle_file = pack(numbers())
    assert is_shared(pickle_file)  # the driver is loaded, but torch reports no pinned memory
    pickle_file.close()
    monkeypatch.setitem(sys.modules, "cupy", sys)
    assert "cupy may have pinned it" in reason_against(numbers())


@pytest.mark.parametrize("is_mended", [True, False])
def test_a_mapping_that_fails_in_the_middle_loses_nothing(
    monkeypatch: pytest.MonkeyPatch, is_mended: bool
) -> None:
    calls = []
    real = shared_arrays._call_mmap

    def fail_at_second(*arguments: Any) -> int:
        calls.append(arguments)
        if len(calls) == 2 or (len(calls) == 3 and not is_mended):
            return errno.ENOMEM
        return real(*arguments)

    monkeypatch.setattr(shared_arrays, "_call_mmap", fail_at_second)
    value = numbers()
    assert "mapping failed" in reason_against(value)
    assert len(calls) == 3
    np.testing.assert_array_equal(value, numbers())
    monkeypatch.setattr(shared_arrays, "_call_mmap", real)
    pickle_file = pack(value)  # the next attempt maps over the partial mapping
    assert is_shared(pickle_file)
    pickle_file.close()


def test_a_file_that_cannot_grow_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "no space left")

    monkeypatch.setattr(shared_arrays, "_write", full)
    assert "no space left" in reason_against(numbers())


# -- information from /proc ------------------------------------------------------------------------


def test_a_written_page_of_a_private_mapping_is_seen(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(64 * mmap.PAGESIZE))
    with open(path, "r+b") as file:
        mapped = np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY), np.uint8)
    start, end = mapped.ctypes.data, mapped.ctypes.data + mapped.nbytes
    assert mapped.sum() == 0
    assert is_unwritten(start, end)
    mapped[40 * mmap.PAGESIZE] = 1
    assert not is_unwritten(start, end)
    assert is_unwritten(start, start + 40 * mmap.PAGESIZE)


def test_our_own_thread_that_unpins_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    done, begun = threading.Event(), threading.Event()
    before = shared_arrays._busy_threads()

    def work(items: list[int]) -> None:
        items.clear()
        begun.set()
        done.wait(30)

    thread = OnDemandThread(work)
    thread.submit(1)
    try:
        assert begun.wait(30)
        assert shared_arrays._busy_threads() == before
        monkeypatch.setattr(shared_arrays, "_HARMLESS_BARE", ())
        assert len(shared_arrays._busy_threads()) == len(before) + 1
    finally:
        done.set()


@pytest.mark.parametrize(
    ("name", "padding", "size", "is_block"),
    [
        ("up to glibc 2.42", 0, 4 * PAGE, True),
        ("up to glibc 2.42, aligned", 48, 4 * PAGE - 48, True),
        ("from glibc 2.43 on", 0, 4 * PAGE - 16, True),
        ("from glibc 2.43 on, aligned", 48, 4 * PAGE - 64, True),
        ("part of a larger block", 0, 4 * PAGE - 32, False),
        ("too short", 0, 3 * PAGE - 16, False),
    ],
)
def test_the_header_of_a_block_is_read_as_each_glibc_writes_it(
    name: str, padding: int, size: int, is_block: bool
) -> None:
    with mmap.mmap(-1, 4 * PAGE) as memory:
        view = (ctypes.c_char * len(memory)).from_buffer(memory)
        start = ctypes.addressof(view)
        header = (ctypes.c_size_t * 2).from_address(start + padding)
        header[:] = [padding, size | 2]
        mapping = MemoryMapping(
            start=start,
            end=start + 4 * PAGE,
            rights="rw-p",
            offset=0,
            file=("00:00", "0"),
            name="",
            flags=frozenset({"rd", "wr", "mr", "mw", "me", "ac"}),
        )
        reason = shared_arrays._why_not([mapping], start + padding + 16, start + 4 * PAGE)
        del view, header
    assert (reason == "") == is_block, reason
