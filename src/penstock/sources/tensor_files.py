"""Datasets over arrays that lie on the disk already: ``.npy`` files, folders of them, ``.pt``."""

from __future__ import annotations

import os
from typing import Any

from penstock.errors import BadArgument, BadStore, CannotPack
from penstock.sources.array_files import MappedArray, map_array
from penstock.sources.columns import Column, FixedColumn, ShardRows
from penstock.sources.fields import array_of
from penstock.sources.manifest import FieldSchema
from penstock.sources.packed import ColumnDataset

_ONLY_TENSORS = "torch.save a tensor, a list or a dict of tensors, and nothing else"


class TensorFiles:
    """Files, mapped; pickled as their names.

    Args:
        paths: By field.
        form: Of a sample.
    """

    draws_nothing = True

    def __init__(self, paths: dict[str, str], form: str) -> None:
        self._paths = paths
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
                    remedy = "torch.save x.to_dense().float(), say"
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
        return TensorFiles, (self._paths, self.form)

    def _add(self, name: str, mapped: MappedArray, dtype: str, path: str) -> None:
        array = mapped.array
        if not array.ndim:
            raise BadStore(f"{path} is a single number: there is no row for each sample", path=path)
        if dtype != "bfloat16" and (array.dtype.kind not in "biufc" or array.dtype.char in "gG"):
            raise BadStore(
                f"{path} holds {array.dtype}, which no tensor has",
                remedy="np.save numbers: an array of float64, int64 or the like",
                path=path,
            )
        if array.dtype.byteorder == ">":
            raise BadStore(
                f"{path} holds {array.dtype.str}, with the bytes of each number reversed",
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
    """A dataset over array files; see :func:`open_tensors`."""

    def __init__(self, files: TensorFiles) -> None:
        self._open(files)


def open_tensors(*paths: str | os.PathLike[str], **fields: str | os.PathLike[str]) -> Tensors:
    """A dataset over tensors that are on the disk already, without packing and without loading.

    Args:
        paths: ``.npy`` files (a sample is a tuple of one row of each; of one file, its row), a
            folder of ``.npy`` files (a dict by their names), or a ``.pt`` file with a tensor, a
            list or a dict of them.
        fields: Files by the name that a sample's dict shall have.

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
            "open_tensors takes files, or fields with a file each, and not both",
            remedy='open_tensors(image="images.npy", label="labels.npy")',
        )
    if fields:
        found, form = {name: os.fspath(path) for name, path in fields.items()}, "dict"
    elif len(names) == 1 and os.path.isdir(names[0]):
        inside = sorted(one for one in os.listdir(names[0]) if one.endswith(".npy"))
        if not inside:
            raise BadStore(f"{names[0]} has no .npy file", remedy="np.save(folder + '/x.npy', x)")
        found = {one.removesuffix(".npy"): os.path.join(names[0], one) for one in inside}
        form = "dict"
    elif len(names) == 1:
        found, form = {"value": names[0]}, "single"
    else:
        if any(not name.endswith(".npy") for name in names):
            raise BadArgument("of several files each must be a .npy", remedy="np.save('x.npy', x)")
        found, form = {f"field_{n}": name for n, name in enumerate(names)}, "tuple"
    return Tensors(TensorFiles(found, form))


def _load(path: str, name: str) -> tuple[dict[str, Any], str]:
    """The tensors in a ``.pt`` file, mapped where torch can; nothing else is unpickled."""
    if path.endswith(".npz"):
        raise BadStore(
            f"{path} is an archive, whose arrays cannot be mapped",
            remedy="np.save each of them, or penstock.pack",
            path=path,
        )
    import torch

    keywords: dict[str, Any] = {"map_location": "cpu", "weights_only": True}
    if "mmap" in torch.load.__code__.co_varnames:  # from torch 2.1 on
        keywords["mmap"] = True
    try:
        found = torch.load(path, **keywords)
    except OSError as error:
        raise BadStore(f"{path} cannot be opened: {error.strerror or error}", path=path) from None
    except Exception:
        # Not torch's own words: they advise to unpickle all of it, which runs a stranger's code.
        raise BadStore(
            f"{path} cannot be opened as tensors",
            likely="it holds more than tensors, is cut off, or is not of torch.save's format since "
            "torch 1.6.",
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
        raise BadStore(f"{path} holds something else than tensors", remedy=_ONLY_TENSORS, path=path)
    return tensors, form
