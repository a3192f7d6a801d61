"""``open_dataset()``: datasets in other people's formats, read by index without conversion.

The format is recognised by the path: the ending of files, or the files in a folder. Only the reader
of that format is imported.
"""

from __future__ import annotations

import glob
import importlib
import inspect
import itertools
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from penstock.errors import BadArgument, BadStore
from penstock.options import refuse_unknown
from penstock.sources.blocks import ReadOptions
from penstock.sources.source_files import open_error, read_json

Paths = str | os.PathLike[str] | Iterable[str | os.PathLike[str]]


class Format(NamedTuple):
    """A format: its reader, and how it is recognised.

    The reader is called with a list of paths (files, or one folder), the options of all formats,
    and its own options as keywords.
    """

    module: str
    reader: str
    endings: tuple[str, ...] = ()
    """Endings of files. A folder of such files is also recognised."""
    is_folder: Callable[[str], bool] | None = None
    """Returns True for a folder in this format."""


def _has_files(*names: str) -> Callable[[str], bool]:
    return lambda folder: all(os.path.exists(os.path.join(folder, name)) for name in names)


def _has_index(key: str) -> Callable[[str], bool]:
    """Recognise folders whose ``index.json`` is a dict with this key."""

    def is_folder(folder: str) -> bool:
        path = os.path.join(folder, "index.json")
        try:
            found = read_json(path)
        except (FileNotFoundError, NotADirectoryError, ValueError):
            return False
        except OSError as error:
            raise open_error(path, error) from None
        return isinstance(found, dict) and key in found

    return is_folder


def _has_classes(folder: str) -> bool:
    from penstock.sources.image_folder import EXTENSIONS

    for inner in sorted(os.listdir(folder)):  # of a file, walk yields nothing
        for _, _, names in os.walk(os.path.join(folder, inner)):
            if any(name.lower().endswith(EXTENSIONS) for name in names):
                return True
    return False


_COMPRESSED_TARS = (".tar.gz", ".tgz", ".tar.bz2", ".tar.xz", ".tar.zst", ".tar.lz4")
"""Recognised for the sake of the error that says why they cannot be read by index."""


def _is_hugging_face(folder: str) -> bool:
    saved, several = _has_files("state.json", "dataset_info.json"), _has_files("dataset_dict.json")
    return saved(folder) or several(folder)


FORMATS: dict[str, Format] = {
    "packed": Format("packed", "open_packed", is_folder=_has_files("manifest.json")),
    "hf": Format("arrow_dataset", "open_hugging_face", is_folder=_is_hugging_face),
    "mds": Format("mds_dataset", "open_mds", is_folder=_has_index("shards")),
    "litdata": Format("litdata_dataset", "open_litdata", is_folder=_has_index("chunks")),
    "lance": Format("lance_dataset", "open_lance", is_folder=_has_files("_versions")),
    "parquet": Format("parquet_dataset", "open_parquet", (".parquet", ".pq")),
    "arrow": Format("arrow_dataset", "open_arrow", (".arrow", ".feather", ".arrows", ".ipc")),
    "tar": Format("tar_dataset", "open_tars", (".tar", *_COMPRESSED_TARS)),
    "image folder": Format("image_folder", "open_image_folder", is_folder=_has_classes),
}
"""Formats in the order in which a folder is examined."""


def open_dataset(
    path: Paths,
    *,
    format: str | None = None,
    columns: Sequence[str] | None = None,
    decode: bool = True,
    transforms: Mapping[str, Callable[[Any], Any]] | None = None,
    allow_pickle: bool = False,
    **options: Any,
) -> Any:
    """Open a dataset in its own format. Samples have an index and are read where they lie.

    All of Penstock's promises hold for it: the order is a function of the seed, a run resumes at
    any batch, and ranks share the samples without losing or repeating one. The result has
    ``block_order()``, a shuffled order that reads adjacent samples together.

    Args:
        path: A file, a folder, a pattern (``"data/*.tar"``, ``"train-{000..099}.tar"``), or a list
            of files. Or the addresses of packed sets, tars or Parquet files in object storage
            (``"s3://bucket/tars/"``).
        format: ``"packed"``, ``"hf"`` (Hugging Face datasets), ``"mds"``, ``"litdata"``,
            ``"lance"``, ``"parquet"``, ``"arrow"``, ``"tar"`` or ``"image folder"``. None:
            recognised by the path.
        columns: Load only these fields.
        decode: Decode images and other fields. False: hand out their bytes.
        transforms: Functions of a field's value, by field name. They can be random.
        allow_pickle: Load pickled fields. Pickles run any code they contain, so allow it only for
            files that you trust.
        options: Options of the format's reader. For object storage also ``cache_folder``,
            ``cache_bytes``, ``read_ahead_bytes`` and ``network_timeout_s``, as in
            :class:`penstock.Packed`.

    Raises:
        BadStore: The format is not recognised, or the files are invalid.
        MissingExtra: The format needs a package that is not installed.

    Example:
        >>> import tempfile, penstock
        >>> folder = tempfile.mkdtemp() + "/squares"
        >>> _ = penstock.pack([{"n": i, "square": i * i} for i in range(10)], folder)
        >>> squares = penstock.open_dataset(folder, columns=["square"])
        >>> squares[3], len(squares)
        ({'square': 9}, 10)
    """
    if format is not None:
        BadArgument.unless_one_of("format", format, tuple(FORMATS), "open_dataset")
    if addresses := _find_addresses(path):
        from penstock.sources.remote.object_files import open_objects

        cache = {name: options.pop(name) for name in _CACHE_OPTIONS if name in options}
        endings = {name: one.endings for name, one in FORMATS.items()}
        name, files = open_objects(addresses, format, endings, cache)
        options.update(cache if name == "packed" else {})
    else:
        paths = expand_paths(path)
        name = format or recognise_format(paths)
        files = _list_files(paths, FORMATS[name].endings)
    module = importlib.import_module(f"penstock.sources.{FORMATS[name].module}")
    reader = getattr(module, FORMATS[name].reader)
    _refuse_unknown(options, name, reader)
    if len(files) > 1 and not FORMATS[name].endings and name != "packed":
        raise BadArgument(
            f"format={name!r} reads one folder at a time, and {len(files)} paths were given",
            remedy="torch.utils.data.ConcatDataset([penstock.open_dataset(one) for one in paths])",
        )
    return reader(files, ReadOptions(columns, decode, transforms, allow_pickle), **options)


_CACHE_OPTIONS = ("cache_folder", "cache_bytes", "read_ahead_bytes", "network_timeout_s")


def _find_addresses(path: Any) -> list[str]:
    """Return the addresses in object storage, without braces, or none for paths."""
    listed = path if isinstance(path, (list, tuple)) else [path]
    found = [one for one in listed if isinstance(one, str) and "://" in one]
    if found and len(found) < len(listed):
        raise BadArgument(
            f"{found[0]} is in object storage, and other paths are not",
            remedy="torch.utils.data.ConcatDataset([penstock.open_dataset(one) for one in paths])",
        )
    return [name for one in found for name in expand_braces(one)]


def _refuse_unknown(options: Mapping[str, Any], name: str, reader: Callable[..., Any]) -> None:
    own = [one.name for one in inspect.signature(reader).parameters.values()][2:]
    known = ("format", *ReadOptions._fields, *own)
    refuse_unknown(
        "open_dataset",
        options,
        dict.fromkeys(known),
        f". The options for format={name!r} are {', '.join(known)}",
    )


def recognise_format(paths: list[str]) -> str:
    """Return the name of the format of these files or this folder."""
    is_folder = len(paths) == 1 and os.path.isdir(paths[0])
    found: dict[str, list[str]] = {}
    for name, one in FORMATS.items():
        if is_folder and not found and one.is_folder is not None and one.is_folder(paths[0]):
            return name
        files = _list_files(paths, one.endings) if one.endings else []
        if files and all(file.lower().endswith(one.endings) for file in files):
            found[name] = files
    if len(found) == 1:
        return next(iter(found))
    if found:
        counts = ", ".join(f"{len(files)} of {name!r}" for name, files in found.items())
        raise BadStore(
            f"{paths[0]} has files of several formats: {counts}",
            remedy=f"open_dataset({paths[0]!r}, format={next(iter(found))!r}), or one open_dataset "
            "for each format",
            path=paths[0],
        )
    shown = paths[0] if len(paths) == 1 else f"{paths[0]} and {len(paths) - 1} other files"
    raise BadStore(
        f"the format of {shown} is not recognised",
        likely="a folder of another kind, or files without their usual ending.",
        remedy=f"open_dataset(path, format=...) with one of {', '.join(map(repr, FORMATS))}",
        path=paths[0],
    )


def _list_files(paths: list[str], endings: tuple[str, ...]) -> list[str]:
    """Return the files with these endings of a folder, in order of their names. Or the paths.

    Hidden files (``.a.tar``, macOS's ``._a.tar``) and those of Spark (``_a.parquet``) are left out,
    as pyarrow does.
    """
    if not endings or len(paths) != 1 or not os.path.isdir(paths[0]):
        return paths
    try:
        inside = os.listdir(paths[0])
    except OSError as error:
        raise open_error(paths[0], error) from None
    listed = (name for name in inside if not name.startswith((".", "_")))
    names = sorted(name for name in listed if name.lower().endswith(endings))
    return [os.path.join(paths[0], name) for name in names] or paths


# Patterns


def expand_paths(path: Paths) -> list[str]:
    """Return the files of a path, pattern or list, as strings.

    Raises:
        BadStore: A file does not exist, or no file matches a pattern.

    Example:
        >>> list(expand_braces("train-{008..011}.{tar,idx}"))[::3]
        ['train-008.tar', 'train-009.idx', 'train-011.tar']
    """
    given: Any = path
    is_list = isinstance(given, Iterable) and not isinstance(given, (str, bytes, os.PathLike))
    listed = list(given) if is_list else [given]
    if not listed:
        raise BadArgument("the list of paths is empty", remedy='open_dataset("shards/*.tar")')
    for one in listed:
        if not isinstance(one, (str, os.PathLike)):
            raise BadArgument(
                f"a path is {one!r}, which is neither text nor a Path",
                remedy='open_dataset("shards/*.tar")',
            )
    found: list[str] = []
    for one in [os.fspath(each) for each in listed]:
        found += [one] if os.path.exists(one) else _expand(one)
    return found


def _expand(pattern: str) -> list[str]:
    found: list[str] = []
    for one in expand_braces(pattern):
        matches = sorted(glob.glob(one)) if glob.has_magic(one) else [one] * os.path.exists(one)
        if not matches:
            from penstock.sources.remote.address import refuse_single_slash

            refuse_single_slash(one)
            _refuse_denied(one)
            raise BadStore(
                f"{one} does not exist, or matches no file",
                remedy=f"ls {os.path.dirname(one) or '.'}",
                path=one,
            )
        found += matches
    return found


def _refuse_denied(path: str) -> None:
    """Raise if a path matches nothing because its folder may not be read."""
    folder = os.path.dirname(path) or "."
    try:
        os.stat(path)
    except PermissionError as error:
        raise open_error(path, error) from None
    except OSError:
        if os.path.isdir(folder) and not os.access(folder, os.R_OK | os.X_OK):
            raise open_error(folder, PermissionError()) from None


_BRACES = re.compile(r"\{([^{}]*)\}")


def expand_braces(pattern: str) -> Iterable[str]:
    """Return the names that a pattern with ``{000..099}`` or ``{a,b}`` stands for, in order."""
    pieces = _BRACES.split(pattern)
    choices = [_alternatives(piece) if n % 2 else [piece] for n, piece in enumerate(pieces)]
    return map("".join, itertools.product(*choices))


def _alternatives(inside: str) -> list[str]:
    numbers = re.fullmatch(r"(\d+)\.\.(\d+)", inside)
    if numbers is None:
        return inside.split(",")
    first, last = numbers.groups()
    width = max(len(first), len(last)) if first.startswith("0") or last.startswith("0") else 0
    step = 1 if int(first) <= int(last) else -1
    return [f"{n:0{width}}" for n in range(int(first), int(last) + step, step)]
