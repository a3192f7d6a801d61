"""``penstock pack SRC DST``: a folder of images, or ``script.py:dataset``, into a packed set."""

from __future__ import annotations

import contextlib
import importlib
import os
import runpy
import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import typer

from penstock.cli.doctor.target import find_target
from penstock.errors import BadTarget, PenstockError
from penstock.packing import pack
from penstock.sources.fields import Field
from penstock.sources.packed import Packed

FAILED = 1


@dataclass(frozen=True, kw_only=True)
class PackOptions:
    """What the person asked for.

    Args:
        source: A folder of images, ``script.py:name``, or ``package.module:name``.
        encoding, longer_side, quality: Of images.
        on: "here", or "ray".
    """

    source: str
    target: str
    workers: str = "auto"
    on_error: str = "raise"
    encoding: str | None = None
    longer_side: int | None = None
    quality: int | None = None
    on: str = "here"


def run_pack(options: PackOptions) -> int:
    """Pack, say what was packed, and give the exit code."""
    dataset = _find_dataset(options.source)
    fields = _image_wishes(dataset, options)
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
                workers="auto" if options.workers == "auto" else int(options.workers),
                on_error=options.on_error,
                **keywords,
            )
    except PenstockError:
        raise
    except KeyboardInterrupt:
        typer.echo(f"Stopped. The same line again goes on: {_again()}", err=True)
        raise
    _print(packed, options)
    return 0


@contextlib.contextmanager
def _plain_warnings() -> Iterator[None]:
    """Without a line of our own source, which says nothing to whoever typed a command."""
    before, warnings.formatwarning = warnings.formatwarning, _as_note
    try:
        yield
    finally:
        warnings.formatwarning = before


def _as_note(message: Any, *_: Any, **__: Any) -> str:
    return f"Note: {message}\n"


def _again() -> str:
    return " ".join(["penstock", *sys.argv[1:]])


def _find_dataset(source: str) -> Any:
    if os.path.isdir(source):
        from penstock.sources.image_folder import ImageFolder

        return ImageFolder(source)
    file, _, name = source.rpartition(":")
    if file.endswith(".py") or source.endswith(".py"):  # the latter is told which names it has
        find_target(source, "pack")
        sys.path.insert(0, os.path.dirname(os.path.abspath(file)))
        found = runpy.run_path(file, run_name="__penstock__").get(name)
        if found is None:
            raise BadTarget(f"{file} ran, and {name!r} was not there", remedy="name the dataset")
    elif name and file:
        found = _import(file, name, source)
    else:
        raise BadTarget(
            f"{source!r} is no folder, and not SCRIPT.py:DATASET",
            remedy="penstock pack photos/ packed/   or   penstock pack train.py:dataset packed/",
        )
    is_maker = callable(found) and not hasattr(found, "__getitem__")
    if is_maker or isinstance(found, type):
        found = found()
    return found if hasattr(found, "__getitem__") else getattr(found, "dataset", found)


def _import(module: str, name: str, source: str) -> Any:
    sys.path.insert(0, os.getcwd())
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise BadTarget(f"{source!r} cannot be found: {error}") from None


def _image_wishes(dataset: Any, options: PackOptions) -> Any:
    wishes = (options.encoding, options.longer_side, options.quality)
    if wishes == (None, None, None):
        return None
    names = getattr(dataset, "packed_names", None)
    if names is None:
        raise BadTarget("--encoding, --longer-side and --quality are for folders of images")
    field = Field(
        encoding=options.encoding, longer_side=options.longer_side, quality=options.quality
    )
    return {names[0]: field, **dict.fromkeys(names[1:])}


def _print(packed: Packed, options: PackOptions) -> None:
    num_bytes = packed._files[0].num_bytes
    typer.echo(f"{len(packed)} samples of {', '.join(packed.fields)}: {num_bytes / 1e6:.1f} MB")
    for index, text in packed.bad_samples[:5]:
        typer.echo(f"  sample {index} is bad: {text}")
    if len(packed.bad_samples) > 5:
        typer.echo(f"  and {len(packed.bad_samples) - 5} more: Packed(...).bad_samples has them")
    typer.echo(f"penstock.Packed({options.target!r}) reads it.")
