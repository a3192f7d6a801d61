"""What does the dataset that is to be packed look like, and how are its samples fetched?

Called from: whoever packs (:func:`make_job`), and whoever writes a shard (:class:`Samples`).
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from penstock.errors import BadArgument, CannotPack, PenstockError
from penstock.options import check_count, check_seed
from penstock.order.keys import BAD_STREAM, GOLDEN, make_key, mix64
from penstock.order.sample_randomness import SampleRandomness
from penstock.sources.fields import (
    Encoder,
    Field,
    ImageEncoder,
    find_schema,
    kind_of,
    mean_bytes,
    read_wishes,
    split_sample,
)
from penstock.sources.manifest import FieldSchema
from penstock.sources.packed_writer import Job, make_fingerprint

SHARD_BYTES = 64 << 20
"""A shard is what a kill costs, and what a worker writes at a time."""
MAX_FILES = 256
"""More than these make shards larger instead: each is a mapping of every reader's and, elsewhere
than on Linux, a descriptor."""
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")
_NUM_PROBES = 8
_NUM_TRIES = 100
"""Substitutes that are tried for a bad sample before packing ends."""


@dataclass(frozen=True)
class Samples:
    """Fetches and encodes samples; travels to workers.

    Args:
        get: From an index to a sample.
        on_error: "raise", "skip", "replace", or a function of (index, error).
    """

    get: Callable[[int], Any]
    num_samples: int
    form: str
    schemas: tuple[FieldSchema, ...]
    wishes: tuple[Field, ...]
    on_error: Any
    seed: int
    images: ImageEncoder | None

    def __call__(self, indices: range) -> Iterator[tuple[int, Any]]:
        """For each index: the encoded sample; for a bad one first, or only, what is wrong."""
        randomness = SampleRandomness(self.seed)
        pairs = zip(self.schemas, self.wishes, strict=True)
        encoders = [Encoder(schema, request, self.images) for schema, request in pairs]

        def fetch(index: int) -> list[np.ndarray]:
            return self._encode(randomness.call(self.get, index, index), encoders, index)

        for index in indices:
            try:
                yield index, fetch(index)
                continue
            except Exception as error:
                if self.on_error == "raise":
                    _note_sample(error, index)
                    raise
                failed = error
            yield index, _text_of(failed)
            if self.on_error == "replace":
                yield index, self._substitute(fetch, index, failed)
            elif callable(self.on_error):
                other = self.on_error(index, failed)
                if other is not None:
                    yield index, self._encode(other, encoders, index)

    def _encode(self, sample: Any, encoders: list[Encoder], index: int) -> list[np.ndarray]:
        form, names, values = split_sample(sample)
        if form == "dict" and self.form == "dict":
            found = dict(zip(names, values, strict=True))
            wanted = [encoder.schema.name for encoder in encoders]
            if set(found) != set(wanted):
                raise CannotPack(
                    f"sample {index} has the fields {names}; the first ones have {wanted}",
                    remedy="the same keys in every sample",
                    sample_index=index,
                )
            values = [found[name] for name in wanted]
        if form != self.form or len(values) != len(encoders):
            raise CannotPack(
                f"sample {index} is a {form} of {len(values)}; the first ones are a {self.form} "
                f"of {len(encoders)}",
                sample_index=index,
            )
        try:
            pairs = zip(encoders, values, strict=True)
            return [encoder.encode(value) for encoder, value in pairs]
        except CannotPack as error:
            raise CannotPack(
                f"sample {index}: {error.what}",
                likely=error.likely,
                remedy=error.remedy,
                field=error.facts.get("field"),
                sample_index=index,
            ) from None

    def _substitute(self, fetch: Any, index: int, failed: Exception) -> Any:
        key = make_key(BAD_STREAM, self.seed)
        for attempt in range(_NUM_TRIES):
            other = mix64(key + GOLDEN * (index * _NUM_TRIES + attempt + 1)) % self.num_samples
            try:
                return fetch(other)
            except Exception:
                continue
        raise CannotPack(
            f"sample {index} is bad, and so were {_NUM_TRIES} others in its place",
            sample_index=index,
        ) from failed


def make_job(
    dataset: Any,
    *,
    fields: Any = None,
    on_error: Any = "raise",
    seed: int = 0,
    shard_bytes: int = SHARD_BYTES,
    images: ImageEncoder | None = None,
    on_probe: Callable[[int, Any], None] = lambda index, sample: None,
) -> tuple[Job, Samples]:
    """Look at a few samples, and settle how all of them are stored.

    Args:
        on_probe: Told each of these samples.
    """
    if not callable(on_error):
        BadArgument.unless_one_of("on_error", on_error, ("raise", "skip", "replace"), "pack")
    check_count("shard_bytes", shard_bytes, 1)
    num_samples = _length_of(dataset)
    get = getattr(dataset, "packed_sample", None) or dataset.__getitem__
    probes = list(_probes(get, num_samples, on_error, check_seed("seed", seed), on_probe))
    if on_error != "raise":  # one that is unlike the first is a bad one, then
        probes = [probe for probe in probes if _kinds(probe) == _kinds(probes[0])]
    forms = {form for form, _, _ in probes}
    if len(forms) > 1:
        raise CannotPack(f"samples are of different forms: {', '.join(sorted(forms))}")
    form = probes[0][0]
    renamed, wishes, columns = _columns(dataset, fields, probes)
    if len({name.lower() for name in renamed}) < len(renamed):
        raise CannotPack(f"the fields {renamed} need names that make files of their own")
    schemas = tuple(map(find_schema, renamed, columns, wishes))
    sample_bytes = sum(map(mean_bytes, schemas, columns))
    max_shards = max(1, MAX_FILES // sum(len(schema.file_names(0)) for schema in schemas))
    shard_rows = max(1, shard_bytes // max(1, sample_bytes), -(-num_samples // max_shards))
    samples = Samples(
        get, num_samples, form, schemas, tuple(wishes), on_error, check_seed("seed", seed), images
    )
    policy = on_error if isinstance(on_error, str) else "function"
    job = Job(
        num_samples=num_samples,
        shard_rows=min(shard_rows, num_samples),
        form=form,
        fields=schemas,
        fingerprint=make_fingerprint(
            _describe(dataset), num_samples, form, schemas, wishes, policy, seed, shard_rows
        ),
        attributes=dict(getattr(dataset, "packed_attributes", {})),
        sample_bytes=sample_bytes,
    )
    return job, samples


def _columns(
    dataset: Any, fields: Any, probes: list[Any]
) -> tuple[list[str], list[Field], list[list[Any]]]:
    """For each field its name, what is wanted of it, and its values in the probes."""
    form, names, _ = probes[0]
    own = getattr(dataset, "packed_names", None)  # a folder of images calls them image and label
    renamed, wishes = read_wishes(fields, form, names if own is None else list(own))
    samples = [dict(zip(found, values, strict=True)) for _, found, values in probes]
    other = next((list(sample) for sample in samples if set(sample) != set(names)), None)
    if other is not None:
        raise CannotPack(f"one sample has the fields {names}, another {other}")
    return renamed, wishes, [[sample[name] for sample in samples] for name in names]


def _describe(dataset: Any) -> str:
    """What tells this source from another; a dataset may say more (``packed_fingerprint``)."""
    own = getattr(dataset, "packed_fingerprint", None)
    kind = type(dataset)
    return f"{kind.__module__}.{kind.__qualname__} {'' if own is None else own()}"


def _length_of(dataset: Any) -> int:
    try:
        num_samples = len(dataset)
    except TypeError:
        raise CannotPack(
            f"a {type(dataset).__name__} has no length: only datasets with an index are packed",
            remedy="give it __len__ and __getitem__, or pack(list(dataset), ...) if it is small",
        ) from None
    if not hasattr(dataset, "__getitem__"):
        raise CannotPack(
            f"a {type(dataset).__name__} has no samples with numbers",
            remedy="pack(loader.dataset, ...)" if hasattr(dataset, "dataset") else None,
        )
    if not num_samples:
        raise CannotPack("the dataset has no samples")
    return num_samples


def _probes(
    get: Any, num_samples: int, on_error: Any, seed: int, on_probe: Callable[[int, Any], None]
) -> Iterator[Any]:
    """A few samples from all over the dataset, taken apart."""
    randomness = SampleRandomness(seed)
    # Neighbours and far ones: what repeats with any period must not look alike by chance.
    spread = np.linspace(0, num_samples - 1, _NUM_PROBES // 2 + 1).astype(int).tolist()
    places = [0, *range(1, min(num_samples, _NUM_PROBES // 2)), *spread[1:]]
    failed: Exception | None = None
    num_found = 0
    for index in dict.fromkeys([*places, *range(min(num_samples, _NUM_TRIES))]):
        if num_found >= min(num_samples, _NUM_PROBES):
            break
        try:
            sample = randomness.call(get, index, index)
            found = split_sample(sample)
        except Exception as error:
            if on_error == "raise":
                _note_sample(error, index)
                raise
            failed = error
            continue
        num_found += 1
        on_probe(index, sample)
        yield found
    if not num_found:
        raise CannotPack(
            "none of the first samples could be loaded",
            where=None if failed is None else f"the last of them: {_text_of(failed)}",
        ) from failed


def _kinds(probe: Any) -> Any:
    form, names, values = probe
    kinds = {name: kind_of(value, name) for name, value in zip(names, values, strict=True)}
    return form, kinds


def _note_sample(error: Exception, index: int) -> None:
    """Say which sample it was; the error stays the user's own."""
    with contextlib.suppress(AttributeError, TypeError):
        error.sample_index = index  # type: ignore[attr-defined]
    if hasattr(error, "add_note"):  # from Python 3.11 on
        error.add_note(f"while packing sample {index}")


def _text_of(error: Exception) -> str:
    what = error.what if isinstance(error, PenstockError) else str(error)
    # Where an object lies in memory differs from run to run; the manifest must not.
    what = _ADDRESS.sub("", what.partition(chr(10))[0])
    return f"{type(error).__name__}: {what[:500]}"
