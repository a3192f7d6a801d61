"""``penstock pack SRC DST``: packs a folder of images, or a dataset in a script."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import runpy
import sys
import warnings
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from penstock.cli.parser import CommandParser, add_loader_options, number, one_of
from penstock.cli.script_object import find_script_object
from penstock.errors import BadTarget
from penstock.user_objects import offers, probe

if TYPE_CHECKING:
    from penstock.sources.packed import Packed


def add_arguments(parser: CommandParser) -> None:
    """Declare the arguments of the command. Called by :mod:`penstock.cli.parser`."""
    parser.add_argument("source", metavar="SRC", help="A folder of images, or SCRIPT.py:DATASET.")
    parser.add_argument("target", metavar="DST", help="A new folder.")
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

    dataset = _find_dataset(options.source)
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
        again = " ".join(["penstock", *sys.argv[1:]])
        print(f"Interrupted. Run the same command to continue: {again}", file=sys.stderr)
        raise
    _print(packed, options.target)


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


def _find_dataset(source: str) -> Any:
    if os.path.isdir(source):
        from penstock.sources.image_folder import ImageFolder

        return ImageFolder(source)
    file, _, name = source.rpartition(":")
    if file.endswith(".py") or source.endswith(".py"):  # a script without a name raises below
        find_script_object(source, "pack")
        sys.path.insert(0, os.path.dirname(os.path.abspath(file)))
        found = runpy.run_path(file, run_name="__penstock__").get(name)
        if found is None:
            raise BadTarget(
                f"{file} ran but did not define {name!r}",
                remedy="use the name of a dataset in the script",
            )
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


def _print(packed: Packed, folder: str) -> None:
    num_bytes = packed._files[0].num_bytes
    print(f"{len(packed)} samples of {', '.join(packed.fields)}: {num_bytes / 1e6:.1f} MB")
    for index, text in packed.bad_samples[:5]:
        print(f"  sample {index} is bad: {text}")
    if len(packed.bad_samples) > 5:
        print(f"  and {len(packed.bad_samples) - 5} more, listed in Packed(...).bad_samples")
    print(f"Open it with penstock.Packed({folder!r}).")
