"""Samples of every kind that torch collates or rejects, and a comparison of the results.

A case makes a special sample and a plain one of the same size, for any row. Workers can import
everything here, like a user's own module.
"""

from __future__ import annotations

import collections
import decimal
import enum
import functools
import tempfile
import types
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import Dataset

from support.datasets import Pair

SIZES = {"small": 6, "large": 6000}
"""Numbers of elements of a sample. Large samples are copied one by one (STREAM_BYTES)."""
ROWS = 4
MIXES = {"all": range(ROWS), "first": [0], "middle": [2], "last": [3]}
"""Rows of a batch that are special. The others are plain."""

Make = Callable[[int, int], Any]


class Case(NamedTuple):
    """Two functions, ``special(row, size)`` and ``plain(row, size)``, that make a sample each."""

    special: Make
    plain: Make


def numbers(row: int, size: int) -> torch.Tensor:
    return (torch.arange(size) * 7 + row) % 101


def floats(row: int, size: int) -> torch.Tensor:
    return numbers(row, size).float()


def complexes(row: int, size: int) -> torch.Tensor:
    return torch.complex(floats(row, size), torch.ones(size))


# -- tensors ---------------------------------------------------------------------------------------


def of_dtype(dtype: torch.dtype, row: int, size: int) -> torch.Tensor:
    if dtype in WEIGHTS:
        raise TypeError("quantised weights, of which torch makes no samples")
    if dtype in QUANTISED:
        return torch.quantize_per_tensor(floats(row, size), 0.5 + row % 2, 3, dtype)
    try:
        return numbers(row, size).to(dtype)
    except RuntimeError:  # bits and similar dtypes, to which nothing converts
        return numbers(row, size * 16).to(torch.uint8).view(dtype)


QUANTISED = {torch.quint8, torch.qint8, torch.qint32}
WEIGHTS = {torch.quint4x2, torch.quint2x4}


def dtypes() -> dict[str, torch.dtype]:
    found = {str(one): one for one in vars(torch).values() if isinstance(one, torch.dtype)}
    usable = {}
    for name, dtype in sorted(found.items()):
        try:
            torch.stack([of_dtype(dtype, 0, 6)]).element_size()
        except (RuntimeError, TypeError, NotImplementedError):
            continue  # a name without tensors, or one that torch cannot stack
        usable[name] = dtype
    return usable


class Subclass(torch.Tensor):
    """A user-defined subclass whose batches keep the class."""


class Tagged(torch.Tensor):
    """A user-defined subclass with an attribute, whose results are plain tensors."""

    tag: str

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunction():
            result = func(*args, **(kwargs or {}))
        is_tensor = isinstance(result, torch.Tensor)
        return result.as_subclass(torch.Tensor) if is_tensor else result


def tagged(row: int, size: int) -> Any:
    made: Any = floats(row, size).as_subclass(Tagged)
    made.tag = f"row {row}"
    return made


def inferred(row: int, size: int) -> torch.Tensor:
    with torch.inference_mode():
        return floats(row, size) + 0


def image(row: int, size: int) -> torch.Tensor:
    return floats(row, size // 3 * 3).reshape(3, 1, -1)


def quantised_by_channel(row: int, size: int) -> torch.Tensor:
    table = floats(row, size // 2 * 2).reshape(2, -1)
    scales, points = torch.tensor([0.5, 1.0 + row]), torch.tensor([0, 3])
    return torch.quantize_per_channel(table, scales, points, 0, torch.qint8)


def nested(row: int, size: int) -> torch.Tensor:
    if not hasattr(torch.Tensor, "untyped_storage"):
        raise TypeError("torch 1.13 cannot pickle nested tensors")
    return torch.nested.nested_tensor([floats(row, size), floats(row, size + 1)])


def eye(row: int, size: int) -> torch.Tensor:
    return torch.diag(floats(row, int(size**0.5)) + 1)


FLAGS: dict[str, Case] = {
    "conjugated": Case(lambda r, s: complexes(r, s).conj(), complexes),
    "negated": Case(lambda r, s: complexes(r, s).conj().imag, floats),
    "conjugated and negated": Case(lambda r, s: torch._neg_view(complexes(r, s).conj()), complexes),
    "conjugated, not contiguous": Case(lambda r, s: complexes(r, 2 * s)[::2].conj(), complexes),
    "zeros without memory": Case(lambda r, s: torch._efficientzerotensor(s), floats),
    "inference": Case(inferred, floats),
    "expanded": Case(lambda r, s: torch.full((1,), float(r)).expand(s), floats),
    "every second": Case(lambda r, s: floats(r, 2 * s)[::2], floats),
    "transposed": Case(
        lambda r, s: image(r, s).transpose(0, 2),
        lambda r, s: image(r, s).transpose(0, 2).contiguous(),
    ),
    "channels last": Case(
        lambda r, s: image(r, s)[None].contiguous(memory_format=torch.channels_last)[0], image
    ),
    "overlapping": Case(
        lambda r, s: floats(r, s + 2).unfold(0, 3, 1), lambda r, s: floats(r, s * 3).reshape(s, 3)
    ),
    "no element": Case(lambda r, s: torch.zeros(0, 3), floats),
    "no dimension": Case(lambda r, s: torch.tensor(float(r)), floats),
    "another shape": Case(lambda r, s: floats(r, s + 1), floats),
    "another number of dimensions": Case(lambda r, s: floats(r, s)[None], floats),
    "on the meta device": Case(lambda r, s: floats(r, s).to("meta"), floats),
    "needs gradients": Case(lambda r, s: floats(r, s).requires_grad_(), floats),
    "a subclass": Case(lambda r, s: floats(r, s).as_subclass(Subclass), floats),
    "a subclass with an attribute": Case(tagged, floats),
    "a subclass, conjugated": Case(
        lambda r, s: complexes(r, s).conj().as_subclass(Tagged), complexes
    ),
    "a parameter": Case(lambda r, s: torch.nn.Parameter(floats(r, s), requires_grad=False), floats),
    "a buffer's view": Case(
        lambda r, s: torch.frombuffer(bytearray(4 * s + 1), dtype=torch.float32, offset=1, count=s),
        floats,
    ),
    "sparse": Case(lambda r, s: eye(r, s).to_sparse(), eye),
    "sparse rows": Case(lambda r, s: eye(r, s).to_sparse_csr(), eye),
    "quantised": Case(functools.partial(of_dtype, torch.quint8), floats),
    "quantised by channel": Case(
        quantised_by_channel, lambda r, s: floats(r, s // 2 * 2).reshape(2, -1)
    ),
    "mkldnn": Case(lambda r, s: floats(r, s).to_mkldnn(), floats),
    "nested": Case(lambda r, s: nested(r, s), floats),
}

# -- arrays, scalars and other values --------------------------------------------------------------


def array(row: int, size: int) -> np.ndarray:
    return numbers(row, size).numpy()


def of_numpy(dtype: Any, row: int, size: int) -> np.ndarray:
    return array(row, size).astype(dtype)


def mapped(row: int, size: int) -> np.ndarray:
    with tempfile.TemporaryFile() as file:
        file.write(of_numpy("f4", row, size).tobytes())
        file.flush()
        return np.memmap(file, np.float32, "r", 0, (size,))


def matrix(row: int, size: int) -> np.ndarray:
    return array(row, size // 2 * 2).reshape(2, -1)


NUMPY_DTYPES = [
    "?",
    "i1",
    "i2",
    "i4",
    "i8",
    "u1",
    "u2",
    "u4",
    "u8",
    "f2",
    "f4",
    "f8",
    "g",
    "c8",
    "c16",
]
OTHER_DTYPES = [">i4", ">f8", "<f4", "U3", "S3", "O", "M8[s]", "m8[s]"]

ARRAYS: dict[str, Case] = {
    **{
        f"array {one}": Case(functools.partial(of_numpy, one), array)
        for one in [*NUMPY_DTYPES, *OTHER_DTYPES]
    },
    "records": Case(lambda r, s: np.zeros(s, dtype=[("a", "i4"), ("b", "f4")]), array),
    "masked": Case(lambda r, s: np.ma.masked_equal(array(r, s), r), array),
    "a matrix": Case(lambda r, s: np.matrix(array(r, s)), lambda r, s: array(r, s)[None]),
    "no dimension": Case(lambda r, s: np.array(r), array),
    "Fortran order": Case(lambda r, s: np.asfortranarray(matrix(r, s)), matrix),
    "every second": Case(lambda r, s: array(r, 2 * s)[::2], array),
    "backwards": Case(lambda r, s: array(r, s)[::-1], array),
    "broadcast": Case(lambda r, s: np.broadcast_to(np.int64(r), (s,)), array),
    "read only": Case(lambda r, s: read_only(array(r, s)), array),
    "mapped": Case(mapped, lambda r, s: of_numpy("f4", r, s)),
    "another shape": Case(lambda r, s: array(r, s + 1), array),
    "empty": Case(lambda r, s: np.zeros((0, 2)), array),
}


def read_only(value: np.ndarray) -> np.ndarray:
    value.flags.writeable = False
    return value


class Colour(enum.IntEnum):
    RED = 1
    BLUE = 2


class Text(str):
    """A user-defined string class."""


SCALARS: dict[str, Case] = {
    **{
        f"scalar {one}": Case(lambda r, s, one=one: np.dtype(one).type(r), lambda r, s: r)
        for one in [*NUMPY_DTYPES, "U3", "S3"]
    },
    "a date": Case(lambda r, s: np.datetime64(r, "s"), lambda r, s: r),
    "int": Case(lambda r, s: r, lambda r, s: float(r)),
    "float": Case(lambda r, s: r / 7, lambda r, s: r),
    "bool": Case(lambda r, s: r % 2 == 0, lambda r, s: r),
    "a huge int": Case(lambda r, s: 2**70 + r, lambda r, s: r),
    "the largest int": Case(lambda r, s: 2**63 - 1 - r, lambda r, s: r),
    "not a number": Case(lambda r, s: float("nan"), lambda r, s: float(r)),
    "complex": Case(lambda r, s: complex(r, 1), lambda r, s: r),
    "an enumeration": Case(lambda r, s: Colour(r % 2 + 1), lambda r, s: r),
    "a decimal": Case(lambda r, s: decimal.Decimal(r), lambda r, s: r),
    "str": Case(lambda r, s: f"row {r}" * s, lambda r, s: r),
    "a kind of str": Case(lambda r, s: Text(f"row {r}"), lambda r, s: f"row {r}"),
    "bytes": Case(lambda r, s: bytes([r]) * s, lambda r, s: f"row {r}"),
    "bytearray": Case(lambda r, s: bytearray([r]), lambda r, s: bytes([r])),
    "None": Case(lambda r, s: None, lambda r, s: r),
    "a set": Case(lambda r, s: {r}, lambda r, s: r),
    "a function": Case(lambda r, s: len, lambda r, s: r),
}

# -- containers ------------------------------------------------------------------------------------


class Labels(dict):  # type: ignore[type-arg]
    """A user-defined mapping."""


class Items(list):  # type: ignore[type-arg]
    """A user-defined sequence."""


def pair(row: int, size: int) -> tuple[torch.Tensor, int]:
    return floats(row, size), row


def labelled(row: int, size: int) -> dict[str, Any]:
    return {"x": floats(row, size), "y": row, "name": f"row {row}"}


CONTAINERS: dict[str, Case] = {
    "list": Case(lambda r, s: list(pair(r, s)), pair),
    "tuple": Case(pair, lambda r, s: list(pair(r, s))),
    "namedtuple": Case(lambda r, s: Pair(*pair(r, s)), pair),
    "dict": Case(labelled, lambda r, s: collections.OrderedDict(labelled(r, s))),
    "OrderedDict": Case(lambda r, s: collections.OrderedDict(labelled(r, s)), labelled),
    "defaultdict": Case(lambda r, s: collections.defaultdict(int, labelled(r, s)), labelled),
    "a kind of dict": Case(lambda r, s: Labels(labelled(r, s)), labelled),
    "a kind of list": Case(lambda r, s: Items(pair(r, s)), pair),
    "UserDict": Case(lambda r, s: collections.UserDict(labelled(r, s)), labelled),
    "a read-only mapping": Case(lambda r, s: types.MappingProxyType(labelled(r, s)), labelled),
    "deque": Case(lambda r, s: collections.deque(pair(r, s)), pair),
    "range": Case(lambda r, s: range(r, r + 3), lambda r, s: [r, r + 1, r + 2]),
    "nested": Case(
        lambda r, s: {"a": [pair(r, s), (r, "s")], "b": Pair(array(r, s), {"c": r})},
        lambda r, s: {"a": [pair(r, s), [r, "s"]], "b": Pair(array(r, s), {"c": r})},
    ),
    "another key": Case(lambda r, s: {**labelled(r, s), "z": r}, labelled),
    "a key less": Case(lambda r, s: {"x": floats(r, s)}, labelled),
    "another order of keys": Case(lambda r, s: dict(reversed(labelled(r, s).items())), labelled),
    "another length": Case(lambda r, s: (*pair(r, s), r), pair),
    "empty tuple": Case(lambda r, s: (), pair),
    "empty dict": Case(lambda r, s: {}, labelled),
    "strings": Case(lambda r, s: ["a", f"row {r}"], lambda r, s: ("a", f"row {r}")),
    "lazy inside": Case(
        lambda r, s: (complexes(r, s).conj(), r), lambda r, s: (complexes(r, s), r)
    ),
}


@functools.lru_cache(maxsize=1)
def cases() -> dict[str, Case]:
    """Return all cases that this torch can make, by name."""
    found = {
        f"tensor {name}": Case(functools.partial(of_dtype, dtype), floats)
        for name, dtype in dtypes().items()
    }
    for title, group in {
        "tensor": FLAGS,
        "array": ARRAYS,
        "value": SCALARS,
        "container": CONTAINERS,
    }.items():
        found |= {f"{title}: {name}": case for name, case in group.items()}
    usable = {}
    for name, case in found.items():
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                case.special(0, 6)
        except (RuntimeError, TypeError, AttributeError):
            continue  # not available in this torch or NumPy
        usable[name] = case
    return usable


Index = tuple[str, str, str, int]
"""Case, size, mix and row."""


def make_sample(index: Index) -> Any:
    name, size, mix, row = index
    case = cases()[name]
    make = case.special if row in MIXES[mix] else case.plain
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return make(row, SIZES[size])


def batches() -> list[list[Index]]:
    """Return the indices of all batches: each case in each size and mix."""
    return [
        [(name, size, mix, row) for row in range(ROWS)]
        for name in cases()
        for size in SIZES
        for mix in MIXES
    ]


class EveryKind(Dataset):  # type: ignore[type-arg]
    """Samples by case, size, mix and row."""

    def __len__(self) -> int:
        return 1 << 20

    def __getitem__(self, index: Index) -> Any:
        return make_sample(index)


def outcomes(loader: Any) -> Iterator[Any]:
    """Return each batch, or the exception raised in its place."""
    iterator = iter(loader)
    while True:
        try:
            yield next(iterator)
        except StopIteration:
            return
        except Exception as error:
            yield error


# -- comparing -------------------------------------------------------------------------------------


def compare(ours: Any, theirs: Any, path: str = "batch") -> str:
    """Return the first difference between two outcomes, or an empty string."""
    if isinstance(theirs, Exception) or isinstance(ours, Exception):
        return _compare_errors(ours, theirs, path)
    if type(ours) is not type(theirs):
        return f"{path}: {type(ours).__qualname__} is not {type(theirs).__qualname__}"
    if isinstance(theirs, torch.Tensor):
        return _compare_tensors(ours, theirs, path)
    if isinstance(theirs, np.ndarray):
        is_same = ours.dtype == theirs.dtype and ours.shape == theirs.shape
        return (
            ""
            if is_same and repr(ours.tolist()) == repr(theirs.tolist())
            else f"{path}: {ours!r} is not {theirs!r}"
        )
    if isinstance(theirs, (dict, collections.UserDict, types.MappingProxyType)):
        if list(ours) != list(theirs):
            return f"{path}: keys {list(ours)} are not {list(theirs)}"
        ours, theirs = list(ours.values()), list(theirs.values())
    if isinstance(theirs, (list, tuple, collections.deque)):
        if len(ours) != len(theirs):
            return f"{path}: {len(ours)} items are not {len(theirs)}"
        parts = (
            compare(a, b, f"{path}[{n}]") for n, (a, b) in enumerate(zip(ours, theirs, strict=True))
        )
        return next(filter(None, parts), "")
    return "" if repr(ours) == repr(theirs) else f"{path}: {ours!r} is not {theirs!r}"


def _compare_errors(ours: Any, theirs: Any, path: str) -> str:
    if not isinstance(theirs, Exception):
        return f"{path}: {type(ours).__name__} ({str(ours)[-300:]}) in place of a batch"
    if not isinstance(ours, type(theirs)):
        return f"{path}: {type(ours).__name__} is not {type(theirs).__name__}: {theirs}"
    from penstock.errors import MismatchedSamples

    core = str(theirs).splitlines()[0] if str(theirs) else ""
    is_named = isinstance(ours, MismatchedSamples)  # names the samples, with a message of its own
    return "" if is_named or core in str(ours) else f"{path}: {core!r} is not in {ours}"


def _compare_tensors(ours: torch.Tensor, theirs: torch.Tensor, path: str) -> str:
    for name in ("dtype", "layout", "device", "requires_grad", "is_quantized", "is_nested"):
        if getattr(ours, name) != getattr(theirs, name):
            return f"{path}.{name}: {getattr(ours, name)} is not {getattr(theirs, name)}"
    if not theirs.is_nested and ours.shape != theirs.shape:
        return f"{path}: {ours.shape} is not {theirs.shape}"
    return "" if bits(ours) == bits(theirs) else f"{path}: {ours} is not {theirs}"


def bits(tensor: torch.Tensor) -> Any:
    """Return the contents of a tensor as plain values that compare bit by bit."""
    tensor = tensor.detach()
    tensor = tensor if type(tensor) is torch.Tensor else tensor.as_subclass(torch.Tensor)
    if tensor.device.type == "meta":
        return None
    if tensor.is_nested:
        return [bits(one) for one in tensor.unbind()]
    if tensor.is_quantized:
        whole = bits(tensor.int_repr())
        if tensor.qscheme() in (torch.per_tensor_affine, torch.per_tensor_symmetric):
            return whole, tensor.q_scale(), tensor.q_zero_point()
        return whole, bits(tensor.q_per_channel_scales()), bits(tensor.q_per_channel_zero_points())
    if tensor.layout is not torch.strided:
        tensor = tensor.to_dense()
    if tensor._is_zerotensor():
        tensor = torch.zeros(tensor.shape, dtype=tensor.dtype)
    flat = tensor.resolve_conj().resolve_neg().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""
