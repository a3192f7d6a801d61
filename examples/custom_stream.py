"""A custom stream: lines from several files, divided among workers, and resumed in the middle.

    python examples/custom_stream.py                  # creates some sample files
    python examples/custom_stream.py logs/*.jsonl

An iterable dataset has no positions. It chooses the part that each worker reads, and saves its own
state (`state_dict`).
"""

import json
import sys
from pathlib import Path

import torch
from torch.utils.data import IterableDataset, get_worker_info

import penstock


class Lines(IterableDataset):
    """The lines of some files. Each worker reads its own files."""

    def __init__(self, paths: list[str]) -> None:
        self.paths = paths
        self.num_done = 0

    def __iter__(self):
        info = get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        skip, self.num_done = self.num_done, 0
        for path in self.paths[first::step]:
            with open(path) as file:
                for line in file:
                    self.num_done += 1
                    if self.num_done > skip:
                        record = json.loads(line)
                        yield torch.tensor(record["x"]), record["y"]
        self.num_done = 0

    def state_dict(self) -> dict[str, int]:
        return {"num_done": self.num_done}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.num_done = state["num_done"]


def make_files(folder: Path) -> list[str]:
    folder.mkdir(exist_ok=True)
    paths = [folder / f"{part}.jsonl" for part in range(4)]
    for part, path in enumerate(paths):
        rows = [{"x": [part + i / 50, i / 50], "y": i % 2} for i in range(50)]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return [str(path) for path in paths]


if __name__ == "__main__":
    paths = sys.argv[1:] or make_files(Path("logs"))
    loader = penstock.DataLoader(Lines(paths), batch_size=10, num_workers=2)
    torch.manual_seed(0)
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    num_rows = 0
    for number, (x, y) in enumerate(loader):
        loss = torch.nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        num_rows += len(y)
        if number == 7:
            state, num_before = loader.state_dict(), num_rows
    print(f"loss {loss.item():.4f} after {num_rows} lines")

    resumed = penstock.DataLoader(Lines(paths), batch_size=10, num_workers=2)
    resumed.load_state_dict(state)
    num_after = sum(len(y) for _, y in resumed)
    print("every line exactly once, also after resuming:", num_before + num_after == num_rows)
