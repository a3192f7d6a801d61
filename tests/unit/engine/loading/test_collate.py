"""A batch written into a slot and viewed again equals the result of default_collate."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import default_collate
from torch.utils.data._utils import collate as torch_collate

from penstock.engine.loading.collate import STREAM_BYTES, BatchWriter, TooSmall
from penstock.engine.loading.default_collate import default_collate as collate_named
from penstock.engine.memory.batch_layout import LayoutError, view_batch
from support.datasets import Pair, Record, assert_same, differences

pytestmark = pytest.mark.legacy


def through_slot(samples: list[Any], *, cuts: tuple[int, ...] = (), dirt: int = 0xA5) -> Any:
    """Write ``samples`` into a dirty buffer, in parts that end at ``cuts``, and view the batch."""
    buffer = np.full(1 << 22, dirt, dtype=np.uint8)
    bounds = [0, *cuts, len(samples)]
    layouts, objects, filled = [], [], 0
    for first, last in itertools.pairwise(bounds):
        writer = BatchWriter(buffer, len(samples), first)
        writer.take(iter(samples[first:last]))
        columns = writer.finish()
        objects = (
            [a + b for a, b in zip(objects, columns, strict=True)] if layouts else list(columns)
        )
        filled += writer.num_filled
        layouts.append(writer.layout)
    assert len(set(layouts)) == 1
    return view_batch(layouts[0], buffer, len(samples), filled, objects)


TORCH_DTYPES = [
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64),
    torch.complex128,
]
NUMPY_DTYPES = [
    "bool",
    "uint8",
    "int8",
    "int16",
    "int32",
    "int64",
    "float16",
    "float32",
    "float64",
    "complex64",
]


def ramp(place: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    count = int(np.prod(shape, dtype=int))
    return (torch.arange(count) * 7 + place * 3).remainder(101).reshape(shape).to(dtype)


KINDS: dict[str, Any] = {
    "int": lambda i: i - 2,
    "big int": lambda i: 2**62 + i,
    "float": lambda i: i / 3,
    "float specials": lambda i: [float("nan"), float("inf"), -0.0, 5e-324][i],
    "bool": lambda i: i % 2 == 0,
    "str": lambda i: "ä" * i,
    "bytes": lambda i: bytes(i),
    "numpy scalars": lambda i: (
        np.float32(i / 3),
        np.float64(i / 3),
        np.int16(i),
        np.uint8(i),
        np.bool_(i),
    ),
    "tensor without dimensions": lambda i: torch.tensor(i),
    "tensor of one element": lambda i: torch.tensor([i]),
    "tensor with no element": lambda i: torch.zeros(0),
    "tensor with a zero dimension": lambda i: torch.zeros(3, 0, 2, dtype=torch.int16),
    "array without dimensions": lambda i: np.array(i, dtype=np.float32),
    "array with no element": lambda i: np.zeros((0, 2)),
    "tensor that is not contiguous": lambda i: ramp(i, (4, 6), torch.float32).t(),
    "tensor with a stride": lambda i: ramp(i, (4, 6), torch.int32)[::2, ::3],
    "large tensor that is not contiguous": lambda i: ramp(i, (40, 60), torch.float32).t(),
    "expanded tensor": lambda i: torch.full((1,), float(i)).expand(2000),
    "array in Fortran order": lambda i: np.asfortranarray(np.arange(12.0).reshape(3, 4) + i),
    "large array in Fortran order": lambda i: np.asfortranarray(np.ones((40, 50)) * i),
    "read-only array": lambda i: np.frombuffer(bytes([i] * 16), dtype=np.uint8),
    "tuple": lambda i: (torch.full((2,), float(i)), i),
    "list": lambda i: [i, float(i)],
    "dict": lambda i: {"x": torch.tensor([i]), "y": {"z": i}},
    "namedtuple": lambda i: Pair(torch.tensor([i]), f"name {i}"),
    "deep": lambda i: {"a": [(i, [i, (torch.ones(2) * i,)]), Pair(i, {"b": (str(i), i)})]},
    "large and small together": lambda i: (torch.full((3, 40, 40), i, dtype=torch.uint8), i, "s"),
    "large with no element beside it": lambda i: (torch.full((5000,), i), torch.zeros(0, 2)),
    "large with strings": lambda i: {"image": np.full((64, 64), i, np.uint16), "name": f"{i}.jpg"},
}
for dtype in TORCH_DTYPES:
    KINDS[f"tensor {dtype}"] = lambda i, dtype=dtype: ramp(i, (3, 5), dtype)
    KINDS[f"large tensor {dtype}"] = lambda i, dtype=dtype: ramp(i, (40, 130), dtype)
for name in NUMPY_DTYPES:
    KINDS[f"array {name}"] = lambda i, name=name: np.arange(i, i + 6).reshape(2, 3).astype(name)
    KINDS[f"large array {name}"] = lambda i, name=name: np.arange(i, i + 9000).astype(name)


def unsigned_kind_torch_cannot_take() -> set[str]:
    """Return cases with unsigned NumPy types that this torch, and so default_collate, rejects."""
    try:
        torch.as_tensor(np.zeros(1, np.uint16))
    except TypeError:
        return {"large with strings"}
    return set()


LEFT_OUT = unsigned_kind_torch_cannot_take()


# torch warns about wrapping read-only arrays. Penstock copies them.
@pytest.mark.filterwarnings("ignore:The given NumPy array is not writable:UserWarning")
# torch 1.13.1 converts NumPy booleans in a way that NumPy 1 warns about.
@pytest.mark.filterwarnings(
    "ignore:In future, it will be an error for 'np.bool_':DeprecationWarning"
)
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in LEFT_OUT])
def test_a_batch_through_a_slot_equals_default_collate(kind: str) -> None:
    samples = [KINDS[kind](place) for place in range(4)]
    assert_same(through_slot(samples), default_collate(samples))


@pytest.mark.parametrize("kind", ["deep", "large and small together", "str", "bool", "namedtuple"])
@pytest.mark.parametrize("cuts", [(1,), (2, 3), (1, 2, 3)])
def test_parts_written_by_several_workers_make_the_same_batch(kind: str, cuts: Any) -> None:
    samples = [KINDS[kind](place) for place in range(4)]
    assert_same(through_slot(samples, cuts=cuts), default_collate(samples))


def test_a_batch_of_one_sample_keeps_its_batch_dimension() -> None:
    assert_same(through_slot([(torch.ones(2), 3)]), default_collate([(torch.ones(2), 3)]))


def test_the_comparison_notices_a_wrong_bit_a_wrong_dtype_and_a_wrong_container() -> None:
    samples = [(torch.ones(2) * place, place) for place in range(4)]
    good = default_collate(samples)
    batch = through_slot(samples)
    batch[0][3, 1] += 1
    assert differences(batch, good)
    assert differences([good[0], good[1].int()], good)
    assert differences(tuple(good), good)
    assert differences([good[0][:, :1], good[1]], good)
    assert differences([-torch.zeros(1)], [torch.zeros(1)])


def test_a_dataclass_becomes_a_dataclass_of_collated_fields() -> None:
    batch = through_slot([Record(torch.ones(2) * place, place) for place in range(3)])
    assert_same(
        batch, Record(default_collate([torch.ones(2) * n for n in range(3)]), torch.arange(3))
    )


def test_a_tensor_subclass_that_stacks_to_plain_tensors_is_taken_as_plain() -> None:
    class Tagged(torch.Tensor):
        @classmethod
        def __torch_function__(
            cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            with torch._C.DisableTorchFunction():
                return func(*args, **(kwargs or {}))

    samples = [(torch.ones(3) * place).as_subclass(Tagged) for place in range(3)]
    assert_same(through_slot(samples), default_collate(samples))


def test_a_tensor_subclass_that_keeps_its_class_is_left_to_torch() -> None:
    class Sticky(torch.Tensor):
        pass

    samples = [(torch.ones(3) * place).as_subclass(Sticky) for place in range(3)]
    assert type(default_collate(samples)) is Sticky
    with pytest.raises(LayoutError):
        through_slot(samples)


SWAPPED_INT = np.dtype("=i4").newbyteorder()
ODD_PAIRS: dict[str, tuple[Any, Any]] = {
    "int then float": (1, 2.5),
    "float then int": (1.5, 2),
    "bool then int": (True, 2),
    "another shape": (torch.zeros(3), torch.zeros(4)),
    "another shape, large": (torch.zeros(3000), torch.zeros(4000)),
    "another dtype": (torch.zeros(3), torch.zeros(3, dtype=torch.int64)),
    "another dtype, large": (torch.zeros(3000), torch.zeros(3000, dtype=torch.float64)),
    "needs gradients": (torch.zeros(3), torch.zeros(3, requires_grad=True)),
    "needs gradients, large": (torch.zeros(3000), torch.zeros(3000, requires_grad=True)),
    "array of another shape": (np.zeros(3), np.zeros(4)),
    "array that would broadcast": (np.zeros((2, 3000)), np.zeros((1, 3000))),
    "array of another dtype, large": (np.zeros(3000), np.zeros(3000, np.float32)),
    "array with a negative stride, large": (np.zeros(3000), np.zeros(3000)[::-1]),
    "one row with a negative stride": (np.zeros((1, 3000)), np.zeros((1, 3000))[::-1]),
    "array of another byte order, large": (np.zeros(3000, "=i4"), np.zeros(3000, SWAPPED_INT)),
    "subclass of array, large": (np.zeros(3000), np.ma.zeros(3000)),
    "array then number, large": (np.zeros(3000), 1.0),
    "array then tensor": (np.zeros(3), torch.zeros(3)),
    "tensor then array": (torch.zeros(3), np.zeros(3)),
    "str then number": ("a", 1),
    "number then str": (1, "a"),
    "numpy scalars of two kinds": (np.float32(1), np.int64(1)),
}


@pytest.mark.parametrize("name", ODD_PAIRS)
def test_a_sample_that_is_unlike_the_first_is_odd(name: str) -> None:
    first, other = ODD_PAIRS[name]
    through_slot([first, first])  # control: alone it is accepted
    with pytest.raises(LayoutError):
        through_slot([first, other])


def add_and_finish(writer: BatchWriter, sample: Any) -> None:
    """Add a sample and finish. Large samples are rejected by ``add``, small ones by ``finish``."""
    writer.add(sample)
    writer.finish()


@pytest.mark.parametrize("size", [4, 3 * STREAM_BYTES])
def test_an_odd_sample_gives_back_the_samples_before_it_whole(size: int) -> None:
    samples = [
        {
            "x": torch.full((size,), float(n)),
            "y": np.full(size, n),
            "n": n,
            "name": str(n),
            "t": (n,),
        }
        for n in range(3)
    ]
    writer = BatchWriter(np.zeros(1 << 22, np.uint8), 8, 2)
    for sample in samples:
        writer.add(sample)
    with pytest.raises(LayoutError):
        add_and_finish(writer, {"x": 1})
    assert_same([*writer.recover(), *writer.refused], [*samples, {"x": 1}])


@pytest.mark.parametrize("make", [torch.full, np.full])
def test_samples_after_an_odd_one_are_not_taken(make: Any) -> None:
    even = [make((3 * STREAM_BYTES,), float(n)) for n in range(4)]
    odd = make((STREAM_BYTES,), 9.0)
    samples, all_even = iter([*even[:2], odd, *even[2:]]), iter(even)
    writer = BatchWriter(np.zeros(1 << 22, np.uint8), 8, 2)
    with pytest.raises(LayoutError):
        writer.take(samples)
    assert_same([*writer.recover(), *writer.refused, *samples], [*even[:2], odd, *even[2:]])
    control = BatchWriter(np.zeros(1 << 22, np.uint8), 8, 2)
    control.take(all_even)
    assert_same([*control.recover(), *control.refused, *all_even], even)


@pytest.mark.parametrize("make", [torch.zeros, np.zeros])
def test_a_large_sample_is_free_before_the_next_one_is_loaded(make: Any) -> None:
    def load(size: int) -> Iterator[Any]:
        for _ in range(4):
            num_alive.append(sum(ref() is not None for ref in refs))
            sample = make(size)
            refs.append(weakref.ref(sample))
            yield sample
            del sample

    refs: list[weakref.ref[Any]] = []
    num_alive: list[int] = []
    BatchWriter(np.zeros(1 << 20, np.uint8), 4, 0).take(load(STREAM_BYTES))
    assert num_alive == [0, 0, 0, 0]
    refs, num_alive = [], []
    BatchWriter(np.zeros(1 << 20, np.uint8), 4, 0).take(load(4))
    assert num_alive == [0, 1, 2, 3]  # control: small samples are collected


def test_a_slot_that_is_too_small_says_how_much_is_needed() -> None:
    writer = BatchWriter(np.zeros(1000, np.uint8), 8, 0)
    with pytest.raises(TooSmall) as info:
        writer.add(torch.zeros(100))
    assert info.value.num_bytes == 8 * 400
    BatchWriter(np.zeros(3200, np.uint8), 8, 0).add(torch.zeros(100))  # control: just enough


def test_a_writer_never_touches_rows_of_another_part() -> None:
    buffer = np.full(1 << 16, 0xA5, dtype=np.uint8)
    writer = BatchWriter(buffer, 8, 2)
    for _ in range(3):
        writer.add(torch.zeros(64, dtype=torch.uint8))
    writer.finish()
    rows = buffer[: 8 * 64].reshape(8, 64)
    assert (rows[2:5] == 0).all()
    assert (rows[:2] == 0xA5).all()
    assert (rows[5:] == 0xA5).all()


def test_the_batch_is_a_view_of_the_slot_and_not_a_copy() -> None:
    buffer = np.zeros(1 << 16, np.uint8)
    writer = BatchWriter(buffer, 2, 0)
    writer.add(torch.ones(4))
    writer.add(torch.ones(4))
    batch = view_batch(writer.layout, buffer, 2, 2, writer.finish())  # type: ignore[arg-type]
    buffer[:] = 0
    assert batch.sum() == 0


# -- lazy bits -------------------------------------------------------------------------------------


def numbers(row: int, size: int) -> torch.Tensor:
    return torch.complex(torch.arange(float(size)) + row, torch.ones(size))


LAZY: dict[str, Any] = {
    "conjugated": lambda row, size: numbers(row, size).conj(),
    "conjugated, not contiguous": lambda row, size: numbers(row, size * 2)[::2].conj(),
    "negated": lambda row, size: numbers(row, size).conj().imag,
    "negated, contiguous": lambda row, size: torch._neg_view(torch.arange(float(size)) + row),
    "both": lambda row, size: torch._neg_view(numbers(row, size).conj()),
    "zeros without memory": lambda row, size: torch._efficientzerotensor(size),
}


@pytest.mark.parametrize("size", [4, STREAM_BYTES])
@pytest.mark.parametrize("place", [1, 2, 3])
@pytest.mark.parametrize("name", LAZY)
def test_a_lazy_tensor_that_is_not_the_first_keeps_its_values(
    name: str, place: int, size: int
) -> None:
    samples = [LAZY[name](row, size) for row in range(4)]
    plain = [sample.clone().resolve_conj().resolve_neg() for sample in samples]
    samples = [samples[row] if row == place else plain[row] for row in range(4)]
    assert_same(through_slot(samples), default_collate(plain))


@pytest.mark.parametrize("name", LAZY)
def test_the_bytes_of_a_lazy_tensor_alone_would_be_noticed(name: str) -> None:
    """Negative control for the test above: copying only the bytes gives a different value."""
    if name == "zeros without memory":
        assert LAZY[name](0, 4).data_ptr() == 0
        return
    value = LAZY[name](1, 4)
    base = value.conj() if value.is_conj() else value
    base = torch._neg_view(base) if value.is_neg() else base
    assert differences(base, value)


@pytest.mark.parametrize("name", LAZY)
@pytest.mark.parametrize("size", [4, STREAM_BYTES])
def test_a_lazy_tensor_that_is_the_first_is_left_to_torch(name: str, size: int) -> None:
    with pytest.raises(LayoutError):
        through_slot([LAZY[name](0, size)])


# -- channels_last ---------------------------------------------------------------------------------


def channels_last_images(side: int, count: int = 5) -> list[Any]:
    return [(ramp(n, (side, side, 3), torch.uint8).permute(2, 0, 1), n) for n in range(count)]


@pytest.mark.parametrize("side", [4, 50], ids=["small", "large"])
def test_images_keep_channels_last_in_a_slot_and_in_a_collated_batch(side: int) -> None:
    samples, buffer = channels_last_images(side), np.full(1 << 22, 0xA5, np.uint8)
    writer = BatchWriter(buffer, 5, 0, keeps_channels_last=True)
    writer.take(iter(samples))
    in_slot = view_batch(writer.layout, buffer, 5, 5, writer.finish())  # type: ignore[arg-type]
    collated = collate_named(samples, [], keeps_channels_last=True)
    plain = collate_named(samples, [])
    assert_same(plain, default_collate(samples))
    for images, labels in (in_slot, collated):
        assert torch.equal(images, plain[0])
        assert torch.equal(labels, plain[1])
        assert images.is_contiguous(memory_format=torch.channels_last)
    assert plain[0].is_contiguous(), "control: not asked for"


def test_samples_of_a_channels_last_batch_are_recovered() -> None:
    samples = channels_last_images(50)
    writer = BatchWriter(np.zeros(1 << 22, np.uint8), 8, 0, keeps_channels_last=True)
    writer.take(iter(samples))
    for (found, _), (image, _) in zip(writer.recover(), samples, strict=True):
        assert torch.equal(found, image)
        assert found.stride() == image.stride()


def test_a_contiguous_image_among_channels_last_ones_is_copied_right() -> None:
    samples, buffer = channels_last_images(50), np.full(1 << 22, 0xA5, np.uint8)
    samples[3] = samples[3][0].contiguous(), 3
    writer = BatchWriter(buffer, 5, 0, keeps_channels_last=True)
    writer.take(iter(samples))
    images, _ = view_batch(writer.layout, buffer, 5, 5, writer.finish())  # type: ignore[arg-type]
    assert torch.equal(images, default_collate(samples)[0])
    mixed, _ = collate_named(samples, [], keeps_channels_last=True)
    assert torch.equal(mixed, images)
    assert mixed.is_contiguous(), "one of them is not channels_last"


# -- without workers ----------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:The given NumPy array is not writable:UserWarning")
@pytest.mark.filterwarnings(
    "ignore:In future, it will be an error for 'np.bool_':DeprecationWarning"
)
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in LEFT_OUT])
def test_a_batch_collated_without_workers_equals_default_collate(kind: str) -> None:
    samples = [KINDS[kind](place) for place in range(4)]
    expected = default_collate(samples)
    found = collate_named(samples, list(range(4)))
    assert_same(found, expected)
    if isinstance(expected, torch.Tensor):
        assert found.stride() == expected.stride()
        assert found.storage_offset() == 0


UNLIKE = {
    "of another shape": np.zeros(4),
    "of another dtype": np.zeros(3, np.float32),
    "of another byte order": np.zeros(3, np.dtype(np.float64).newbyteorder()),
    "with a negative stride": np.zeros(3)[::-1],
    "a subclass": np.ma.zeros(3),
    "of strings": np.array(["a", "b", "c"]),
    "of objects": np.array([None, None, None]),
}


@pytest.mark.parametrize("name", UNLIKE)
def test_arrays_that_differ_are_left_to_torch(name: str) -> None:
    for samples in ([np.zeros(3), UNLIKE[name]], [UNLIKE[name], UNLIKE[name]]):
        expected, found = (
            outcome_of(default_collate, samples),
            outcome_of(collate_named, samples, []),
        )
        if isinstance(expected, Exception):
            assert isinstance(found, type(expected))
        else:
            assert_same(found, expected)


def outcome_of(function: Any, *arguments: Any) -> Any:
    """Return what a call returns or raises."""
    try:
        return function(*arguments)
    except Exception as error:
        return error


def test_a_batch_of_small_arrays_can_be_resized_like_torch_s_own() -> None:
    samples = [np.zeros(3), np.zeros(3)]
    for batch in (collate_named(samples, [0, 1]), default_collate(samples)):
        assert batch.resize_(99).shape == (99,)
    with pytest.raises(RuntimeError):  # control: the memory of an array
        torch.from_numpy(np.zeros(6)).resize_(99)


def test_small_arrays_are_stacked_without_a_tensor_of_each(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    as_tensor = torch.as_tensor
    monkeypatch.setattr(torch, "as_tensor", lambda value: made.append(1) or as_tensor(value))
    collate_named([np.full(3, place) for place in range(8)], list(range(8)))
    assert len(made) == 1
    collate_named([np.full(9000, place) for place in range(8)], list(range(8)))
    assert len(made) == 9  # control: large ones are left to torch, which makes one of each


@pytest.mark.parametrize("kind", [np.ndarray, torch.Tensor])
def test_a_collator_that_the_user_registers_later_is_called(
    kind: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(
        torch_collate.default_collate_fn_map, kind, lambda batch, collate_fn_map: "theirs"
    )
    assert collate_named([np.zeros(3), np.zeros(3)], [0, 1]) == "theirs"
