"""A rank that trains until it is killed, and serves its metrics for Prometheus.

    RANK=1 LOCAL_RANK=1 python served_ranks.py

The program prints the address of its endpoint.
"""

from __future__ import annotations

import time


class Photos:
    """Samples that take a millisecond. Each thousandth is bad."""

    def __len__(self) -> int:
        return 10**9

    def __getitem__(self, index: int) -> int:
        time.sleep(0.001)
        if index % 1000 == 7:
            raise OSError(f"sample {index} is truncated")
        return index


def train() -> None:
    import penstock

    mixture = penstock.mix([(Photos(), 1), (Photos(), 1)], names=["photos", "more"])
    loader = penstock.DataLoader(mixture, batch_size=8, num_workers=1, on_error="skip")
    print(penstock.serve_metrics({"train": loader}).url, flush=True)
    while True:
        for _ in loader:
            time.sleep(0.002)


if __name__ == "__main__":
    train()
