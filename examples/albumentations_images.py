"""An albumentations pipeline, which has its own generator, in a plain loop.

penstock run --seed 0 examples/albumentations_images.py
"""

import albumentations as A
import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset


class Pictures(Dataset):
    def __init__(self) -> None:
        self.pictures = np.random.RandomState(0).randint(0, 255, (32, 40, 40, 3), dtype=np.uint8)
        self.augment = A.Compose(
            [A.RandomCrop(32, 32), A.HorizontalFlip(), A.GaussNoise(), A.Normalize()]
        )

    def __len__(self) -> int:
        return len(self.pictures)

    def __getitem__(self, index: int) -> tuple:
        picture = self.augment(image=self.pictures[index])["image"]
        return torch.from_numpy(picture).permute(2, 0, 1), index % 4


if __name__ == "__main__":
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3 * 32 * 32, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    loader = DataLoader(Pictures(), batch_size=8, shuffle=True, num_workers=2)
    for _ in range(2):
        for pictures, labels in loader:
            loss = torch.nn.functional.cross_entropy(model(pictures), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    print("loss", loss.item())
