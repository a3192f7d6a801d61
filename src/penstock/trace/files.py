"""Trace files: JSON with columns of integers, compressed if the name ends in ``.gz``.

{"format": "penstock-trace", "version": 1, "facts": {...},
 "lanes": [{"name", "role", "number", "pid", "num_lost", "names": [...],
            "columns": {"kind": [...], "start_ns": [...], ...}}]}
"""

from __future__ import annotations

import gzip
import json
import os
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from penstock.errors import BadTrace
from penstock.trace.record import Record

FORMAT, VERSION = "penstock-trace", 1
_COLUMNS = tuple(name for name in Record._fields if name != "name")
_PLAIN = {"name": str, "role": str, "number": int, "pid": int, "num_lost": int}
"""The fields of a lane other than its records, and their types."""
_GZIP = b"\x1f\x8b"


def dump_records(records: Mapping[str, Any]) -> bytes:
    """Serialize records as an uncompressed trace file."""
    lanes = []
    for lane in records.get("lanes") or ():
        spans = lane.get("spans") or ()
        names = sorted({span.name for span in spans})
        numbers = {name: number for number, name in enumerate(names)}
        fields = enumerate(Record._fields)
        columns = {name: [span[place] for span in spans] for place, name in fields}
        columns["name"] = [numbers[name] for name in columns["name"]]
        plain = {name: lane[name] for name in _PLAIN if name in lane}
        lanes.append({**plain, "names": names, "columns": columns})
    content = {"format": FORMAT, "version": VERSION, "facts": records.get("facts") or {}}
    content["lanes"] = lanes
    return json.dumps(content, separators=(",", ":"), default=str).encode()


def write_records(records: Mapping[str, Any], path: str | os.PathLike[str]) -> None:
    """Write a trace file atomically."""
    write_whole(dump_records(records), path)


def write_whole(content: bytes, path: str | os.PathLike[str]) -> None:
    """Write bytes atomically, compressed if the name ends in ``.gz``.

    Raises:
        BadTrace: The file cannot be written.
    """
    path = Path(path)
    if path.suffix == ".gz":
        content = gzip.compress(content, 5, mtime=0)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        try:
            temporary.write_bytes(content)
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
    except (OSError, ValueError) as error:
        is_there = path.parent.is_dir()
        why = getattr(error, "strerror", None) or str(error)
        raise BadTrace(
            f"{path} cannot be written: {why if is_there else 'the folder does not exist'}",
            remedy="choose another folder, or free disk space"
            if is_there
            else f"mkdir -p {path.parent}",
        ) from error


def read_records(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read the records in a trace file.

    Raises:
        BadTrace: The file is missing, truncated, damaged, or not a Penstock trace.
    """
    content = _load(path)
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise BadTrace(
            f"{path} is not a Penstock trace: {_what_else(content)}",
            remedy="DataLoader(..., trace='run.json') writes one",
        )
    version = content.get("version")
    if not isinstance(version, int) or version > VERSION:
        raise BadTrace(
            f"{path} has format version {version!r}, but this Penstock reads up to {VERSION}",
            remedy="install a newer Penstock",
        )
    try:
        lanes = [_read_lane(lane) for lane in content["lanes"]]
        return {"facts": dict(content.get("facts") or {}), "lanes": lanes}
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise BadTrace(
            f"{path} is damaged: {type(error).__name__}: {error}",
            likely="the file was edited, or two programs wrote to it at the same time.",
            remedy="run again with trace= and a different file name",
        ) from None


def _load(path: str | os.PathLike[str]) -> Any:
    try:
        raw = Path(path).read_bytes()
        text = gzip.decompress(raw) if raw[:2] == _GZIP else raw
        return json.loads(text)
    except OSError as error:
        why = error.strerror or str(error)
        raise BadTrace(
            f"{path} cannot be read: {why}", remedy="DataLoader(..., trace='run.json') writes one"
        ) from None
    except (EOFError, zlib.error):
        raise BadTrace(
            f"{path} is truncated: its {len(raw):,} bytes cannot be decompressed",
            likely="an interrupted copy or download, or a full disk.",
            remedy="copy it again, or run again with trace=",
        ) from None
    except (ValueError, RecursionError) as error:
        if raw.lstrip()[:1] == b"<":
            raise BadTrace(
                f"{path} is an HTML page, which cannot be read back",
                remedy="open it in a browser. For penstock trace, record with "
                f"trace='{Path(path).stem}.json'",
            ) from None
        what = "is empty" if not raw else f"is not JSON, or is truncated ({error})"
        raise BadTrace(
            f"{path} {what}",
            likely="an interrupted copy, or a file of a different kind.",
            remedy="DataLoader(..., trace='run.json') writes one",
        ) from None


def _what_else(content: Any) -> str:
    if isinstance(content, dict) and "traceEvents" in content:
        return "it is a Chrome trace, like those of torch's profiler. Open it in Perfetto"
    if isinstance(content, dict):
        keys = ", ".join(map(repr, list(content)[:3]))
        return f"it contains an object with {f'the keys {keys}' if keys else 'no keys'}"
    return f"it contains a {type(content).__name__}"


def _read_lane(lane: Any) -> dict[str, Any]:
    columns, names = lane["columns"], lane["names"]
    numbers = columns["name"]
    if not all(type(name) is str for name in names):
        raise ValueError("a name is not a string")
    lists = [columns.get(name, [0] * len(numbers)) for name in _COLUMNS]
    if any(len(column) != len(numbers) for column in lists):
        raise ValueError("columns have different lengths")
    if any(type(value) is not int for column in (numbers, *lists) for value in column):
        raise ValueError("a value is not an integer")
    spans = [
        Record(row[0], names[number], *row[1:])
        for number, row in zip(numbers, zip(*lists, strict=True), strict=True)
    ]
    plain = {name: lane[name] for name in _PLAIN if name in lane}
    for name, value in plain.items():
        if type(value) is not _PLAIN[name]:
            raise ValueError(f"{name} is {value!r}")
    return {**plain, "spans": spans}
