"""Inspects the dataset to pack, and fetches and encodes its samples.

:func:`penstock.pack` calls :func:`inspect_source` in the caller's process. The processes that write
shards use :class:`EncodedSamples`.
"""

from __future__ import annotations

import contextlib
import re
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from penstock.errors import BadArgument, CannotPack, PenstockError
from penstock.options import ON_ERROR, check_count, check_seed
from penstock.order.event_loop import sample_getter
from penstock.order.keys import BAD_STREAM, GOLDEN, make_key, mix64
from penstock.order.sample_randomness import SampleRandomness
from penstock.sources.fields import (
    Field,
    SampleEncoder,
    find_schema,
    kinds_of,
    mean_bytes,
    read_requests,
    refuse_none,
    split_sample,
)
from penstock.sources.packed_writer import PackSpec, make_fingerprint
from penstock.user_objects import class_attribute, offers, probe

SHARD_BYTES = 64 << 20
"""Size of a shard. Larger ones are only needed for many samples: see ``MAX_FILES``."""
MAX_FILES = 256
"""Shards grow to stay below this number of files, because each file is a mapping in every reader
and, except on Linux, a descriptor."""
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")
_NUM_PROBES = 8
_NUM_TRIES = 100
"""Number of substitutes to try for a bad sample before packing fails."""


@dataclass(frozen=True)
class EncodedSamples:
    """Fetches and encodes samples. Pickled to workers.

    Args:
        get: Returns the sample at an index.
        on_error: "raise", "skip", "replace", or a function of (index, error).
    """

    get: Callable[[int], Any]
    num_samples: int
    encoder: SampleEncoder
    on_error: Any
    seed: int

    def __call__(self, indices: range) -> Iterator[tuple[int, Any]]:
        """Yield encoded samples by index. A bad one yields its error, then any substitute."""
        randomness = SampleRandomness(self.seed)

        def fetch(index: int) -> list[np.ndarray]:
            return self.encoder.encode(randomness.call(self.get, index, index), index)

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
                    yield index, self.encoder.encode(other, index)

    def _substitute(self, fetch: Any, index: int, failed: Exception) -> Any:
        key = make_key(BAD_STREAM, self.seed)
        for attempt in range(_NUM_TRIES):
            other = mix64(key + GOLDEN * (index * _NUM_TRIES + attempt + 1)) % self.num_samples
            with contextlib.suppress(Exception):
                return fetch(other)
        raise CannotPack(
            f"sample {index} is bad, and so were {_NUM_TRIES} substitutes",
            sample_index=index,
        ) from failed


def inspect_source(
    dataset: Any,
    *,
    fields: Any = None,
    on_error: Any = "raise",
    seed: int = 0,
    shard_bytes: int = SHARD_BYTES,
    on_probe: Callable[[int, Any], None] = lambda index, sample: None,
) -> tuple[PackSpec, EncodedSamples]:
    """Choose the storage format from a few samples.

    Args:
        on_probe: Called with each of these samples.
    """
    if not callable(on_error):
        BadArgument.unless_one_of("on_error", on_error, ON_ERROR, "pack", "skip")
    check_count("shard_bytes", shard_bytes, 1)
    num_samples = _length_of(dataset)
    is_encoded = offers(dataset, "packed_sample")
    get = dataset.packed_sample if is_encoded else sample_getter(dataset)
    times_s: list[float] = []
    probes = list(_probes(get, num_samples, on_error, check_seed("seed", seed), on_probe, times_s))
    if on_error != "raise":  # a sample that differs in form from the first counts as bad
        probes = [probe for probe in probes if kinds_of(probe) == kinds_of(probes[0])]
    form, names, requests, columns = _columns(dataset, fields, probes)
    if len({name.lower() for name in names}) < len(names):
        raise CannotPack(
            f"the fields {names} must differ in more than case, because they are used in file names"
        )
    schemas = tuple(map(find_schema, names, columns, requests))
    sample_bytes = sum(map(mean_bytes, schemas, columns))
    max_shards = max(1, MAX_FILES // sum(len(schema.file_names(0)) for schema in schemas))
    shard_rows = max(1, shard_bytes // max(1, sample_bytes), -(-num_samples // max_shards))
    policy = on_error if isinstance(on_error, str) else "function"
    encoder = SampleEncoder(form, schemas, requests)
    source, form_parts = _describe(dataset), (num_samples, form, schemas, requests)
    spec = PackSpec(
        num_samples=num_samples,
        shard_rows=min(shard_rows, num_samples),
        form=form,
        fields=schemas,
        fingerprint=make_fingerprint(source, *form_parts, policy, seed, shard_rows),
        strict_fingerprint=make_fingerprint(source, *form_parts, "raise", seed, shard_rows),
        attributes=dict(dataset.packed_attributes) if _has(dataset, "packed_attributes") else {},
        sample_bytes=sample_bytes,
        sample_s=statistics.median(times_s) + _encoding_s(encoder, probes[0]),
    )
    samples = EncodedSamples(get, num_samples, encoder, on_error, check_seed("seed", seed))
    return spec, samples


def _columns(
    dataset: Any, fields: Any, probes: list[Any]
) -> tuple[str, list[str], list[Field], list[list[Any]]]:
    """Return the form of samples, and the name, options and probed values of each field."""
    split = [split_sample(probe) for probe in probes]
    forms = {form for form, _, _ in split}
    if len(forms) > 1:
        raise CannotPack(f"samples have different forms: {', '.join(sorted(forms))}")
    form, names, _ = split[0]
    # ImageFolder calls its fields image and label.
    own = dataset.packed_names if offers(dataset, "packed_sample") else None
    renamed, requests = read_requests(fields, form, names if own is None else list(own))
    samples = [dict(zip(found, values, strict=True)) for _, found, values in split]
    other = next((list(sample) for sample in samples if set(sample) != set(names)), None)
    if other is not None:
        raise CannotPack(f"samples have different fields: {names} and {other}")
    return form, renamed, requests, [[sample[name] for sample in samples] for name in names]


def _describe(dataset: Any) -> str:
    """Return text that identifies a source. A dataset can extend it (``packed_fingerprint``)."""
    own = dataset.packed_fingerprint() if _has(dataset, "packed_fingerprint") else ""
    kind = type(dataset)
    return f"{kind.__module__}.{kind.__qualname__} {own}"


def _has(dataset: Any, name: str) -> bool:
    """Return True if the dataset's class defines this name. A wrapper's delegation is ignored."""
    return class_attribute(type(dataset), name) is not None


def _length_of(dataset: Any) -> int:
    try:
        num_samples = len(dataset)
    except TypeError:
        raise CannotPack(
            f"a {type(dataset).__name__} has no length; only map-style datasets can be packed",
            remedy="give it __len__ and __getitem__, or pack(list(dataset), ...) if it is small",
        ) from None
    if not hasattr(type(dataset), "__getitem__"):
        raise CannotPack(
            f"a {type(dataset).__name__} has no __getitem__; only map-style datasets can be packed",
            remedy="pack(loader.dataset, ...)" if probe(dataset, "dataset") is not None else None,
        )
    if not num_samples:
        raise CannotPack("the dataset has no samples")
    return num_samples


def _encoding_s(encoder: SampleEncoder, sample: Any) -> float:
    """Return the time to encode a sample. An error is left to the packing, which names it."""
    start_s = time.perf_counter()
    with contextlib.suppress(Exception):
        encoder.encode(sample, 0)
    return time.perf_counter() - start_s


def _probes(
    get: Any,
    num_samples: int,
    on_error: Any,
    seed: int,
    on_probe: Callable[[int, Any], None],
    times_s: list[float],
) -> Iterator[Any]:
    """Yield a few samples spread over the dataset, and append the time that each took."""
    randomness = SampleRandomness(seed)
    # Both neighbors and distant samples, so that periodic data does not look constant.
    spread = np.linspace(0, num_samples - 1, _NUM_PROBES // 2 + 1).astype(int).tolist()
    places = [0, *range(1, min(num_samples, _NUM_PROBES // 2)), *spread[1:]]
    failed: Exception | None = None
    num_found = 0
    for index in dict.fromkeys([*places, *range(min(num_samples, _NUM_TRIES))]):
        if num_found >= min(num_samples, _NUM_PROBES):
            break
        start_s = time.perf_counter()
        try:
            sample = randomness.call(get, index, index)
            times_s.append(time.perf_counter() - start_s)
            refuse_none(sample, index)
            split_sample(sample)  # raises for samples without fields
        except Exception as error:
            if on_error == "raise":
                _note_sample(error, index)
                raise
            failed = error
            continue
        num_found += 1
        on_probe(index, sample)
        yield sample
    if not num_found:
        raise CannotPack(
            "none of the first samples could be loaded",
            where=None if failed is None else f"the last error: {_text_of(failed)}",
        ) from failed


def _note_sample(error: Exception, index: int) -> None:
    """Add the sample's index to an error in user code."""
    with contextlib.suppress(AttributeError, TypeError):
        error.sample_index = index  # type: ignore[attr-defined]
    if hasattr(error, "add_note"):  # from Python 3.11 on
        error.add_note(f"while packing sample {index}. on_error='skip' leaves such samples out")


def _text_of(error: Exception) -> str:
    what = error.what if isinstance(error, PenstockError) else str(error)
    # Object addresses differ between runs, but the manifest must not.
    what = _ADDRESS.sub("", what.partition(chr(10))[0])
    return f"{type(error).__name__}: {what[:500]}"
