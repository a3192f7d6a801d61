"""``penstock.ImageFolder``: images in one subfolder per class, like torchvision's class.

Tested by ``tests/compat/test_images.py``.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.errors import BadArgument, BadStore, MissingExtra
from penstock.images.crops import Crop, open_image
from penstock.images.jpeg_codecs import (
    check_decoder,
    choose_decoder,
    set_decoder,
)
from penstock.images.pixels import check_memory_format
from penstock.sources.blocks import ReadOptions, check_transforms
from penstock.sources.fields import EncodedImage
from penstock.sources.packed_writer import make_fingerprint
from penstock.sources.source_files import open_error, open_regular

if TYPE_CHECKING:
    import numpy.typing as npt
    import torch

_JPEG = (".jpg", ".jpeg")
EXTENSIONS = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp")


class ImageFolder:
    """A folder of images, decoded by the fastest installed library.

    A sample is (uint8 tensor, class index). Like ``torchvision.datasets.ImageFolder``, it reads
    ``root/class/name.jpg`` and has ``classes``, ``class_to_idx``, ``samples``, ``imgs`` and
    ``targets``. Unlike in torchvision, images are turned upright, and an image is a uint8 tensor of
    (channels, height, width), not a Pillow image.

    Args:
        root: The folder.
        transform: A Penstock transform, applied during decoding, or any function of the tensor.
        target_transform: A function of the class index.
        decoder: See :func:`penstock.decode`. None: chosen with the first JPEG.
        memory_format: Memory format of the batches. None: ``torch.channels_last``, the order in
            which pixels are decoded and in which models run faster. ``torch.contiguous_format``: as
            from torch's collate. Shapes and values are the same. Samples (``folder[i]``) and
            batches with a ``transform`` or ``collate_fn`` of your own are always contiguous.

    Example:
        >>> import os, tempfile, numpy as np, penstock
        >>> root = tempfile.mkdtemp()
        >>> for name in ("cat", "dog"):
        ...     os.mkdir(f"{root}/{name}")
        ...     with open(f"{root}/{name}/1.ppm", "wb") as file:
        ...         _ = file.write(b"P6 2 1 255 " + bytes(6))
        >>> folder = penstock.ImageFolder(root)
        >>> folder.classes, folder.targets, len(folder)
        (['cat', 'dog'], [0, 1], 2)
    """

    packed_names = ("image", "label")

    def __init__(
        self,
        root: str | os.PathLike[str],
        transform: Callable[[Any], Any] | None = None,
        target_transform: Callable[[int], Any] | None = None,
        *,
        decoder: str | None = None,
        memory_format: torch.memory_format | None = None,
    ) -> None:
        check_decoder(decoder, "ImageFolder")
        self._is_channels_last = check_memory_format(memory_format, "ImageFolder")
        if transform is not None and not callable(transform):
            raise BadArgument(
                f"transform={transform!r} is not callable",
                remedy="ImageFolder(root, penstock.RandomResizedCrop(224))",
            )
        self.root = os.fspath(root)
        self.transform = transform
        self.target_transform = target_transform
        self.classes, self.class_to_idx = find_classes(self.root)
        self.samples = find_samples(self.root, self.class_to_idx)
        if not self.samples:
            raise BadStore(
                f"{self.root} has class folders, but they contain no images",
                remedy=f"files that end in {', '.join(EXTENSIONS)}",
                path=self.root,
            )
        self.imgs = self.samples
        self.targets = [target for _, target in self.samples]
        self._asked = decoder
        self._decoder = decoder or ""

    def __len__(self) -> int:
        return len(self.samples)

    @property
    def block_starts(self) -> npt.NDArray[np.int64]:
        """Index of the first sample of each block. Each file is a block."""
        return np.arange(len(self) + 1, dtype=np.int64)

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        return self._load(index, None, None, is_channels_last=False)

    def read_into(self, index: int, rows: Sequence[Any]) -> tuple[Any, Any]:
        """Return ``self[index]``, with the image in the first of ``rows``. Called by the engine."""
        out = rows[0] if rows else None
        tensors = getattr(rows, "tensors", (None,))
        return self._load(index, out, tensors[0], is_channels_last=self._is_channels_last)

    def _load(
        self, index: int, out: Any, out_tensor: Any, *, is_channels_last: bool
    ) -> tuple[Any, Any]:
        path, target = self.samples[index]
        data = _read_file(path)
        if self._decoder and self._asked is None:
            set_decoder(self._decoder)
        image = open_image(
            data,
            self.transform,
            path=path,
            out=out,
            out_tensor=out_tensor,
            decoder=self._asked,
            is_channels_last=is_channels_last,
        )
        return image, target if self.target_transform is None else self.target_transform(target)

    def keeps_channels_last(self) -> bool:
        """Return True if batches are channels_last. Called by the engine."""
        is_own = self.transform is None or isinstance(self.transform, Crop)
        return is_own and self._is_channels_last

    def __getstate__(self) -> dict[str, Any]:
        """Include the decoder, so that all workers use the same."""
        if not self._decoder:
            self._choose_decoder()
        return dict(self.__dict__)

    def _choose_decoder(self) -> None:
        """Choose the decoder with the first JPEG."""
        for path, _ in self.samples[:64]:
            if path.lower().endswith(_JPEG):
                self._decoder = choose_decoder(_read_file(path))
                return

    @property
    def plan_notes(self) -> tuple[str, ...]:
        """Notes about decoding for ``loader.plan``."""
        if not self._decoder:
            self._choose_decoder()
        return (f"images are decoded by {self._decoder or 'Pillow'}",)

    # -- for penstock.pack -----------------------------------------------------------------------

    def packed_sample(self, index: int) -> tuple[EncodedImage, int]:
        """Return the unchanged file, and its class.

        Raises:
            BadImage: It cannot be decoded. Not checked if no installed library decodes its format.
            MissingExtra: It is a JPEG, and no library that decodes images is installed.
        """
        path, target = self.samples[index]
        data = _read_file(path)
        try:
            open_image(data, None, path=path, decoder=self._asked)
        except MissingExtra:
            if path.lower().endswith(_JPEG):
                raise
        return EncodedImage(data), target

    @property
    def packed_attributes(self) -> dict[str, Any]:
        return {"classes": self.classes, "class_to_idx": self.class_to_idx}

    def packed_fingerprint(self) -> str:
        """Return a hash of the names and sizes of all files."""
        seen = [
            (os.path.relpath(path, self.root), os.path.getsize(path)) for path, _ in self.samples
        ]
        return make_fingerprint(seen, self.classes)


def open_image_folder(
    paths: Sequence[str],
    options: ReadOptions,
    *,
    decoder: str | None = None,
    memory_format: torch.memory_format | None = None,
) -> ImageFolder:
    """Return an image folder for :func:`penstock.open_dataset`."""
    chosen = check_transforms(options.transforms)
    image, label = chosen.pop("image", None), chosen.pop("label", None)
    if options.columns is not None or not options.decode or chosen or len(paths) != 1:
        raise BadArgument(
            "an image folder is opened whole: one folder, decoded, with transforms of 'image' and "
            "'label' only",
            remedy="penstock.ImageFolder(root, transform)",
        )
    return ImageFolder(paths[0], image, label, decoder=decoder, memory_format=memory_format)


def _read_file(path: str) -> bytes:
    # It is read at once, so a buffer would only cost time.
    with open(path, "rb", buffering=0, opener=open_regular) as file:
        return file.read()


def find_classes(root: str) -> tuple[list[str], dict[str, int]]:
    """Return the names of the subfolders in order, and their indices."""
    try:
        classes = sorted(entry.name for entry in os.scandir(root) if entry.is_dir())
    except OSError as error:
        raise open_error(root, error) from None
    if not classes:
        raise BadStore(
            f"{root} has no class subfolders",
            remedy="root/cat/1.jpg, root/dog/2.jpg",
            path=root,
        )
    return classes, {name: number for number, name in enumerate(classes)}


def find_samples(root: str, class_to_idx: dict[str, int]) -> list[tuple[str, int]]:
    """Return every image file with its class, in torchvision's order."""

    def refuse(error: OSError) -> None:
        raise open_error(str(error.filename), error) from None

    found = []
    for name in sorted(class_to_idx):
        walk = os.walk(os.path.join(root, name), onerror=refuse, followlinks=True)
        for folder, _, files in sorted(walk):
            found += [
                (os.path.join(folder, file), class_to_idx[name])
                for file in sorted(files)
                if file.lower().endswith(EXTENSIONS)
            ]
    return found
