"""timm's own dataset, loader and augmentation, with generated images.

penstock run --seed 0 examples/timm_loader.py images
"""

import sys
from pathlib import Path

import numpy as np
import timm
import torch
from PIL import Image
from timm.data import create_dataset, create_loader
from timm.optim import create_optimizer_v2


def draw_images(folder: Path) -> None:
    """Write images of two classes, dark and bright."""
    rng = np.random.default_rng(0)
    for label, name in enumerate(("dark", "bright")):
        (folder / name).mkdir(parents=True, exist_ok=True)
        for number in range(16):
            pixels = rng.integers(100 * label, 100 * label + 100, (48, 48, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(folder / name / f"{number}.png")


if __name__ == "__main__":
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "images")
    draw_images(folder)
    loader = create_loader(
        create_dataset("", root=str(folder), is_training=True),
        input_size=(3, 32, 32),
        batch_size=8,
        is_training=True,
        auto_augment="rand-m9-mstd0.5",
        re_prob=0.25,
        num_workers=2,
        use_prefetcher=False,
        device=torch.device("cpu"),
    )
    model = timm.create_model("test_resnet", num_classes=2)
    optimizer = create_optimizer_v2(model, "sgd", lr=0.01)
    for _ in range(2):
        for images, labels in loader:
            loss = torch.nn.functional.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    print("loss", loss.item())
