"""``penstock pack SRC DST``: packs a folder of images, or a dataset in a script."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import shlex
import sys
import warnings
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from penstock.cli import INTERRUPTED
from penstock.cli.parser import CommandParser, add_loader_options, number, one_of
from penstock.cli.script_loading import load_dataset
from penstock.cli.sections import escape_unprintable
from penstock.cli.user_code import last_line, place_of
from penstock.engine.loading.sample_path import find_path
from penstock.errors import BadImage, BadTarget, CannotPack, PenstockError
from penstock.user_objects import offers, probe

if TYPE_CHECKING:
    from penstock.sources.image_folder import ImageFolder
    from penstock.sources.packed import Packed

SPLITS = {"train", "training", "val", "valid", "validation", "test", "testing", "dev", "eval"}
"""Names of folders that usually hold a split of the data, not a class."""
_NUM_SHOWN = 8


def add_arguments(parser: CommandParser) -> None:
    """Declare the arguments of the command. Called by :mod:`penstock.cli.parser`."""
    parser.add_argument(
        "source",
        metavar="SRC",
        help="A folder of images, SCRIPT.py:DATASET, or a packed set to copy.",
    )
    parser.add_argument("target", metavar="DST", help="A new folder, or s3://BUCKET/SET.")
    parser.add_script_arguments()
    add_loader_options(
        parser,
        *("num_workers", "on_error"),
        help={
            "num_workers": "Number of workers that load samples. By default, auto.",
            "on_error": 'Policy for a sample that raises: "raise" stops, "skip" omits the sample, '
            'and "replace" stores a different one.',
        },
    )
    parser.add_value("--encoding", "keep|jpeg|raw", str, "Encoding of stored images.")
    parser.add_value(
        "--longer-side", "N", number(int, 1), "Shrink images whose longer side has more pixels."
    )
    parser.add_value("--quality", "N", number(int, 1, 100), "JPEG quality.")
    parser.add_value(
        "--on",
        "here|ray",
        one_of("here", "ray"),
        "Pack on this machine (here) or on a Ray cluster (ray).",
        default="here",
    )


def execute(options: argparse.Namespace) -> None:
    """Pack the dataset and print a summary."""
    from penstock.packing import pack

    escape_unprintable()

    if "://" in options.source or os.path.exists(os.path.join(options.source, "manifest.json")):
        _copy(options.source, options.target)
        return
    typed = sys.argv[1:]  # before a script replaces it
    if os.path.isdir(options.source) and options.arguments:
        raise BadTarget(
            f"{options.source!r} is a folder, so no script takes {shlex.join(options.arguments)!r}",
            remedy=shlex.join(["penstock", "pack", options.source, options.target]),
        )
    dataset = _find_dataset(options.source, options.arguments)
    fields = _image_fields(dataset, options)
    keywords: dict[str, Any] = {}
    if options.on == "ray":
        from penstock.integrations.ray_packing import ray_map

        keywords["map"] = ray_map()
    try:
        with _plain_warnings():
            packed = pack(
                dataset,
                options.target,
                fields=fields,
                workers="auto" if options.num_workers is None else options.num_workers,
                on_error=options.on_error,
                **keywords,
            )
    except KeyboardInterrupt:
        command = shlex.join(["penstock", *typed])
        print(f"Interrupted. Run the same command to continue: {command}", file=sys.stderr)
        sys.exit(INTERRUPTED)
    except SystemExit as ended:
        raise BadTarget(
            f"a sample ended the program with exit code {ended.code}",
            remedy=f"penstock doctor {options.source}, which names the sample",
        ) from None
    except Exception as error:
        raise _explained(error, typed) from None
    _print(packed, options.target, dataset)


def _explained(error: Exception, typed: list[str]) -> Exception:
    """Return the error to raise. For a sample that cannot be packed, it names ``--on-error``."""
    index = getattr(error, "sample_index", None)
    of_a_sample = not isinstance(error, PenstockError) or isinstance(error, (BadImage, CannotPack))
    if index is None or not of_a_sample:
        return error
    end = typed.index("--") if "--" in typed else len(typed)  # arguments of the script follow
    command = shlex.join(["penstock", *typed[:end], "--on-error", "skip", *typed[end:]])
    remedy = f"{command}  # leaves such samples out, and lists them"
    if isinstance(error, BadImage):
        path = error.facts.get("path")
        where = f"sample {index}" + (f", {path}" if path else "")
        return BadImage(error.what, where=where, likely=error.likely, remedy=remedy)
    if isinstance(error, CannotPack):
        remedy = "; or ".join(filter(None, (error.remedy, remedy)))
        return CannotPack(error.what, likely=error.likely, remedy=remedy)
    what = f"sample {index} cannot be loaded: {last_line(error)}"
    return BadTarget(what, where=place_of(error), remedy=remedy)


def _copy(source: str, target: str) -> None:
    """Copy a packed set, with progress."""
    from penstock.packing import bar
    from penstock.sources.remote.set_copy import copy_set

    with bar("copying", 100, None) as tell:
        manifest = copy_set(source, target, tell)
    print(f"{manifest.num_samples} samples copied and verified.")
    print(f"Open it with penstock.Packed({target!r}).")


@contextlib.contextmanager
def _plain_warnings() -> Iterator[None]:
    """Show warnings without a line of Penstock's source, which does not help command-line users."""
    before, warnings.formatwarning = warnings.formatwarning, _as_note
    try:
        yield
    finally:
        warnings.formatwarning = before


def _as_note(message: Any, *_: Any, **__: Any) -> str:
    return f"Note: {message}\n"


def _find_dataset(source: str, arguments: Sequence[str]) -> Any:
    if os.path.isdir(source):
        from penstock.sources.image_folder import ImageFolder

        folder = ImageFolder(source)
        _print_classes(folder)
        return folder
    file, _, name = source.rpartition(":")
    if file.endswith(".py") or source.endswith(".py"):  # a script without a name raises below
        found = load_dataset(source, "pack", arguments)
    elif name and file:
        found = _import(file, name, source)
    else:
        raise BadTarget(
            f"{source!r} is neither a folder nor SCRIPT.py:DATASET",
            remedy="penstock pack photos/ packed/   or   penstock pack train.py:dataset packed/",
        )
    is_maker = callable(found) and not hasattr(type(found), "__getitem__")
    if is_maker or isinstance(found, type):
        found = found()
    return found if hasattr(type(found), "__getitem__") else probe(found, "dataset", found)


def _print_classes(folder: ImageFolder) -> None:
    """Print the classes of a folder of images. Warn if they look like splits."""
    names = folder.classes
    more = f" and {len(names) - _NUM_SHOWN} more" if len(names) > _NUM_SHOWN else ""
    print(
        f"{len(folder)} images in {len(names)} class{'es' if len(names) != 1 else ''}: "
        f"{', '.join(names[:_NUM_SHOWN])}{more}"
    )
    found = {os.path.dirname(path) for path, _ in folder.samples}
    inner = sorted(os.path.relpath(path, folder.root) for path in found)
    if not all(os.sep in path for path in inner) and not SPLITS.issuperset(names):
        return
    print(
        f"Note: the images lie one level deeper, as in {os.path.join(folder.root, inner[0])}. The "
        f"classes are the folders in {folder.root}: {', '.join(names[:_NUM_SHOWN])}{more}. To pack "
        f"one of them with its own folders as classes: penstock pack "
        f"{shlex.quote(os.path.join(folder.root, names[0]))} DST",
        file=sys.stderr,
    )


def _import(module: str, name: str, source: str) -> Any:
    sys.path.insert(0, os.getcwd())
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise BadTarget(f"{source!r} cannot be found: {error}") from None


def _image_fields(dataset: Any, options: argparse.Namespace) -> Any:
    asked = {name: getattr(options, name) for name in ("encoding", "longer_side", "quality")}
    if not any(asked.values()):
        return None
    names = dataset.packed_names if offers(dataset, "packed_sample") else None
    if names is None:
        raise BadTarget("--encoding, --longer-side and --quality require a folder of images")
    from penstock.sources.fields import Field

    return {names[0]: Field(**asked), **dict.fromkeys(names[1:])}


def _print(packed: Packed, folder: str, dataset: Any) -> None:
    num_bytes = packed._files[0].num_bytes
    print(f"{len(packed)} samples of {', '.join(packed.fields)}: {num_bytes / 1e6:.1f} MB")
    for index, text in packed.bad_samples[:5]:
        path = find_path(dataset, index)
        print(f"  sample {index}{f' ({path})' if path else ''} is bad: {text}")
    if len(packed.bad_samples) > 5:
        print(f"  and {len(packed.bad_samples) - 5} more, listed in Packed(...).bad_samples")
    print(f"Open it with penstock.Packed({folder!r}).")
