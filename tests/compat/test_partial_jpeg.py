"""A packed JPEG is decoded down to its crop only: the same pixels, and cut files are named."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("PIL")
simplejpeg = pytest.importorskip("simplejpeg")

import penstock  # noqa: E402
from penstock import BadImage  # noqa: E402
from penstock.images.crops import Crop, Step  # noqa: E402
from penstock.images.decode import open_image  # noqa: E402
from penstock.images.headers import read_header  # noqa: E402
from penstock.images.partial import decode_top  # noqa: E402
from pictures import encode, make_folder, make_pixels  # noqa: E402

pytestmark = pytest.mark.vision
HEIGHT, WIDTH = 375, 500
FORMS: dict[str, Any] = {
    "4:2:0": lambda pixels: encode(pixels),
    "4:2:2": lambda pixels: encode(pixels, subsampling=1),
    "4:4:4": lambda pixels: encode(pixels, subsampling=0),
    "4:4:0": lambda pixels: simplejpeg.encode_jpeg(pixels, colorsubsampling="440"),
    "4:1:1": lambda pixels: simplejpeg.encode_jpeg(pixels, colorsubsampling="411"),
    "grey": lambda pixels: encode(pixels[:, :, 0]),
    "with restarts": lambda pixels: encode(pixels, restart_marker_rows=1),
    "progressive": lambda pixels: encode(pixels, progressive=True),
}


class Top(Crop):
    """The uppermost rows."""

    def __init__(self, num_rows: int) -> None:
        self.num_rows = num_rows

    def steps(self, height: int, width: int) -> list[Step]:
        return [Step("crop", (0, 0, self.num_rows, width))]


def open_checked(data: bytes, num_rows: int) -> Any:
    return open_image(data, "file", Top(num_rows), decoder="simplejpeg", is_checked=True)


@pytest.fixture(scope="module")
def jpeg() -> bytes:
    return encode(make_pixels(HEIGHT, WIDTH))


@pytest.mark.parametrize("form", FORMS)
def test_the_rows_above_a_crop_s_edge_are_those_of_the_whole(form: str) -> None:
    data = FORMS[form](make_pixels(HEIGHT, WIDTH))
    whole = simplejpeg.decode_jpeg(data, "RGB")
    header = read_header(memoryview(data))
    heights = set()
    for num_rows in (*range(1, 40), *range(150, 185), *range(340, 376)):
        found = decode_top(data, header, num_rows)
        assert np.array_equal(found[:num_rows], whole[:num_rows]), num_rows
        heights.add(len(found))
    is_cut = form not in ("progressive", "with restarts")
    assert (min(heights) < 20) == is_cut
    assert max(heights) == HEIGHT


def test_crops_of_a_packed_set_are_those_of_its_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_folder(tmp_path / "source", 12, height=HEIGHT, width=WIDTH)
    penstock.pack(penstock.ImageFolder(folder), tmp_path / "packed", workers=0)
    crop, cut = penstock.RandomResizedCrop(64), []

    def noting(*arguments: Any) -> np.ndarray:
        cut.append(len(pixels := decode_top(*arguments)))
        return pixels

    monkeypatch.setattr("penstock.images.decode.decode_top", noting)
    whole = penstock.ImageFolder(folder, crop, decoder="simplejpeg")
    packed = penstock.Packed(tmp_path / "packed", transforms={"image": crop})
    for index in range(12):
        drawn = []
        for dataset in (whole, packed):
            np.random.seed(index)
            drawn.append(dataset[index][0])
        assert torch.equal(*drawn)
    assert len(cut) == 12
    assert min(cut) < HEIGHT - 16


def test_one_scan_for_each_colour_is_decoded_whole(jpeg: bytes) -> None:
    header = read_header(memoryview(jpeg))
    scan = jpeg.index(b"\xff\xda")
    odd = jpeg[: scan + 4] + b"\x01" + jpeg[scan + 5 :]  # it says that it has one colour
    with pytest.raises(ValueError, match="subsampling"):
        decode_top(odd, header, 50)
    assert len(decode_top(jpeg, header, 50)) < 100


def test_a_file_that_was_cut_off_is_named_though_its_crop_is_there(jpeg: bytes) -> None:
    for rest in (0.5, 0.75, 0.9, 0.999):
        with pytest.raises(BadImage, match="cannot be decoded"):
            open_checked(jpeg[: int(len(jpeg) * rest)], 100)
    assert open_checked(jpeg, 100).shape == (3, 100, WIDTH)


def test_rubbish_gives_what_decoding_it_in_full_gives_or_is_named(jpeg: bytes) -> None:
    draw, scan = random.Random(7), jpeg.index(b"\xff\xda") + 20
    right = simplejpeg.decode_jpeg(jpeg, "RGB")[:150]
    num_named = num_below = 0
    for _ in range(150):
        place = draw.randrange(scan, len(jpeg) - 40)
        rubbish = draw.choice([b"\xff\xd9", b"\xff\xd0", bytes(30), draw.randbytes(30)])
        broken = jpeg[:place] + rubbish + jpeg[place + len(rubbish) :]
        try:
            found = open_checked(broken, 150).permute(1, 2, 0).numpy()
        except BadImage:
            num_named += 1
            with pytest.raises(ValueError):  # noqa: PT011
                simplejpeg.decode_jpeg(broken, "RGB")
            continue
        assert np.array_equal(found, simplejpeg.decode_jpeg(broken, "RGB", strict=False)[:150])
        num_below += np.array_equal(found, right)
    assert num_named > 30
    assert num_below > 30
