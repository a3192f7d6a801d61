"""fastai's Learner with torch's loaders, or with fastai's loaders if the argument is ``own``.

penstock run --seed 0 examples/fastai_learner.py
"""

import sys

import torch
from fastai.basics import Callback, DataLoaders, Learner, set_seed
from fastai.callback.all import ShowGraphCallback  # noqa: F401 (importing it adds fit_one_cycle)
from torch.utils.data import DataLoader, Dataset


class Noisy(Dataset):
    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> tuple:
        return torch.full((4,), index / 32) + 0.1 * torch.randn(4), torch.tensor(index)


class Order(Callback):
    """The indices of the last epoch."""

    def before_train(self) -> None:
        self.indices = []

    def before_batch(self) -> None:
        if self.training:
            self.indices += self.yb[0].tolist()


def measure(predicted: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(predicted, index % 2)


def make_loaders(num_workers: int, *, are_own: bool) -> DataLoaders:
    if are_own:
        return DataLoaders.from_dsets(Noisy(), Noisy(), bs=8, num_workers=num_workers, device="cpu")
    train = DataLoader(Noisy(), batch_size=8, shuffle=True, num_workers=num_workers)
    return DataLoaders(train, DataLoader(Noisy(), batch_size=8))


if __name__ == "__main__":
    num_workers = int(sys.argv[1]) if len(sys.argv) > 1 else 2
    set_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
    loaders, order = make_loaders(num_workers, are_own="own" in sys.argv), Order()
    learner = Learner(loaders, model, loss_func=measure, cbs=order)
    with learner.no_bar(), learner.no_logging():
        learner.fit_one_cycle(2)
    print("order", order.indices)
    print("loss", *learner.recorder.values[-1])
