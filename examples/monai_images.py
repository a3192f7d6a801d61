"""A MONAI pipeline with a CacheDataset, whose random transforms have their own generators.

penstock run --seed 0 examples/monai_images.py
"""

import sys

import numpy as np
import torch
from monai.data import CacheDataset, DataLoader
from monai.networks.nets import DenseNet121
from monai.transforms import (
    Compose,
    EnsureChannelFirstd,
    RandFlipd,
    RandGaussianNoised,
    RandRotated,
    ScaleIntensityd,
)
from monai.utils import set_determinism

if __name__ == "__main__":
    num_workers = int(sys.argv[1]) if len(sys.argv) > 1 else 2
    set_determinism(0)
    scans = np.random.RandomState(0).rand(16, 32, 32).astype(np.float32)
    files = [{"image": scan, "label": i % 2, "index": i} for i, scan in enumerate(scans)]
    transforms = Compose(
        [
            EnsureChannelFirstd("image", channel_dim="no_channel"),
            ScaleIntensityd("image"),
            RandRotated("image", range_x=0.4, prob=0.8),
            RandFlipd("image", prob=0.5),
            RandGaussianNoised("image", prob=0.5),
        ]
    )
    dataset = CacheDataset(files, transforms, cache_rate=1.0, num_workers=0, progress=False)
    loader = DataLoader(dataset, batch_size=4, shuffle=True, num_workers=num_workers)
    model = DenseNet121(
        spatial_dims=2,
        in_channels=1,
        out_channels=2,
        init_features=8,
        growth_rate=4,
        block_config=(1, 1),
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=0.001)
    for _ in range(2):
        seen, total = [], 0.0
        for batch in loader:
            loss = torch.nn.functional.cross_entropy(model(batch["image"]), batch["label"])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            seen += batch["index"].tolist()
            total += batch["image"].sum().item()
    print("order", seen)
    print("pixels", total)
    print("loss", loss.item())
