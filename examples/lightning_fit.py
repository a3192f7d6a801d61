"""PyTorch Lightning's Trainer with a random transform in the dataset.

penstock run --seed 0 examples/lightning_fit.py
"""

import pytorch_lightning as pl
import torch
from torch.utils.data import DataLoader, Dataset


class Noisy(Dataset):
    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> tuple:
        return torch.full((4,), index / 32) + 0.1 * torch.randn(4), index % 2


class Classifier(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 2)

    def training_step(self, batch: tuple, _: int) -> torch.Tensor:
        x, y = batch
        loss = torch.nn.functional.cross_entropy(self.layer(x), y)
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


if __name__ == "__main__":
    trainer = pl.Trainer(
        accelerator="cpu",
        max_epochs=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    trainer.fit(Classifier(), DataLoader(Noisy(), batch_size=8, shuffle=True, num_workers=2))
    print("loss", trainer.callback_metrics["train_loss"].item())
