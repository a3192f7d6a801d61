"""A custom training loop with accelerate, in one or several processes.

penstock run --seed 0 examples/accelerate_loop.py
accelerate launch --cpu -m penstock run --seed 0 examples/accelerate_loop.py
"""

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, Dataset


class Noisy(Dataset):
    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> tuple:
        return torch.full((4,), index / 32) + 0.1 * torch.randn(4), index % 2


if __name__ == "__main__":
    accelerator = Accelerator(cpu=True)
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(Noisy(), batch_size=8, shuffle=True, num_workers=2)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for _ in range(2):
        for x, y in loader:
            loss = torch.nn.functional.cross_entropy(model(x), y)
            optimizer.zero_grad()
            accelerator.backward(loss)
            optimizer.step()
    print("loss", accelerator.gather(loss.detach().reshape(1)).tolist())
