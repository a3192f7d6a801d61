"""A batch that passes through a slot equals default_collate's batch, for any nesting of leaves."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import default_collate

from penstock.engine.loading.collate import BatchWriter
from penstock.engine.memory import payload
from penstock.engine.memory.batch_layout import compile_flatten, read_layout, restore, view_batch
from support.datasets import Pair, Record, assert_same, differences

pytestmark = pytest.mark.legacy

# A form is a nesting of leaf kinds. A form and a seed make a sample.
SHAPES = st.lists(st.integers(0, 4), max_size=3).map(tuple)
TORCH = st.sampled_from(
    [
        torch.uint8,
        torch.int16,
        torch.int64,
        torch.float16,
        torch.bfloat16,
        torch.float64,
        torch.bool,
    ]
)
NUMPY = st.sampled_from(["u1", "i4", "i8", "f2", "f4", "f8", "?", "c8"])
LEAVES = st.one_of(
    st.sampled_from(["int", "float", "bool", "str", "bytes"]),
    st.tuples(st.just("tensor"), TORCH, SHAPES),
    st.tuples(st.just("large tensor"), TORCH, st.just((70, 70))),
    st.tuples(st.just("array"), NUMPY, SHAPES),
    st.tuples(st.just("large array"), NUMPY, st.just((70, 70))),
    st.tuples(st.just("scalar"), NUMPY, st.just(())),
)
FORMS = st.recursive(
    LEAVES.map(lambda leaf: ("leaf", leaf)),
    lambda inner: st.one_of(
        st.tuples(st.just("tuple"), st.lists(inner, min_size=1, max_size=3)),
        st.tuples(st.just("list"), st.lists(inner, min_size=1, max_size=3)),
        st.tuples(st.just("dict"), st.dictionaries(st.text(max_size=3), inner, max_size=3)),
        st.tuples(st.just("pair"), st.tuples(inner, inner)),
    ),
    max_leaves=6,
)


def make(form: Any, seed: int) -> Any:
    """Return the sample of a form. Leaves differ from each other and between seeds."""
    kind, content = form
    if kind == "leaf":
        return make_leaf(content, seed)
    if kind == "dict":
        return {key: make(inner, seed * 31 + n) for n, (key, inner) in enumerate(content.items())}
    parts = [make(inner, seed * 31 + n) for n, inner in enumerate(content)]
    if kind == "pair":
        return Pair(*parts)
    return parts if kind == "list" else tuple(parts)


def make_leaf(leaf: Any, seed: int) -> Any:
    if isinstance(leaf, str):
        plain = {"int": seed - 5, "float": seed / 7, "bool": seed % 2 == 0, "str": f"s{seed}"}
        return plain.get(leaf, bytes([seed % 256]))
    kind, dtype, shape = leaf
    count = int(np.prod(shape, dtype=int))
    if "tensor" in kind:
        return ((torch.arange(count) * 7 + seed) % 101).reshape(shape).to(dtype)
    values = ((np.arange(count) * 7 + seed) % 101).reshape(shape).astype(dtype)
    return values[()] if kind == "scalar" else values


def through_slot(samples: list[Any], cut: int) -> Any:
    buffer = np.full(1 << 22, 0xA5, dtype=np.uint8)
    objects: list[Any] = []
    layout: Any = None
    for first, last in ((0, cut), (cut, len(samples))):
        if first == last:
            continue
        writer = BatchWriter(buffer, len(samples), first)
        writer.take(iter(samples[first:last]))
        columns = writer.finish()
        objects = [a + b for a, b in zip(objects, columns, strict=True)] if layout else columns
        layout = writer.layout
    return view_batch(layout, buffer, len(samples), len(samples), objects)


# torch 1.13.1 converts NumPy booleans in a way that NumPy 1 warns about.
numpy_1 = pytest.mark.filterwarnings(
    "ignore:In future, it will be an error for 'np.bool_':DeprecationWarning"
)


@numpy_1
@given(form=FORMS, length=st.integers(1, 6), data=st.data())
def test_a_batch_through_a_slot_is_default_collate_s(form: Any, length: int, data: Any) -> None:
    samples = [make(form, seed) for seed in range(length)]
    cut = data.draw(st.integers(0, length))
    assert_same(through_slot(samples, cut), default_collate(samples))


@given(form=FORMS)
def test_taken_apart_and_put_together_a_sample_is_what_it_was(form: Any) -> None:
    sample = make(form, 3)
    layout = read_layout(sample)
    assert_same(restore(layout.tree, compile_flatten(layout.tree)(sample)), sample)


@numpy_1
@given(form=FORMS, slot_bytes=st.sampled_from([64, 4096, 1 << 20]))
def test_a_payload_comes_back_as_it_went_however_small_the_slot(form: Any, slot_bytes: int) -> None:
    value = [make(form, seed) for seed in range(3)]
    slot = np.full(slot_bytes, 0xA5, dtype=np.uint8)
    assert_same(payload.read(payload.write(value, slot), slot), value)


@given(form=FORMS.filter(lambda form: form not in [("dict", {})]))
def test_samples_made_from_different_seeds_would_be_told_apart(form: Any) -> None:
    """Negative control for the tests above: mixed-up rows are noticed because samples differ."""
    if not leaves_with_content(form):
        return
    assert differences(make(form, 0), make(form, 1))


def leaves_with_content(form: Any) -> list[Any]:
    kind, content = form
    if kind == "leaf":
        has_content = isinstance(content, str) or 0 not in content[2]
        is_coarse = not isinstance(content, str) and content[1] in (torch.bool, "?")
        return [content] if has_content and not is_coarse else []
    inner = content.values() if kind == "dict" else content
    return [leaf for part in inner for leaf in leaves_with_content(part)]


@given(
    images=st.lists(st.lists(st.integers(0, 255), min_size=3, max_size=3), min_size=1, max_size=5)
)
def test_a_dataclass_is_collated_like_a_dict_of_its_fields(images: list[list[int]]) -> None:
    samples = [Record(torch.tensor(image), sum(image)) for image in images]
    batch = through_slot(samples, 0)
    as_dicts = default_collate([dataclasses.asdict(sample) for sample in samples])
    assert_same(dataclasses.asdict(batch), as_dicts)
