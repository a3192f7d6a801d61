"""Random windows of a long recording, read from a file that is never loaded completely.

    python examples/time_series.py            # creates a sample recording
    python examples/time_series.py sound.npy  # an array of (samples, channels)

The workers map the file, so no copy of it is sent to them. The random start and gain of a window
are the same for any number of workers. `resume` below continues in the middle of an epoch.
"""

import sys
from pathlib import Path

import numpy as np
import torch

import penstock

WINDOW = 1024


class Windows:
    """Window i starts at a random place in the i-th piece of the recording."""

    def __init__(self, path: Path) -> None:
        self.signal = np.load(path, mmap_mode="r")

    def __len__(self) -> int:
        return len(self.signal) // WINDOW - 1

    def __getitem__(self, i: int) -> tuple[torch.Tensor, torch.Tensor]:
        rng = penstock.rng()  # depends on seed, epoch and position
        start = i * WINDOW + int(rng.integers(WINDOW))
        piece = np.array(self.signal[start : start + WINDOW + 1], np.float32)
        piece = torch.from_numpy(piece * rng.uniform(0.8, 1.2)).T.float()
        return piece[:, :-1], piece[:, -1]


def make_recording(path: Path) -> Path:
    rng = np.random.default_rng(0)
    times = np.arange(200 * WINDOW) / 100
    waves = np.stack([np.sin(times), np.sin(times * 1.7)], axis=1)
    np.save(path, (waves + rng.normal(0, 0.1, waves.shape)).astype(np.float16))
    return path


def make_loader(dataset, num_workers: int = 2) -> penstock.DataLoader:
    return penstock.DataLoader(
        dataset, batch_size=16, shuffle=True, seed=0, num_workers=num_workers
    )


if __name__ == "__main__":
    path = Path(sys.argv[1]) if len(sys.argv) > 1 else make_recording(Path("recording.npy"))
    dataset = Windows(path)
    loader = make_loader(dataset)
    torch.manual_seed(0)
    model = torch.nn.Conv1d(dataset.signal.shape[1], dataset.signal.shape[1], 64)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for number, (past, future) in enumerate(loader):
        loss = torch.nn.functional.mse_loss(model(past)[:, :, -1], future)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if number == 4:
            state = loader.state_dict()  # save it in a checkpoint, with model.state_dict()
    print(f"loss {loss.item():.4f} after {number + 1} batches")

    resume = make_loader(dataset, num_workers=0)
    resume.load_state_dict(state)
    print("batches left after resuming:", sum(1 for _ in resume))
