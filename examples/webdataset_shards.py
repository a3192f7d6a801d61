"""WebDataset with tar shards, decoded and shuffled in the workers.

penstock run --seed 0 examples/webdataset_shards.py shards
"""

import sys
from pathlib import Path

import torch
import webdataset as wds


def write_shards(folder: Path) -> list[str]:
    folder.mkdir(parents=True, exist_ok=True)
    paths = [str(folder / f"{shard}.tar") for shard in range(2)]
    for shard, path in enumerate(paths):
        with wds.TarWriter(path) as writer:
            for number in range(16 * shard, 16 * shard + 16):
                x = torch.tensor([float(number), float(number % 3)])
                writer.write({"__key__": f"{number:04d}", "x.pth": x, "y.cls": number % 2})
    return paths


if __name__ == "__main__":
    paths = write_shards(Path(sys.argv[1] if len(sys.argv) > 1 else "shards"))
    dataset = (
        wds.WebDataset(paths, shardshuffle=False)
        .shuffle(8)
        .decode()
        .to_tuple("x.pth", "y.cls")
        .batched(4)
    )
    loader = wds.WebLoader(dataset, batch_size=None, num_workers=2)
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    seen = []
    for _ in range(2):
        for x, y in loader:
            seen += x[:, 0].tolist()
            loss = torch.nn.functional.cross_entropy(model(x), torch.as_tensor(y))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    print("streamed", sorted(seen) == sorted(2 * [float(number) for number in range(32)]))
    print("loss", loss.item())
