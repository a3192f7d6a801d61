"""Images of every format decode correctly, with the same crops and pixels as torchvision."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("PIL")
torchvision = pytest.importorskip("torchvision")

from PIL import Image  # noqa: E402
from torchvision.transforms import v2  # noqa: E402
from torchvision.transforms.v2 import functional  # noqa: E402

import penstock  # noqa: E402
from penstock import DataLoader, ImageFolder, Packed, pack  # noqa: E402
from penstock.errors import BadImage  # noqa: E402
from penstock.images import jpeg_codecs, pixels  # noqa: E402
from penstock.images.decode import find_scale  # noqa: E402
from penstock.images.jpeg_codecs import available_decoders, jpeg_decoder  # noqa: E402
from penstock.images.pixels import resize  # noqa: E402
from penstock.machine.image_libraries import find_decoders  # noqa: E402
from support import command_line  # noqa: E402
from support.generated_images import encode, make_folder, make_pixels  # noqa: E402

pytestmark = pytest.mark.vision


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("images"))


@pytest.fixture(scope="module")
def jpeg() -> bytes:
    return encode(make_pixels())


def by_pillow(data: bytes) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))


def distance(left: Any, right: Any) -> int:
    return int(np.abs(np.asarray(left).astype(int) - np.asarray(right).astype(int)).max())


# Image formats

FORMS: dict[str, Any] = {
    "jpeg": lambda pixels: encode(pixels),
    "progressive jpeg": lambda pixels: encode(pixels, progressive=True),
    "jpeg 4:4:4": lambda pixels: encode(pixels, subsampling=0),
    "grey jpeg": lambda pixels: encode(pixels[:, :, 0]),
    "png": lambda pixels: encode(pixels, "PNG"),
    "grey png": lambda pixels: encode(pixels[:, :, 0], "PNG"),
    "png with alpha": lambda pixels: encode(np.dstack([pixels, pixels[:, :, :1]]), "PNG"),
    "webp": lambda pixels: encode(pixels, "WEBP", lossless=True),
    "bmp": lambda pixels: encode(pixels, "BMP"),
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_image_is_what_pillow_reads(form: str) -> None:
    data = FORMS[form](make_pixels(61, 83))
    found = penstock.decode(data)
    assert found.dtype == np.uint8
    assert found.shape == (61, 83, 3)
    assert distance(found, by_pillow(data)) <= 4  # libraries round the colour transform differently


def test_cmyk_becomes_rgb() -> None:
    file = io.BytesIO()
    Image.fromarray(make_pixels(40, 50)).convert("CMYK").save(file, "JPEG", quality=95)
    data = file.getvalue()
    assert distance(penstock.decode(data), by_pillow(data)) == 0


def test_sixteen_bits_are_scaled_not_clipped() -> None:
    wide = (np.arange(256, dtype=np.uint32)[:, None] * np.ones((1, 4), np.uint32) * 257).astype(
        np.uint16
    )
    file = io.BytesIO()
    Image.fromarray(wide).save(file, "PNG")
    found = penstock.decode(file.getvalue())
    assert np.array_equal(found[:, 0, 0], np.arange(256))
    clipped = by_pillow(file.getvalue())  # negative control: Pillow's own conversion clips
    assert clipped[200, 0, 0] == 255


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("kind", ["JPEG", "PNG"])
def test_images_are_turned_upright(orientation: int, kind: str) -> None:
    from PIL import ImageOps

    exif = Image.Exif()
    exif[0x0112] = orientation
    data = encode(make_pixels(40, 60), kind, exif=exif)
    expected = np.asarray(ImageOps.exif_transpose(Image.open(io.BytesIO(data))).convert("RGB"))
    assert distance(penstock.decode(data), expected) <= 4
    lying = penstock.decode(data, upright=False)
    assert lying.shape == (40, 60, 3)


def test_a_crop_of_a_turned_image_is_a_crop_of_the_upright_one() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    data = encode(make_pixels(60, 90), exif=exif)
    upright = penstock.decode(data)
    assert upright.shape == (90, 60, 3)
    crop = penstock.CenterCrop((80, 30))
    assert np.array_equal(penstock.decode(data, crop), upright[5:85, 15:45])


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
def test_a_bomb_is_refused_before_it_is_decoded(kind: str) -> None:
    data = encode(np.zeros((300, 400, 3), np.uint8), kind)
    with pytest.raises(BadImage, match="400 x 300 pixels, more than the limit of 100000"):
        penstock.decode(data, max_pixels=100_000)
    assert penstock.decode(data, max_pixels=120_000).shape == (300, 400, 3)


def test_what_is_no_image_is_named_with_its_file(tmp_path: Path, jpeg: bytes) -> None:
    for name, content in (
        ("empty", b""),
        ("text", b"hello"),
        ("cut", encode(make_pixels(), "PNG")[:999]),
    ):
        path = tmp_path / f"{name}.jpg"
        path.write_bytes(content)
        with pytest.raises(BadImage, match=f"{name}.jpg"):
            penstock.decode(path)
        with pytest.raises(ValueError, match="cannot be decoded"):
            penstock.decode(content)


@pytest.mark.parametrize("name", ["simplejpeg", "cv2", "torchvision", "PIL"])
def test_all_decoders_agree(name: str, jpeg: bytes) -> None:
    try:
        decode = jpeg_decoder(name)
    except ImportError:
        pytest.skip(f"{name} is not installed in this leg")
    assert distance(decode(jpeg, 1), by_pillow(jpeg)) <= 4


# Crops of torchvision

SIZES = [(375, 500), (500, 375), (64, 64), (20, 300)]


@pytest.mark.parametrize("size", SIZES)
def test_crops_have_the_distribution_of_torchvisions(size: tuple[int, int]) -> None:
    """Compare 4000 crops of each with a Kolmogorov-Smirnov test for each of the four numbers."""
    count = 4000
    ours = penstock.RandomResizedCrop(224)
    np.random.seed(1)
    found = np.array([ours.draw(*size) for _ in range(count)], float)
    torch.manual_seed(1)
    blank = torch.empty(3, *size, dtype=torch.uint8)
    theirs = v2.RandomResizedCrop(224, antialias=True)
    made = [theirs.make_params([blank]) for _ in range(count)]
    expected = np.array([[p["top"], p["left"], p["height"], p["width"]] for p in made], float)
    limit = 1.95 * np.sqrt(2 / count)  # equal distributions pass with probability 0.999
    for column in range(4):
        assert largest_gap(found[:, column], expected[:, column]) < limit, column
    # Negative control: a different scale. In a strip no crop fits, and all are center crops.
    other = penstock.RandomResizedCrop(224, scale=(0.2, 1.0))
    wrong = np.array([other.draw(*size) for _ in range(count)], float)
    is_other = max(largest_gap(wrong[:, k], expected[:, k]) for k in (2, 3)) > limit
    assert is_other == (size != (20, 300))


def largest_gap(left: np.ndarray, right: np.ndarray) -> float:
    """Return the Kolmogorov-Smirnov distance of two samples."""
    both = np.concatenate([left, right])
    heights = [
        np.searchsorted(np.sort(one), both, side="right") / len(one) for one in (left, right)
    ]
    return float(np.abs(heights[0] - heights[1]).max())


def test_flips_come_as_often_as_they_should() -> None:
    flip = penstock.RandomHorizontalFlip(0.3)
    np.random.seed(2)
    share = sum(bool(flip.steps(4, 4)) for _ in range(4000)) / 4000
    assert 0.27 < share < 0.33


@pytest.mark.parametrize("box", [(10, 20, 300, 330), (0, 0, 100, 120), (5, 5, 224, 224)])
def test_a_crop_has_torchvisions_pixels(box: tuple[int, int, int, int]) -> None:
    pixels = make_pixels()
    tensor = torch.from_numpy(pixels).permute(2, 0, 1)
    top, left, height, width = box
    part = pixels[top : top + height, left : left + width]
    expected = functional.resized_crop(tensor, *box, [224, 224], antialias=True)
    ours = resize(part, (224, 224))
    assert distance(ours.transpose(2, 0, 1), expected) <= 1
    pillow = Image.fromarray(part).resize((224, 224), Image.Resampling.BILINEAR)
    assert distance(ours, pillow) <= 1
    plain = functional.resized_crop(tensor, *box, [224, 224], antialias=False)
    quick = resize(part, (224, 224), antialias=False)
    assert distance(quick.transpose(2, 0, 1), plain) <= 3
    if height > 250:  # negative control: without antialiasing the image differs
        assert distance(quick, ours) > 20


def test_pillow_shrinks_images_where_torch_is_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    part = make_pixels()[10:310, 20:350]
    by_pillow = np.asarray(Image.fromarray(part).resize((224, 224), Image.Resampling.BILINEAR))
    made = {}
    for machine in ("aarch64", "x86_64"):
        monkeypatch.setattr("platform.machine", lambda machine=machine: machine)
        pixels._pillow.cache_clear()
        made[machine] = resize(part, (224, 224))
    pixels._pillow.cache_clear()
    assert np.array_equal(made["aarch64"], by_pillow)
    assert made["aarch64"].flags.writeable
    assert not np.array_equal(made["x86_64"], by_pillow)  # torch's rounding
    assert distance(made["x86_64"], by_pillow) <= 1


def test_resize_and_centre_crop_are_torchvisions() -> None:
    for height, width in ((375, 500), (500, 375), (100, 90)):
        pixels = make_pixels(height, width)
        tensor = torch.from_numpy(pixels).permute(2, 0, 1)
        ours = penstock.Compose([penstock.Resize(128), penstock.CenterCrop(112)])
        theirs = v2.Compose([v2.Resize(128, antialias=True), v2.CenterCrop(112)])
        assert distance(ours(pixels), theirs(tensor)) <= 1
        wide = penstock.CenterCrop((600, 40))(pixels)
        assert torch.equal(wide, v2.CenterCrop((600, 40))(tensor))


def test_the_fast_mode_reads_at_reduced_scale_within_its_bounds(jpeg: bytes) -> None:
    crop = penstock.Resize((90, 120), fast=True)
    assert find_scale(crop.steps(375, 500), 375, 500) == 4
    exact = penstock.decode(jpeg, penstock.Resize((90, 120)), decoder="PIL").astype(int)
    for name in available_decoders():
        if name == "torchvision":
            continue
        quick = penstock.decode(jpeg, crop, decoder=name)
        assert quick.shape == (90, 120, 3)
        error = np.abs(quick - exact)
        assert error.mean() < 4, name
    assert distance(penstock.decode(jpeg, penstock.Resize((90, 120))), exact) <= 4


# Folders


def test_a_folder_has_torchvisions_layout_and_attributes(folder: Path) -> None:
    ours, theirs = ImageFolder(folder), torchvision.datasets.ImageFolder(str(folder))
    for name in ("classes", "class_to_idx", "samples", "imgs", "targets"):
        assert getattr(ours, name) == getattr(theirs, name)
    assert len(ours) == len(theirs)
    image, label = ours[5]
    assert image.dtype == torch.uint8
    assert label == theirs[5][1]
    assert distance(image.permute(1, 2, 0), theirs[5][0]) <= 4


def epoch(dataset: Any, **keywords: Any) -> list[torch.Tensor]:
    return [x for x, _ in DataLoader(dataset, batch_size=4, shuffle=True, seed=3, **keywords)]


def test_crops_are_the_same_bits_for_any_workers(folder: Path) -> None:
    crop = penstock.Compose([penstock.RandomResizedCrop(64), penstock.RandomHorizontalFlip()])
    dataset = ImageFolder(folder, crop)
    alone = epoch(dataset)
    assert alone[0].shape == (4, 3, 64, 64)
    for keywords in ({"num_workers": 2}, {"num_workers": 3, "pool": "thread"}):
        assert all(map(torch.equal, alone, epoch(dataset, **keywords)))
    assert not all(
        map(
            torch.equal,
            alone,
            [x for x, _ in DataLoader(dataset, batch_size=4, shuffle=True, seed=4)],
        )
    )


def test_the_plan_says_who_decodes(folder: Path) -> None:
    notes = DataLoader(ImageFolder(folder), batch_size=2).plan.notes
    assert f"images are decoded by {available_decoders()[0]}" in notes
    assert not DataLoader([1, 2]).plan.notes


def test_choosing_a_decoder_imports_no_other(folder: Path) -> None:
    """The others would take memory in the training process, and a tenth of a second."""
    if len(find_decoders(("simplejpeg", "cv2"))) < 2:
        pytest.skip("needs simplejpeg and OpenCV")
    program = (
        "import sys, penstock; "
        f"assert penstock.DataLoader(penstock.ImageFolder({str(folder)!r})).plan.notes; "
        "print(*sorted({'simplejpeg', 'cv2', 'PIL'} & set(sys.modules)))"
    )
    for order, chosen in ((program, "simplejpeg"), ("import cv2; " + program, "cv2 simplejpeg")):
        command = [sys.executable, "-c", order]
        shown = subprocess.run(command, capture_output=True, text=True, check=True, timeout=240)
        assert shown.stdout.split() == chosen.split()


def test_a_decoder_that_fails_is_passed_over(monkeypatch: pytest.MonkeyPatch, jpeg: bytes) -> None:
    def broken(data: Any, scale: int) -> np.ndarray:
        raise ImportError("a broken build")

    first, second, *_ = available_decoders()
    for failing, expected in (({}, first), ({first: broken}, second)):
        monkeypatch.setattr("penstock.images.jpeg_codecs._chosen", [])
        for name, decoder in failing.items():
            monkeypatch.setitem(jpeg_codecs._DECODERS, name, decoder)
        assert jpeg_codecs.choose_decoder(jpeg) == expected


@pytest.mark.parametrize("encoding", ["keep", "jpeg", "raw"])
def test_a_packed_folder_gives_the_same_images(folder: Path, tmp_path: Path, encoding: str) -> None:
    request = penstock.Field(encoding=encoding, longer_side=None if encoding == "keep" else 100)
    source = ImageFolder(folder)
    packed = pack(source, tmp_path / "set", fields={"image": request, "label": None}, workers=0)
    assert packed.attributes["classes"] == ["cat", "dog"]
    image, label = packed[4]
    assert label == source[4][1]
    if encoding == "keep":
        assert torch.equal(image, source[4][0])
    else:
        assert tuple(image.shape) == (3, 75, 100)
        expected = resize(np.asarray(source[4][0].permute(1, 2, 0)), (75, 100))
        error = np.abs(np.asarray(image.permute(1, 2, 0)).astype(int) - expected)
        assert error.max() <= (0 if encoding == "raw" else 80)
        assert error.mean() < 5
    crop = penstock.RandomResizedCrop(32)
    cropped = Packed(tmp_path / "set", transforms={"image": crop})
    alone = epoch(cropped)
    assert alone[0].shape == (4, 3, 32, 32)
    assert all(map(torch.equal, alone, epoch(cropped, num_workers=2)))


def test_pillow_images_are_packed_as_pixels(folder: Path, tmp_path: Path) -> None:
    theirs = torchvision.datasets.ImageFolder(str(folder))
    packed = pack(theirs, tmp_path / "set", workers=0)
    assert distance(packed[3][0].permute(1, 2, 0), theirs[3][0]) == 0


# Decoding directly into the batch


class Telling(ImageFolder):
    """Replaces the label by whether the image was written into the row offered for it."""

    def read_into(self, index: int, rows: Any) -> tuple[Any, Any]:
        image, _ = super().read_into(index, rows)
        is_there = bool(rows) and image.data_ptr() == rows[0].ctypes.data
        return image, int(is_there)

    __getitem__ = ImageFolder.__getitem__
    keeps_channels_last = ImageFolder.keeps_channels_last


@pytest.mark.parametrize("antialias", [True, False])
def test_own_crops_are_written_where_the_batch_lies(folder: Path, antialias: bool) -> None:
    crop = penstock.RandomResizedCrop(64, antialias=antialias)
    dataset = Telling(folder, crop, memory_format=torch.contiguous_format)
    loader = DataLoader(dataset, batch_size=12, num_workers=1, seed=4)
    ((images, flags),) = loader
    assert flags.tolist() == [0, *[1] * 11]
    ((expected, _),) = DataLoader(ImageFolder(folder, crop), batch_size=12, seed=4)
    assert torch.equal(images, expected)


@pytest.mark.parametrize("antialias", [True, False])
def test_channels_last_crops_are_written_where_the_batch_lies(
    folder: Path, antialias: bool
) -> None:
    crop = penstock.RandomResizedCrop(64, antialias=antialias)
    last = Telling(folder, crop)
    ((images, flags),) = DataLoader(last, batch_size=12, num_workers=1, seed=4)
    assert flags.tolist() == [0, *[1] * 11]
    assert images.is_contiguous(memory_format=torch.channels_last)
    plain = ImageFolder(folder, crop, memory_format=torch.contiguous_format)
    ((expected, _),) = DataLoader(plain, batch_size=12, seed=4)
    assert torch.equal(images, expected)
    assert expected.is_contiguous(), "control: asked for"
    assert last[0][0].is_contiguous(), "samples have the format that they always had"


def test_what_differs_with_channels_last_is_what_the_documentation_says(folder: Path) -> None:
    crop = penstock.RandomResizedCrop(64)
    last = ImageFolder(folder, crop)
    images, _ = next(iter(DataLoader(last, batch_size=4)))
    assert images.shape == (4, 3, 64, 64)
    assert images.numpy().transpose(0, 2, 3, 1).flags.c_contiguous
    assert not images.numpy().flags.c_contiguous
    with pytest.raises(RuntimeError, match="view size is not compatible"):
        images.view(4, -1)
    assert images.reshape(4, -1).shape == (4, 3 * 64 * 64)
    contiguous = ImageFolder(folder, crop, memory_format=torch.contiguous_format)
    plain, _ = next(iter(DataLoader(contiguous, batch_size=4)))
    assert plain.numpy().flags.c_contiguous
    assert plain.view(4, -1).shape == (4, 3 * 64 * 64)
    theirs = ImageFolder(folder, v2.CenterCrop(64), memory_format=torch.channels_last)
    images, _ = next(iter(DataLoader(theirs, batch_size=4)))
    assert images.is_contiguous(), "ignored with a transform that is not Penstock's"


def test_what_somebody_elses_transform_gets_is_its_own_to_keep(folder: Path) -> None:
    theirs = v2.CenterCrop(64)
    loader = DataLoader(Telling(folder, theirs), batch_size=12, num_workers=1)
    ((images, flags),) = loader
    assert flags.sum() == 0
    ((expected, _),) = DataLoader(ImageFolder(folder, theirs), batch_size=12)
    assert torch.equal(images, expected)


def test_packed_images_are_written_where_the_batch_lies(folder: Path, tmp_path: Path) -> None:
    pack(ImageFolder(folder), tmp_path / "set", workers=0)
    packed = Packed(tmp_path / "set", memory_format=torch.contiguous_format)
    cropped = packed.with_transforms(image=penstock.Resize((40, 50)))
    row = np.zeros((3, 40, 50), np.uint8)
    image, label = cropped.read_into(5, [row, None])
    assert image.data_ptr() == row.ctypes.data
    assert torch.equal(image, cropped[5][0])
    assert label == cropped[5][1]
    other = cropped.with_transforms(label=lambda label: (label, label))
    assert other.read_into(5, [row, None])[0].data_ptr() != row.ctypes.data
    wrong = np.zeros((3, 50, 40), np.uint8)
    assert torch.equal(cropped.read_into(5, [wrong, None])[0], image)
    assert not wrong.any()


class CountsThreads:
    """Samples are the number of OpenCV threads in the process that loads them."""

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> int:
        import cv2

        return int(cv2.getNumThreads())


def test_opencv_stays_in_one_thread_in_a_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    cv2 = pytest.importorskip("cv2")
    before = cv2.getNumThreads()
    try:
        cv2.setNumThreads(2)
        assert list(DataLoader(CountsThreads(), num_workers=1)) == [1, 1]
        assert list(DataLoader(CountsThreads())) == [2, 2]
    finally:
        cv2.setNumThreads(before)
    monkeypatch.setenv("OPENCV_FOR_THREADS_NUM", "3")  # the user's own setting wins
    assert list(DataLoader(CountsThreads(), num_workers=1)) == [3, 3]


@pytest.mark.parametrize("num_channels", [1, 3, 4])
@pytest.mark.parametrize("is_planar", [False, True])
def test_a_flip_has_the_pixels_of_numpy_s_view(num_channels: int, is_planar: bool) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (5, 7, num_channels), dtype=np.uint8)
    if is_planar:
        pixels = np.ascontiguousarray(pixels.transpose(2, 0, 1)).transpose(1, 2, 0)
    flipped = penstock.RandomHorizontalFlip(1.0)(pixels)
    assert np.array_equal(flipped.numpy(), pixels[:, ::-1].transpose(2, 0, 1))


def test_packing_twice_gives_the_same_bytes_with_files_that_are_no_images(tmp_path: Path) -> None:
    make_folder(tmp_path / "in", 4, height=60, width=80)
    broken = next((tmp_path / "in").rglob("*.jpg")).with_name("zz.jpg")
    broken.write_bytes(b"no image")
    manifests = []
    for name in ("one", "two"):
        folder = penstock.ImageFolder(tmp_path / "in")
        fields = {"image": penstock.Field(encoding="raw")}
        kept = bytearray(100_000)  # later allocations get different addresses
        packed = penstock.pack(folder, tmp_path / name, fields=fields, workers=0, on_error="skip")
        manifests.append((tmp_path / name / "manifest.json").read_bytes())
        assert kept
        assert packed.bad_samples[0][1] == (
            "BadImage: the image cannot be decoded: UnidentifiedImageError"
        )
    assert manifests[0] == manifests[1]


def test_packing_finds_broken_files_although_it_keeps_them_as_they_are(tmp_path: Path) -> None:
    make_folder(tmp_path / "in", 4, height=60, width=80)
    good = next((tmp_path / "in").rglob("*.jpg"))
    for name, content in (("a", b""), ("y", good.read_bytes()[:-300]), ("z", b"text")):
        good.with_name(f"{name}.jpg").write_bytes(content)
    folder = penstock.ImageFolder(tmp_path / "in")
    with pytest.raises(BadImage, match="cannot be decoded"):
        pack(folder, tmp_path / "refused", workers=0)
    packed = pack(folder, tmp_path / "out", workers=0, on_error="skip")
    assert len(packed) == 4
    wrong = [os.path.basename(folder.samples[index][0]) for index, _ in packed.bad_samples]
    assert wrong == ["a.jpg", "y.jpg", "z.jpg"]


def test_a_broken_first_file_does_not_choose_the_decoder(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[str] = []
    monkeypatch.setattr("penstock.images.jpeg_codecs._chosen", chosen)
    with pytest.raises(BadImage):
        penstock.decode(encode(make_pixels(60, 80))[:99])
    assert chosen == []
    penstock.decode(encode(make_pixels(60, 80)))
    assert len(chosen) == 1


def test_a_library_that_replaced_pillow_s_open_is_not_quoted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ultralytics replaces it and tries to install a package for files that are not images."""
    import PIL.Image

    opened = PIL.Image.open

    def patched(*arguments: Any) -> Any:
        try:
            return opened(*arguments)
        except PIL.UnidentifiedImageError:
            raise ModuleNotFoundError("No module named 'elsewhere'")  # noqa: B904

    monkeypatch.setattr(PIL.Image, "open", patched)
    with pytest.raises(BadImage, match="cannot be decoded: UnidentifiedImageError"):
        penstock.decode(b"no image")


def test_a_decoder_that_does_not_exist_is_not_blamed_on_the_file() -> None:
    with pytest.raises(penstock.errors.BadArgument, match="decoder='magic' must be one of"):
        penstock.decode(encode(make_pixels(60, 80)), decoder="magic")
    if not find_decoders(("simplejpeg",)):
        with pytest.raises(penstock.errors.MissingExtra, match="pip install simplejpeg"):
            penstock.decode(encode(make_pixels(60, 80)), decoder="simplejpeg")


def test_a_folder_uses_the_decoder_that_it_was_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_folder(tmp_path, 2, height=60, width=80)
    used = []

    def noting(name: str) -> Any:
        used.append(name)
        return jpeg_decoder(name)

    monkeypatch.setattr("penstock.images.decode.jpeg_decoder", noting)
    for name in ("PIL", "torchvision", "cv2"):
        ImageFolder(tmp_path, decoder=name)[0]
    assert used == ["PIL", "torchvision", "cv2"]
    with pytest.raises(penstock.errors.BadArgument, match=r"ImageFolder\(\.\.\., decoder="):
        ImageFolder(tmp_path, decoder="magic")
    with pytest.raises(penstock.errors.BadArgument, match="is not callable"):
        ImageFolder(tmp_path, 224)  # type: ignore[arg-type]


def test_a_broken_image_is_named_with_the_option_that_leaves_it_out(tmp_path: Path) -> None:
    broken = tmp_path / "photos" / "cat" / "2.jpg"
    broken.parent.mkdir(parents=True)
    for name in ("1.ppm", "3.ppm"):
        broken.with_name(name).write_bytes(b"P6 2 1 255 " + bytes(6))
    broken.write_bytes(b"")
    source, target = str(tmp_path / "photos"), str(tmp_path / "out")
    raised = command_line.invoke("pack", source, target)
    said = " ".join(raised.output.split())
    assert raised.exit_code == 2
    assert "BadImage: [I01] " in said
    assert f"In: sample 1, {broken}" in said
    assert "--on-error skip # leaves such samples out" in said
    skipped = command_line.invoke("pack", source, target, "--on-error", "skip")
    assert skipped.exit_code == 0, skipped.output
    assert f"sample 1 ({broken}) is bad: BadImage" in " ".join(skipped.output.split())
