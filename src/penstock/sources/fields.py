"""Fields of packed sets: the types of values, and how each is encoded.

Field          the user's options for a field (dtype, ragged, image encoding)
find_schema    a few values and the Field -> a FieldSchema
SampleEncoder  sample -> the arrays to write; refuses values that would not survive a round trip
decode_value   a stored row -> the value that was packed

A new kind needs: its name in ``FieldKind`` and its rules in ``FieldSchema.__post_init__``
(:mod:`penstock.sources.manifest`); here :func:`kind_of`, :func:`find_schema`,
``_FieldEncoder.encode``, :func:`decode_value` and :func:`mean_bytes`; a value in the test of all
kinds (``test_fields.py``); and the description of the format in ``docs/packed-sets.md``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from penstock.errors import CannotPack
from penstock.images.decode import decode
from penstock.images.jpeg_codecs import encode_jpeg
from penstock.images.pixels import from_pillow, resize
from penstock.sources.manifest import FieldKind, FieldSchema, check_name
from penstock.user_objects import probe

ENCODINGS = ("keep", "jpeg", "raw")
_JPEG_QUALITY = 90
_PYTHON_DTYPES = {"int": "<i8", "float": "<f8", "bool": "|b1"}
_NUMBERS = frozenset({*_PYTHON_DTYPES, "scalar"})


class EncodedImage(bytes):
    """The bytes of an image file, packed unchanged unless a :class:`Field` says otherwise."""


@dataclass(frozen=True, kw_only=True)
class Field:
    """Options for one field of a packed set.

    Args:
        dtype: Store numbers with this dtype. A value that does not fit is an error. So is a
            fraction if the dtype is an integer type.
        ragged: True if sizes differ between samples. None: determined from the first samples.
        max_bytes: A longer text or bytes value is an error.
        encoding: For images: "keep" stores the bytes of the file, "jpeg" encodes the image again,
            "raw" stores pixels. None: file bytes are kept, and images in memory are stored as
            pixels.
        longer_side: Shrink images whose longer side exceeds this.
        quality: JPEG quality, 1 to 100.

    Example:
        >>> Field(dtype="float16").dtype
        'float16'
    """

    dtype: Any = None
    ragged: bool | None = None
    max_bytes: int | None = None
    encoding: str | None = None
    longer_side: int | None = None
    quality: int | None = None

    def __post_init__(self) -> None:
        if self.encoding is not None and self.encoding not in ENCODINGS:
            raise CannotPack(
                f"encoding={self.encoding!r} must be one of {', '.join(ENCODINGS)}",
                remedy='Field(encoding="jpeg", quality=90)',
            )
        for name in ("longer_side", "quality", "max_bytes"):
            if not isinstance(getattr(self, name), (int, type(None))):
                raise CannotPack(f"{name}={getattr(self, name)!r} must be an integer")
        if self.quality is not None and not 1 <= self.quality <= 100:
            raise CannotPack(f"quality={self.quality} must be between 1 and 100")
        if self.longer_side is not None and self.longer_side < 1:
            raise CannotPack(f"longer_side={self.longer_side} must be a positive number of pixels")
        if self.encoding == "keep" and (self.longer_side or self.quality):
            raise CannotPack("encoding='keep' cannot be combined with longer_side= or quality=")

    @property
    def changes_image(self) -> bool:
        return self.encoding in ("jpeg", "raw") or bool(self.longer_side or self.quality)


def split_sample(sample: Any) -> tuple[str, list[str], list[Any]]:
    """Return the form of a sample, the names of its fields (numbered in a tuple), and their values.

    Example:
        >>> split_sample((1.5, "a"))
        ('tuple', ['field_0', 'field_1'], [1.5, 'a'])
    """
    if isinstance(sample, (dict, tuple, list)) and not sample:
        raise CannotPack(f"a sample is an empty {type(sample).__name__}, so nothing can be stored")
    if isinstance(sample, dict):
        return "dict", [check_name(name) for name in sample], list(sample.values())
    if isinstance(sample, (tuple, list)):
        own = getattr(type(sample), "_fields", None)
        names = list(own) if own else [f"field_{place}" for place in range(len(sample))]
        return "tuple", names, list(sample)
    return "single", ["value"], [sample]


def refuse_none(sample: Any, index: int) -> None:
    """Raise CannotPack for a sample that is None."""
    if sample is None:
        raise CannotPack(
            f"dataset[{index}] returned None, which cannot be stored",
            remedy="return a value for every index",
            sample_index=index,
        )


def join_sample(form: str, names: Sequence[str], values: Sequence[Any]) -> Any:
    """Return a sample made from its values. The reverse of :func:`split_sample`.

    Example:
        >>> join_sample("dict", ["a", "b"], [1, 2])
        {'a': 1, 'b': 2}
    """
    if form == "dict":
        return dict(zip(names, values, strict=True))
    return values[0] if form == "single" else tuple(values)


def kinds_of(sample: Any) -> Any:
    """Return the form, names, kinds and dimensions, which all samples of a packed set share."""
    form, names, values = split_sample(sample)
    fields = zip(names, values, strict=True)
    return form, {name: (kind_of(value, name), probe(value, "ndim", 0)) for name, value in fields}


def read_requests(given: Any, form: str, names: list[str]) -> tuple[list[str], list[Field]]:
    """Read ``pack(fields=)``: new names for a tuple's fields, a Field for some, or both."""
    if given is None:
        return names, [Field() for _ in names]
    is_dict = isinstance(given, dict)
    requests = {name: _as_field(given[name]) for name in given} if is_dict else {}
    given = list(given)
    unknown = [name for name in given if name not in names]
    if form == "dict" and unknown:
        raise CannotPack(
            f"fields= has {unknown[0]!r}, but a sample has the fields {names}",
            remedy=f"pack(..., fields={{{names[0]!r}: Field()}})",
        )
    if not is_dict or (form != "dict" and unknown):  # all names, in the order of a sample
        if len(given) != len(names):
            raise CannotPack(
                f"fields= has {len(given)} names, but a sample has {len(names)} fields: {names}",
                remedy=f"pack(..., fields={names!r})",
            )
        if len(set(given)) < len(given):
            raise CannotPack(f"fields= contains a duplicate name: {given}")
        names = names if form == "dict" else [check_name(name) for name in given]
    return names, [requests.get(name, Field()) for name in names]


def _as_field(request: Any) -> Field:
    if isinstance(request, Field):
        return request
    return Field() if request is None else Field(dtype=request)


# -- types of values -----------------------------------------------------------------------------


def kind_of(value: Any, name: str) -> FieldKind:
    """Return the kind of a value. Raises CannotPack if it cannot be stored without pickle."""
    for types, kind in _KIND_OF_TYPE:
        if isinstance(value, types):
            return kind
    if _is_tensor(value):
        return "tensor"
    if hasattr(type(value), "convert") and hasattr(type(value), "getbands"):  # a Pillow image
        return "image"
    what = "None" if value is None else f"a {type(value).__name__}"
    raise CannotPack(
        f"field {name!r} is {what}, which cannot be stored without pickle",
        remedy="return arrays, tensors, numbers, text, bytes, or a tuple or dict of them",
        field=name,
    )


_KIND_OF_TYPE: tuple[tuple[Any, FieldKind], ...] = (
    (EncodedImage, "image"),
    (bool, "bool"),
    (int, "int"),
    (str, "text"),
    ((bytes, bytearray), "bytes"),
    (np.generic, "scalar"),
    (float, "float"),
    (np.ndarray, "array"),
)


def _is_tensor(value: Any) -> bool:
    return hasattr(value, "detach") and hasattr(value, "numpy") and hasattr(value, "dtype")


def array_of(value: Any, name: str) -> tuple[np.ndarray, str]:
    """Return the numbers of a value, little-endian, and their dtype in the manifest."""
    if _is_tensor(value):
        array = _numbers_of(value, name)
        if str(value.dtype) == "torch.bfloat16":
            return array, "bfloat16"
    else:
        array = np.asarray(value)
    if isinstance(value, int) and array.dtype.hasobject:
        raise CannotPack(f"field {name!r} is {value}, which needs more than 64 bits", field=name)
    if array.dtype.char in "gG":
        raise CannotPack(
            f"field {name!r} has dtype {array.dtype}, which is platform-dependent",
            remedy="x.astype(np.float64) in the dataset",
            field=name,
        )
    if array.dtype.kind not in "biufc":
        raise CannotPack(
            f"field {name!r} is an array of {array.dtype}, but arrays can contain only numbers",
            likely="an object array, which only pickle could store."
            if array.dtype.hasobject
            else None,
            remedy="an array of numbers, or text and bytes as separate values",
            field=name,
        )
    dtype = array.dtype.newbyteorder("<")
    return np.ascontiguousarray(array, dtype=dtype).reshape(array.shape), dtype.str


def _numbers_of(tensor: Any, name: str) -> np.ndarray:
    """Return the numbers of a tensor. bfloat16, which NumPy lacks, is returned as 16-bit words."""
    import torch

    try:
        plain = tensor.detach().cpu().resolve_conj().resolve_neg()
        if plain.dtype is torch.bfloat16:
            return np.asarray(plain.contiguous().view(torch.int16).numpy().view("<u2"))
        return np.asarray(plain.numpy())
    except (TypeError, RuntimeError):
        layout = str(tensor.layout).removeprefix("torch.")
        raise CannotPack(
            f"field {name!r} is a {layout} tensor of {tensor.dtype}, which NumPy does not support",
            remedy="x.to_dense().float() in the dataset, or its parts as separate fields",
            field=name,
        ) from None


def find_schema(name: str, values: Sequence[Any], request: Field) -> FieldSchema:
    """Return a schema that fits the values of one field in a few samples."""
    kinds = {kind_of(value, name) for value in values}
    kind = kind_of(values[0], name)
    if len(kinds) > 1 and kinds <= _NUMBERS and request.dtype is not None:
        kind = "scalar"
    elif len(kinds) > 1:
        raise CannotPack(
            f"field {name!r} has different types in different samples: {', '.join(sorted(kinds))}",
            remedy=_as_floats(name) if kinds <= _NUMBERS else None,
            field=name,
        )
    if kind in ("text", "bytes"):
        return FieldSchema(name=name, kind=kind, dtype="|u1")
    if kind == "image" and not _stores_pixels(values[0], request):
        return FieldSchema(name=name, kind=kind, dtype="|u1", encoding="file")
    if kind == "image":
        return FieldSchema(name=name, kind=kind, dtype="|u1", ndim=3, encoding="raw")
    arrays = [array_of(value, name) for value in values]
    dtype = arrays[0][1] if request.dtype is None else stored_dtype(request.dtype, name)
    if kind in _PYTHON_DTYPES and dtype != _PYTHON_DTYPES[kind]:
        kind = "scalar"
    shapes = {array.shape for array, _ in arrays}
    if len({array.ndim for array, _ in arrays}) > 1:
        raise CannotPack(
            f"field {name!r} has different numbers of dimensions: shapes {sorted(shapes)}",
            remedy="x.reshape(...) in the dataset",
            field=name,
        )
    if shapes != {()} and (request.ragged or (request.ragged is None and len(shapes) > 1)):
        return FieldSchema(name=name, kind=kind, dtype=dtype, ndim=arrays[0][0].ndim)
    return FieldSchema(name=name, kind=kind, dtype=dtype, shape=arrays[0][0].shape)


def _as_floats(name: str) -> str:
    return f"pack(..., fields={{{name!r}: Field(dtype='float64')}})"


def _stores_pixels(value: Any, request: Field) -> bool:
    if request.encoding is not None:
        return request.encoding == "raw"
    return not isinstance(value, EncodedImage) and request.quality is None


def stored_dtype(dtype: Any, name: str) -> str:
    """Return a dtype in the form of the manifest."""
    text = str(dtype).removeprefix("torch.")
    if text == "bfloat16":
        return text
    try:
        found = np.dtype(text if str(dtype).startswith("torch.") else dtype).newbyteorder("<")
    except TypeError:
        found = np.dtype(object)
    if found.kind not in "biufc" or found.char in "gG":
        raise CannotPack(f"field {name!r} cannot be stored as {dtype!r}", field=name)
    return str(found.str)


# -- encoding ------------------------------------------------------------------------------------


class SampleEncoder:
    """Encodes samples of one form as the arrays to write."""

    def __init__(
        self, form: str, schemas: Sequence[FieldSchema], requests: Sequence[Field]
    ) -> None:
        self._form = form
        self._fields = list(map(_FieldEncoder, schemas, requests))
        self._names = [schema.name for schema in schemas]

    def encode(self, sample: Any, index: int) -> list[np.ndarray]:
        """Encode a sample.

        Raises:
            CannotPack: It differs from the first samples, or would not survive a round trip.
        """
        refuse_none(sample, index)
        form, names, values = split_sample(sample)
        if form == self._form == "dict":
            if set(names) != set(self._names):
                raise CannotPack(
                    f"sample {index} has the fields {names}; the first samples have {self._names}",
                    remedy="the same keys in every sample",
                    sample_index=index,
                )
            values = [sample[name] for name in self._names]
        if form != self._form or len(values) != len(self._fields):
            raise CannotPack(
                f"sample {index} is a {form} of {len(values)} values; the first samples are a "
                f"{self._form} of {len(self._fields)}",
                sample_index=index,
            )
        try:
            return [field.encode(value) for field, value in zip(self._fields, values, strict=True)]
        except CannotPack as error:
            raise CannotPack(
                f"sample {index}: {error.what}",
                likely=error.likely,
                remedy=error.remedy,
                field=error.facts.get("field"),
                sample_index=index,
            ) from None


class _FieldEncoder:
    """Encodes the values of one field as the arrays to write."""

    def __init__(self, schema: FieldSchema, request: Field) -> None:
        self.schema = schema
        self._request = request

    def encode(self, value: Any) -> np.ndarray:
        """Encode a value.

        Raises:
            CannotPack: It differs from the declaration, or would not survive a round trip.
        """
        schema, kind = self.schema, kind_of(value, self.schema.name)
        if kind != schema.kind and not (schema.kind == "scalar" and kind in _PYTHON_DTYPES):
            is_number = kind in _NUMBERS and schema.kind in _NUMBERS
            remedy = _as_floats(schema.name) if is_number else None
            raise self._refused(f"is {kind}; the first samples have {schema.kind}", remedy)
        if kind == "image":
            return self._image(value)
        if kind in ("text", "bytes"):
            try:
                content = value.encode("utf-8") if kind == "text" else bytes(value)
            except UnicodeEncodeError as error:
                what = f"is text that is not valid Unicode: {error.reason} at {error.start}"
                raise self._refused(what, 'text.encode("utf-8", "replace").decode()') from None
            if self._request.max_bytes is not None and len(content) > self._request.max_bytes:
                raise self._refused(
                    f"has {len(content)} bytes; max_bytes={self._request.max_bytes} is declared"
                )
            return np.frombuffer(content, np.uint8)
        return self._numbers(value)

    def _numbers(self, value: Any) -> np.ndarray:
        schema = self.schema
        try:
            array, dtype = array_of(value, schema.name)
        except OverflowError as error:
            raise self._refused(f"is {value!r}: {error}") from None
        if dtype != schema.dtype:
            array = self._converted(array, dtype, value)
        if schema.shape is not None and array.shape != schema.shape:
            raise self._refused(
                f"has shape {array.shape}; the first samples have {schema.shape}",
                f"pack(..., fields={{{schema.name!r}: Field(ragged=True)}})",
            )
        if schema.is_ragged and array.ndim != schema.ndim:
            raise self._refused(f"has {array.ndim} dimensions; {schema.ndim} are declared")
        return array

    def _converted(self, array: np.ndarray, dtype: str, value: Any) -> np.ndarray:
        if self._request.dtype is None and self.schema.kind != "scalar":
            what = f"is {dtype}; the first samples have {self.schema.dtype}"
            wanted = f"pack(..., fields={{{self.schema.name!r}: Field(dtype={dtype!r})}})"
            raise self._refused(what, wanted)
        if "bfloat16" in (dtype, self.schema.dtype):
            return self._converted_by_torch(value)
        target = self.schema.stored
        if target.kind in "iu" and array.dtype.kind in "fc" and not np.isfinite(array).all():
            raise self._refused(f"contains NaN or infinity, which {target} cannot represent")
        with np.errstate(all="ignore"):
            made = array.astype(target)
            is_exact = target.kind in "iub" and array.dtype.kind != "b"
            if is_exact and not (made.astype(array.dtype) == array).all():
                raise self._refused(f"contains values that {target} cannot represent")
            if target.kind == "f" and np.isinf(made).sum() > np.isinf(array).sum():
                raise self._refused(f"contains values that are too large for {target}")
        return made

    def _converted_by_torch(self, value: Any) -> np.ndarray:
        import torch

        if self.schema.dtype == "bfloat16":
            return array_of(torch.as_tensor(value).to(torch.bfloat16), self.schema.name)[0]
        return self._converted(value.float().numpy(), "<f4", value)

    def _image(self, value: Any) -> np.ndarray:
        request, is_file = self._request, isinstance(value, EncodedImage)
        if is_file and self.schema.encoding == "file" and not request.changes_image:
            return np.frombuffer(value, np.uint8)
        pixels = decode(value) if is_file else from_pillow(value)
        longest = max(pixels.shape[:2])
        if request.longer_side is not None and longest > request.longer_side:
            height, width = (
                max(1, round(side * request.longer_side / longest)) for side in pixels.shape[:2]
            )
            pixels = resize(pixels, (height, width))
        if self.schema.encoding == "raw":
            return np.ascontiguousarray(pixels)
        return np.frombuffer(encode_jpeg(pixels, request.quality or _JPEG_QUALITY), np.uint8)

    def _refused(self, what: str, remedy: str | None = None) -> CannotPack:
        return CannotPack(
            f"field {self.schema.name!r} {what}", remedy=remedy, field=self.schema.name
        )


def decode_value(schema: FieldSchema, row: np.ndarray) -> Any:
    """Return the value of a field, with the type that was packed."""
    kind = schema.kind
    if kind == "text":
        return row.tobytes().decode("utf-8")
    if kind == "bytes" or schema.encoding == "file":
        return row.tobytes()
    if kind in _PYTHON_DTYPES:
        return row.item()
    if kind == "array":
        return row
    if kind == "scalar" and schema.dtype != "bfloat16":
        return row[()]
    import torch

    if schema.dtype == "bfloat16":
        return torch.from_numpy(row.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(row)


def mean_bytes(schema: FieldSchema, values: Sequence[Any]) -> int:
    """Return the approximate bytes per sample in this field, from a few values."""
    if not schema.is_ragged:
        return schema.row_bytes
    sizes = []
    for value in values:
        if schema.kind == "text":
            sizes.append(len(value.encode("utf-8", "surrogatepass")))
        elif schema.kind == "bytes" or isinstance(value, EncodedImage):
            sizes.append(len(value))
        elif schema.kind == "image":
            size = getattr(value, "size", (0, 0))
            sizes.append(3 * size[0] * size[1])
        else:
            sizes.append(array_of(value, schema.name)[0].nbytes)
    return math.ceil(sum(sizes) / max(1, len(sizes))) + 8
