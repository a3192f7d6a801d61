"""Random v2 transforms and a small ResNet, in a plain loop.

penstock run --seed 0 examples/torchvision_v2.py
"""

import torch
from torch.utils.data import DataLoader
from torchvision import datasets, models
from torchvision.transforms import v2

augment = v2.Compose(
    [
        v2.ToImage(),
        v2.RandomResizedCrop(32, antialias=True),
        v2.RandomHorizontalFlip(),
        v2.RandAugment(),
        v2.ToDtype(torch.float32, scale=True),
        v2.RandomErasing(p=0.5),
    ]
)


def train() -> None:
    dataset = datasets.FakeData(32, (3, 40, 40), num_classes=4, transform=augment)
    loader = DataLoader(dataset, batch_size=8, shuffle=True, num_workers=2)
    model = models.resnet18(num_classes=4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(2):
        for images, labels in loader:
            loss = torch.nn.functional.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    print("loss", loss.item())


if __name__ == "__main__":
    train()
