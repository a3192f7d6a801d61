"""Every type of field that datasets, streaming and litdata write, equal to what they read."""

from __future__ import annotations

import pickle
import sys
from typing import Any

import numpy as np
import pytest
import torch

import penstock
from penstock.errors import BadStore

Image: Any = pytest.importorskip("PIL.Image")
pytestmark = [pytest.mark.formats, pytest.mark.filterwarnings("ignore")]
COUNT = 30


def make_image(number: int) -> Any:
    generator = np.random.default_rng(number)
    return Image.fromarray(generator.integers(0, 255, (6, 5, 3), dtype=np.uint8))


def pixels_of(image: Any) -> Any:
    """Return the pixels of an image in the order of a tensor. JPEGs by the decoder of Pillow."""
    return np.asarray(image.convert("RGB")).transpose(2, 0, 1)


def assert_same(found: Any, expected: Any) -> None:
    """Compare values and types. Images are compared by their pixels."""
    if isinstance(expected, memoryview):  # litdata returns bytes as views of its map
        expected = bytes(expected)
    if isinstance(expected, Image.Image):
        assert np.abs(found.numpy().astype(int) - pixels_of(expected).astype(int)).max() <= 1
        return
    assert type(found) is type(expected)
    if isinstance(expected, dict):
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            assert_same(found[name], value)
    elif isinstance(expected, (list, tuple)):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            assert_same(one, other)
    elif isinstance(expected, (torch.Tensor, np.ndarray)):
        assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
        assert bool((found == expected).all())
    else:
        assert found == expected


def test_the_comparison_notices_other_values_types_and_shapes() -> None:
    for found, expected in [
        (1, 2),
        (1, 1.0),
        ({"a": 1}, {"b": 1}),
        ([1], (1,)),
        (np.zeros(2), np.zeros(3)),
        (torch.zeros(2), torch.zeros(2, dtype=torch.int64)),
        (torch.zeros(3, 6, 5, dtype=torch.uint8), make_image(1)),
    ]:
        with pytest.raises(AssertionError):
            assert_same(found, expected)


def test_features_of_datasets(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")
    datasets.disable_progress_bars()
    value, listed = datasets.Value, datasets.List
    features = datasets.Features(
        {
            "int": value("int64"),
            "float": value("float32"),
            "text": value("string"),
            "bytes": value("binary"),
            "label": datasets.ClassLabel(names=["x", "y"]),
            "image": datasets.Image(),
            "images": listed(datasets.Image()),
            "array": datasets.Array3D((3, 4, 4), "uint8"),
            "numbers": listed(value("int32")),
            "struct": {"a": value("int8"), "b": listed(value("float64"))},
            "words": listed(value("string")),
            "none": value("int64"),
        }
    )

    def make(n: int) -> dict[str, Any]:
        return {
            "int": n,
            "float": n / 3,
            "text": f"é{n}",
            "bytes": bytes([n]),
            "label": n % 2,
            "image": make_image(n),
            "images": [make_image(n + one) for one in range(n % 3)],
            "array": np.full((3, 4, 4), n, np.uint8),
            "numbers": list(range(n % 5)),
            "struct": {"a": n, "b": [0.5] * (n % 3)},
            "words": ["w"] * (n % 2),
            "none": None if n % 2 else n,
        }

    samples = [make(n) for n in range(COUNT)]
    columns = {name: [sample[name] for sample in samples] for name in samples[0]}
    made = datasets.Dataset.from_dict(columns, features=features)
    made.save_to_disk(str(tmp_path / "set"), num_shards=2)
    own = datasets.load_from_disk(str(tmp_path / "set"))
    data = penstock.open_dataset(tmp_path / "set")
    with monkeypatch.context() as without:  # workers do not import datasets
        pickled, theirs = pickle.dumps(data), pickle.dumps(own.features)
        for name in [one for one in sys.modules if one.partition(".")[0] == "datasets"]:
            without.setitem(sys.modules, name, None)
        assert len(pickle.loads(pickled)) == COUNT
        with pytest.raises(ImportError):
            pickle.loads(theirs)
    for n in range(COUNT):
        found, expected = data[n], own[n]
        for name in ("array", "numbers"):
            assert found[name].tolist() == np.asarray(expected.pop(name)).tolist()
            found.pop(name)
        assert found["struct"].pop("b").tolist() == expected["struct"].pop("b")
        assert_same(found, expected)
    encoded = penstock.open_dataset(tmp_path / "set", columns=["image"], decode=False)[3]["image"]
    own_bytes = own.cast_column("image", datasets.Image(decode=False))[3]["image"]["bytes"]
    assert encoded == own_bytes
    small = penstock.open_dataset(
        tmp_path / "set", columns=["image"], transforms={"image": penstock.Resize(4)}
    )
    assert small[0]["image"].shape[1:] == penstock.Resize(4)(data[0]["image"]).shape[1:]


def test_images_in_parquet_files_of_datasets_are_decoded(tmp_path: Any) -> None:
    datasets = pytest.importorskip("datasets")
    features = datasets.Features({"image": datasets.Image()})
    images = [make_image(n) for n in range(4)]
    made = datasets.Dataset.from_dict({"image": images}, features=features)
    made.to_parquet(str(tmp_path / "a.parquet"))
    data = penstock.open_dataset(tmp_path)
    for n, image in enumerate(images):
        assert_same(data[n]["image"], image)


MDS = {
    "int": "int",
    "text": "str",
    "bytes": "bytes",
    "any": "ndarray",
    "typed": "ndarray:float32",
    "fixed": "ndarray:int16:2,3",
    "byte": "uint8",
    "float": "float32",
    "jpeg": "jpeg",
    "png": "png",
    "raw": "pil",
    "list": "list[png]",
    "pickle": "pkl",
    "json": "json",
    "long": "str_int",
    "precise": "str_float",
}


def test_encodings_of_mds(tmp_path: Any) -> None:
    streaming = pytest.importorskip("streaming")
    from streaming.base.format import reader_from_json

    path = tmp_path / "set"
    with streaming.MDSWriter(out=str(path), columns=MDS, size_limit=4000) as writer:
        for n in range(COUNT):
            image = make_image(n)
            writer.write(
                {
                    "int": n,
                    "text": f"é{n}",
                    "bytes": bytes([n]),
                    "any": np.arange(2 * (n % 3 + 1)).reshape(-1, 2),
                    "typed": np.full((2, n % 4 + 1), n / 3, np.float32),
                    "fixed": np.full((2, 3), n, np.int16),
                    "byte": np.uint8(n),
                    "float": np.float32(n / 7),
                    "jpeg": image,
                    "png": image,
                    "raw": image,
                    "list": [image] * (n % 3),
                    "pickle": {"x": n},
                    "json": [n, {"a": None}],
                    "long": 10**20 + n,
                    "precise": n / 3,
                }
            )
    import json

    index = json.loads((path / "index.json").read_text(encoding="utf-8"))
    shards = [reader_from_json(str(path), "", shard) for shard in index["shards"]]
    own = [shard[n] for shard in shards for n in range(len(shard))]
    with pytest.raises(BadStore, match="'pickle'"):
        penstock.open_dataset(path)
    data = penstock.open_dataset(path, allow_pickle=True)
    assert len(data) == len(own) == COUNT
    for n in range(COUNT):
        assert_same(data[n], own[n])


def make_leaves(n: int) -> dict[str, Any]:
    return {
        "int": n,
        "float": n / 3,
        "bool": n % 2 == 0,
        "text": f"é{n}",
        "bytes": bytes([n]),
        "line": torch.arange(n % 4),
        "tensor": torch.full((2, n % 3 + 1), n / 2),
        "array": np.arange(n % 5, dtype=np.int16),
        "matrix": np.full((2, 2), n / 3),
        "raw": make_image(n),
        "list": [n, n + 1],
    }


SAMPLES = {
    "leaves": make_leaves,
    "tuple": lambda n: (n, torch.full((3,), n)),
    "rows": lambda n: {"text": f"s{n}", "label": n, "tags": ["a"] * (n % 3)},
    "number": lambda n: n,
    "nested": lambda n: {"x": torch.rand(2, 2), "y": {"z": [1, 2.5], "none": None}},
}


@pytest.mark.parametrize("name", SAMPLES)
def test_serializers_of_litdata(tmp_path: Any, name: str) -> None:
    pytest.importorskip("litdata")
    from litdata import StreamingDataset
    from litdata.streaming import Cache

    path = tmp_path / "set"
    path.mkdir()
    cache = Cache(str(path), chunk_size=12)
    for n in range(COUNT):
        cache[n] = SAMPLES[name](n)
    cache.done()
    cache.merge()
    own = StreamingDataset(str(path))
    data = penstock.open_dataset(path, allow_pickle=True)
    assert len(data) == COUNT
    for n in range(COUNT):
        assert_same(data[n], own[n])


def test_tokens_of_litdata(tmp_path: Any) -> None:
    pytest.importorskip("litdata")
    from litdata import StreamingDataset, TokensLoader
    from litdata.streaming import Cache

    path = tmp_path / "set"
    path.mkdir()
    cache = Cache(str(path), chunk_size=30, item_loader=TokensLoader())
    for n in range(COUNT):
        cache[n] = torch.arange(7) + 7 * n
    cache.done()
    cache.merge()
    own = StreamingDataset(str(path), item_loader=TokensLoader(block_size=10))
    data = penstock.open_dataset(path, block_size=10)
    assert len(data) == len(own)
    for n in range(len(own)):
        assert_same(data[n], own[n])
