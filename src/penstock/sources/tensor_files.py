"""Arrays that lie on the disk already: ``.npy`` files, folders of them, and ``.pt`` tensors."""

from __future__ import annotations

import os
from typing import Any

import numpy as np

from penstock.errors import BadArgument, BadStore, CannotPack
from penstock.sources.columns import Column, FixedColumn, Part
from penstock.sources.manifest import FieldSchema
from penstock.sources.npy_files import map_array
from penstock.sources.packed import Columns


class TensorFiles:
    """Files, mapped; travels as their names.

    Args:
        paths: By field.
        form: Of a sample.
    """

    draws_nothing = True

    def __init__(self, paths: dict[str, str], form: str) -> None:
        self._paths = paths
        self.form = form
        parts: dict[str, Part] = {}
        for name, path in paths.items():
            parts.update(self._open(name, path))
        lengths = {name: len(part.array) for name, part in parts.items()}
        if len(set(lengths.values())) > 1:
            raise BadStore(
                "the arrays differ in length: "
                + ", ".join(f"{name} has {length}" for name, length in lengths.items()),
                remedy="open_tensors with arrays that have one row for each sample",
            )
        self.columns: dict[str, Column] = {
            name: FixedColumn([part]) for name, part in parts.items()
        }
        self.schemas = tuple(self._dtypes[name] for name in parts)
        self.num_bytes = sum(part.array.nbytes for part in parts.values())

    def __reduce__(self) -> tuple[Any, ...]:
        return TensorFiles, (self._paths, self.form)

    def _open(self, name: str, path: str) -> dict[str, Part]:
        self._dtypes: dict[str, FieldSchema] = getattr(self, "_dtypes", {})
        if path.endswith(".npy"):
            mapped = _map(path)
            self._describe(name, mapped.array, mapped.array.dtype.str, path)
            return {name: Part(mapped.array, mapping=mapped.mapping, offset=mapped.offset)}
        tensors, self.form = _load(path, name)
        parts = {}
        for key, tensor in tensors.items():
            array, dtype = _as_array(tensor, f"{path}: {key}")
            self._describe(key, array, dtype, path)
            parts[key] = Part(array)
        return parts

    def _describe(self, name: str, array: np.ndarray, dtype: str, path: str) -> None:
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
            self._dtypes[name] = FieldSchema(
                name=name, kind="tensor", dtype=dtype, shape=array.shape[1:]
            )
        except CannotPack as error:
            raise BadStore(
                f"{path}: {error.what}",
                remedy=f"open_tensors(x={path!r})" if path.endswith(".npy") else None,
                path=path,
            ) from None


class Tensors(Columns):
    """A dataset over array files; see :func:`open_tensors`."""

    def __init__(self, files: TensorFiles) -> None:
        self._hold(files)


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
        return Tensors(TensorFiles({k: os.fspath(v) for k, v in fields.items()}, "dict"))
    if len(names) == 1 and os.path.isdir(names[0]):
        found = sorted(one for one in os.listdir(names[0]) if one.endswith(".npy"))
        if not found:
            raise BadStore(f"{names[0]} has no .npy file", remedy="np.save(folder + '/x.npy', x)")
        inside = {one[: -len(".npy")]: os.path.join(names[0], one) for one in found}
        return Tensors(TensorFiles(inside, "dict"))
    if len(names) == 1:
        return Tensors(TensorFiles({"value": names[0]}, "single"))
    if any(not name.endswith(".npy") for name in names):
        raise BadArgument("of several files each must be a .npy", remedy="np.save('x.npy', x)")
    return Tensors(TensorFiles({f"field_{n}": name for n, name in enumerate(names)}, "tuple"))


def _map(path: str) -> Any:
    try:
        return map_array(path)
    except OSError as error:
        raise BadStore(f"{path} cannot be opened: {error.strerror or error}", path=path) from None


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
            remedy="torch.save a tensor, a list or a dict of tensors, and nothing else",
            path=path,
        ) from None
    if isinstance(found, torch.Tensor):
        return {name: found}, "single"
    if isinstance(found, dict):
        tensors, form = found, "dict"
    else:
        tensors, form = {f"field_{n}": one for n, one in enumerate(found)}, "tuple"
    if not tensors or not all(isinstance(one, torch.Tensor) for one in tensors.values()):
        raise BadStore(
            f"{path} holds something else than tensors",
            remedy="torch.save a tensor, a list or a dict of tensors, and nothing else",
            path=path,
        )
    return tensors, form


def _as_array(tensor: Any, where: str) -> tuple[np.ndarray, str]:
    import torch

    try:
        plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
        if plain.dtype is torch.bfloat16:
            return plain.view(torch.int16).numpy().view("<u2"), "bfloat16"
        array: np.ndarray = plain.numpy()
    except (TypeError, RuntimeError, NotImplementedError):
        layout = str(tensor.layout).removeprefix("torch.")
        raise BadStore(
            f"{where} is a {layout} tensor of {tensor.dtype} on {tensor.device}, whose rows cannot "
            "be mapped",
            remedy="torch.save x.to_dense().float(), say",
        ) from None
    return array, array.dtype.str
