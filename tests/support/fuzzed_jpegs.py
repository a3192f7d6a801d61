"""A folder of JPEG files, many of them damaged in realistic ways. Needs Pillow."""

from __future__ import annotations

import io
import random
import resource
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset


def jpeg(number: int, size: int = 40) -> bytes:
    """Return the bytes of a valid file."""
    import numpy as np
    from PIL import Image

    pixels = np.random.default_rng(number).integers(0, 256, (size, size, 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "JPEG", quality=80)
    return buffer.getvalue()


def truncate(path: Path, good: bytes, chance: random.Random) -> None:
    path.write_bytes(good[: chance.randrange(1, len(good) - 2)])


def flip_bits(path: Path, good: bytes, chance: random.Random) -> None:
    """Flip some bits. Often the file still decodes, to different pixels."""
    content = bytearray(good)
    for _ in range(chance.choice((1, 3, 30, 300))):
        content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
    path.write_bytes(content)


def change_type(path: Path, good: bytes, chance: random.Random) -> None:
    path.write_bytes(
        chance.choice(
            (
                b"<html>404 Not Found</html>",
                b"PK\x03\x04" + good,
                b"\x89PNG\r\n\x1a\n" + good,
                b"II*\0" + good,
                b"GIF89a" + good,
                bytes(chance.randrange(256) for _ in range(500)),
            )
        )
    )


def empty(path: Path, good: bytes, chance: random.Random) -> None:
    path.write_bytes(b"")


def claim_to_be_huge(path: Path, good: bytes, chance: random.Random) -> None:
    """Set the size in the header to 65,500 x 65,500 pixels, which is 13 GB when decoded."""
    content, place = bytearray(good), good.index(b"\xff\xc0")
    content[place + 5 : place + 9] = struct.pack(">HH", 65_500, 65_500)
    path.write_bytes(content)


def make_unreadable(path: Path, good: bytes, chance: random.Random) -> None:
    """Make a path that even root cannot read: a folder, a dangling link, a loop, or nothing."""
    kind = chance.randrange(4)
    if kind == 0:
        path.mkdir()
    elif kind < 3:
        path.symlink_to("nowhere.jpg" if kind == 1 else path.name)


WAYS: dict[str, Callable[[Path, bytes, random.Random], None]] = {
    "truncated": truncate,
    "bits flipped": flip_bits,
    "wrong type": change_type,
    "zero length": empty,
    "huge header": claim_to_be_huge,
    "unreadable": make_unreadable,
}


def make_folder(folder: Path, num_broken: int, *, num_good: int, seed: int = 0) -> list[Path]:
    """Write damaged files among valid ones. There are only a few different valid files."""
    chance = random.Random(seed)
    goods = [jpeg(number) for number in range(8)]
    kinds: list[str | None] = [[*WAYS][number % len(WAYS)] for number in range(num_broken)]
    kinds += [None] * num_good
    chance.shuffle(kinds)
    files = []
    for number, kind in enumerate(kinds):
        path = folder / f"{number:05}-{(kind or 'good').replace(' ', '-')}.jpg"
        good = chance.choice(goods)
        if kind is None:
            path.write_bytes(good)
        else:
            WAYS[kind](path, good, chance)
        files.append(path)
    return files


class Images(Dataset):
    """Sample i is the pixels of file i, i, and the peak memory of the process in kB."""

    def __init__(self, files: list[Path]) -> None:
        self.files = [str(path) for path in files]

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int, int]:
        import numpy as np
        from PIL import Image

        with Image.open(self.files[index]) as image:
            pixels = np.array(image.convert("RGB").resize((16, 16)))
        peak_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return torch.from_numpy(pixels), index, peak_kb


def bad_ones(dataset: Images) -> set[int]:
    """Return the indices of files that fail to load in this process."""
    found = set()
    for index in range(len(dataset)):
        try:
            dataset[index]
        except Exception:
            found.add(index)
    return found


def load(loader: Any) -> tuple[list[int], dict[int, torch.Tensor], int]:
    """Return the indices in order, the pixels by index, and the peak memory of a worker."""
    indices: list[int] = []
    pixels: dict[int, torch.Tensor] = {}
    most_kb = 0
    for batch, numbers, peak_kb in loader:
        indices += numbers.tolist()
        most_kb = max(most_kb, int(peak_kb.max()))
        for one, number in zip(batch, numbers.tolist(), strict=True):
            pixels.setdefault(number, one.clone())
    return indices, pixels, most_kb
