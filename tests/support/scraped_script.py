"""A script that knows nothing of Penstock: it trains with torch's DataLoader until a file exists.

python scraped_script.py STOP_FILE
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

from torch.utils.data import DataLoader


class Photos:
    """Samples that take a millisecond."""

    def __len__(self) -> int:
        return 100_000

    def __getitem__(self, index: int) -> int:
        time.sleep(0.001)
        return index


def train(stop: Path) -> None:
    loader = DataLoader(Photos(), batch_size=4, num_workers=1)  # type: ignore[arg-type, var-annotated]
    while not stop.exists():
        for _ in loader:
            if stop.exists():
                break


if __name__ == "__main__":
    train(Path(sys.argv[1]))
