"""``open_tensors()``: datasets over existing ``.npy`` files, folders of them, and ``.pt`` files."""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from typing import Any

from penstock.errors import BadArgument, BadStore, CannotPack
from penstock.sources.array_files import MappedArray, map_array
from penstock.sources.columns import Column, FixedColumn, ShardRows
from penstock.sources.fields import array_of
from penstock.sources.manifest import FieldSchema
from penstock.sources.packed import ColumnDataset
from penstock.sources.source_files import FileStamp, SourceFiles

_ONLY_TENSORS = "torch.save a tensor, or a list or dict of tensors, and nothing else"


class TensorFiles:
    """Mapped array files. Pickled as their names.

    Args:
        paths: Paths by field name.
        form: Form of a sample.
    """

    draws_nothing = True

    def __init__(
        self, paths: dict[str, str], form: str, stamps: Sequence[FileStamp] | None = None
    ) -> None:
        self._paths = paths
        self.files = SourceFiles(list(paths.values()), stamps=stamps)
        self.files.check_all()
        self.form = form
        self.columns: dict[str, Column] = {}
        self.schemas: tuple[FieldSchema, ...] = ()
        self.num_bytes = 0
        for name, path in paths.items():
            if path.endswith(".npy"):
                mapped = map_array(path)
                self._add(name, mapped, mapped.array.dtype.str, path)
                continue
            tensors, self.form = _load(path, name)
            for key, tensor in tensors.items():
                try:
                    array, dtype = array_of(tensor, key)
                except CannotPack as error:
                    remedy = "torch.save a dense tensor, for example x.to_dense().float()"
                    raise BadStore(f"{path}: {error.what}", remedy=remedy, path=path) from None
                self._add(key, MappedArray(array), dtype, path)
        lengths = {name: column.length for name, column in self.columns.items()}
        if len(set(lengths.values())) > 1:
            raise BadStore(
                "the arrays differ in length: "
                + ", ".join(f"{name} has {length}" for name, length in lengths.items()),
                remedy="open_tensors with arrays that have one row for each sample",
            )

    def __reduce__(self) -> tuple[Any, ...]:
        return TensorFiles, (self._paths, self.form, self.files.stamps)

    def _add(self, name: str, mapped: MappedArray, dtype: str, path: str) -> None:
        array = mapped.array
        if not array.ndim:
            raise BadStore(f"{path} is a single number, so it has no rows", path=path)
        if dtype != "bfloat16" and (array.dtype.kind not in "biufc" or array.dtype.char in "gG"):
            raise BadStore(
                f"{path} contains {array.dtype}, which tensors do not support",
                remedy="np.save an array of numbers, such as float64 or int64",
                path=path,
            )
        if array.dtype.byteorder == ">":
            raise BadStore(
                f"{path} contains big-endian numbers ({array.dtype.str})",
                remedy=f"x = np.load({path!r}); "
                f"np.save({path!r}, x.astype(x.dtype.newbyteorder('<')))",
                path=path,
            )
        try:
            schema = FieldSchema(name=name, kind="tensor", dtype=dtype, shape=array.shape[1:])
        except CannotPack as error:
            raise BadStore(
                f"{path}: {error.what}",
                remedy=f"open_tensors(x={path!r})" if path.endswith(".npy") else None,
                path=path,
            ) from None
        self.schemas += (schema,)
        self.columns[name] = FixedColumn([ShardRows(mapped)])
        self.num_bytes += array.nbytes


class Tensors(ColumnDataset):
    """A dataset over array files. See :func:`open_tensors`."""

    def __init__(self, files: TensorFiles) -> None:
        self._open(files)


def open_tensors(*paths: str | os.PathLike[str], **fields: str | os.PathLike[str]) -> Tensors:
    """Return a dataset over tensors on disk, without packing or loading them.

    Args:
        paths: ``.npy`` files, a folder of ``.npy`` files, or one ``.pt`` file. With one ``.npy``
            file, a sample is a row of it. With several, a sample is a tuple of one row each. With a
            folder, a sample is a dict by file name. A ``.pt`` file contains a tensor, or a list or
            dict of tensors.
        fields: Files by field name. A sample is then a dict with these keys.

    Example:
        >>> import tempfile, numpy as np, penstock
        >>> folder = tempfile.mkdtemp()
        >>> np.save(folder + "/x.npy", np.eye(3, dtype=np.float32))
        >>> np.save(folder + "/y.npy", np.array([5, 6, 7]))
        >>> data = penstock.open_tensors(folder + "/x.npy", folder + "/y.npy")
        >>> data[1]
        (tensor([0., 1., 0.]), tensor(6))
        >>> sorted(penstock.open_tensors(folder)[2])
        ['x', 'y']
    """
    names = [os.fspath(path) for path in paths]
    if bool(names) == bool(fields):
        raise BadArgument(
            "open_tensors needs either file paths or named fields, not both",
            remedy='open_tensors(image="images.npy", label="labels.npy")',
        )
    if fields:
        found, form = {name: os.fspath(path) for name, path in fields.items()}, "dict"
    elif len(names) == 1 and os.path.isdir(names[0]):
        inside = sorted(one for one in os.listdir(names[0]) if one.endswith(".npy"))
        if not inside:
            raise BadStore(f"{names[0]} has no .npy files", remedy="np.save(folder + '/x.npy', x)")
        found = {one.removesuffix(".npy"): os.path.join(names[0], one) for one in inside}
        form = "dict"
    elif len(names) == 1:
        found, form = {"value": names[0]}, "single"
    else:
        if any(not name.endswith(".npy") for name in names):
            raise BadArgument("several files must all be .npy files", remedy="np.save('x.npy', x)")
        found, form = {f"field_{n}": name for n, name in enumerate(names)}, "tuple"
    return Tensors(TensorFiles(found, form))


def _load(path: str, name: str) -> tuple[dict[str, Any], str]:
    """Return the tensors in a ``.pt`` file, memory-mapped if possible. Unpickles nothing else."""
    if path.endswith(".npz"):
        raise BadStore(
            f"{path} is an archive, and its arrays cannot be memory-mapped",
            remedy="np.save each of them, or penstock.pack",
            path=path,
        )
    import torch

    keywords: dict[str, Any] = {"map_location": "cpu", "weights_only": True}
    if "mmap" in torch.load.__code__.co_varnames:  # from torch 2.1 on
        keywords["mmap"] = True
    try:
        with warnings.catch_warnings():
            # From torch 2.14 on. A sparse tensor is refused anyway, with a reason.
            warnings.filterwarnings("ignore", "Validating sparse tensor invariants")
            found = torch.load(path, **keywords)
    except OSError as error:
        raise BadStore(f"{path} cannot be opened: {error.strerror or error}", path=path) from None
    except Exception:
        # Omits torch's message, which advises unpickling everything and so running untrusted code.
        raise BadStore(
            f"{path} cannot be opened as tensors",
            likely="it contains more than tensors, is truncated, or was not saved by torch.save of "
            "torch 1.6 or later.",
            remedy=_ONLY_TENSORS,
            path=path,
        ) from None
    if isinstance(found, torch.Tensor):
        return {name: found}, "single"
    if isinstance(found, dict):
        tensors, form = found, "dict"
    else:
        tensors, form = {f"field_{n}": one for n, one in enumerate(found)}, "tuple"
    if not tensors or not all(isinstance(one, torch.Tensor) for one in tensors.values()):
        raise BadStore(f"{path} contains more than tensors", remedy=_ONLY_TENSORS, path=path)
    return tensors, form
