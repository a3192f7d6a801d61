"""Image classification from a folder, then from the same images packed.

    python examples/image_folder.py                 # creates some sample images
    python examples/image_folder.py photos/ packed/ # root/class/name.jpg

Needs Pillow, OpenCV or simplejpeg: pip install simplejpeg.
"""

import sys
import time
from pathlib import Path

import torch

import penstock


def make_photos(root: Path, num_images: int = 48) -> Path:
    """Write blobs of two colours as JPEG files, in two folders."""
    import numpy as np
    from PIL import Image

    rng = np.random.default_rng(0)
    for i in range(num_images):
        pixels = rng.integers(0, 60, (120, 160, 3), dtype=np.uint8)
        pixels[30:90, 40:120, i % 2] += 150
        folder = root / ("red", "green")[i % 2]
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(folder / f"{i:03d}.jpg", quality=90)
    return root


def train(dataset, num_classes: int) -> float:
    """Train for a few epochs. Bytes are converted to floats on the device."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    to_floats = penstock.finish(mean=[0.485, 0.456, 0.406], std=[0.229, 0.224, 0.225])
    loader = penstock.DataLoader(
        dataset,
        batch_size=8,
        shuffle=True,
        seed=0,
        num_workers="auto",
        device=device,
        finish=to_floats,
        on_error="skip",  # broken files are skipped and listed in loader.bad_samples
    )
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Conv2d(3, 8, 7, 4),
        torch.nn.ReLU(),
        torch.nn.AdaptiveAvgPool2d(1),
        torch.nn.Flatten(),
        torch.nn.Linear(8, num_classes),
    ).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        for images, labels in loader:
            loss = torch.nn.functional.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    print(loader.metrics())
    return loss.item()


if __name__ == "__main__":
    photos = Path(sys.argv[1]) if len(sys.argv) > 1 else make_photos(Path("photos"))
    place = Path(sys.argv[2] if len(sys.argv) > 2 else "packed")
    crop = penstock.Compose([penstock.RandomResizedCrop(64), penstock.RandomHorizontalFlip()])

    folder = penstock.ImageFolder(photos, crop)
    start_s = time.perf_counter()
    loss = train(folder, len(folder.classes))
    print(f"from the folder: loss {loss:.4f} in {time.perf_counter() - start_s:.2f} s")

    # Decode, shrink and store the pixels once. `penstock pack photos/ packed/` does the same.
    if not place.exists():
        penstock.pack(penstock.ImageFolder(photos), place, workers=0)
    packed = penstock.Packed(place, transforms={"image": crop})
    start_s = time.perf_counter()
    loss = train(packed, len(packed.attributes["classes"]))
    print(f"packed: loss {loss:.4f} in {time.perf_counter() - start_s:.2f} s")
