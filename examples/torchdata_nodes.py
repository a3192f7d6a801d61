"""A pipeline of torchdata's nodes as the source of a loader. Its threads run in the worker.

penstock run --seed 0 examples/torchdata_nodes.py
"""

import torch
import torchdata.nodes as tn
from torch.utils.data import DataLoader, IterableDataset


def load(number: int) -> torch.Tensor:
    return torch.tensor([float(number), float(number * number)])


class Nodes(IterableDataset):
    def __iter__(self):
        numbers = tn.IterableWrapper(range(64))
        mapped = tn.ParallelMapper(numbers, load, num_workers=2, method="thread")
        return iter(tn.Loader(tn.Prefetcher(mapped, prefetch_factor=2)))


if __name__ == "__main__":
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-7)
    for _ in range(2):
        for batch in DataLoader(Nodes(), batch_size=8, num_workers=1):
            loss = model(batch).pow(2).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    print("loss", loss.item())
