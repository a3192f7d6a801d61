"""A Hugging Face dataset, read by index and as a stream of two shards.

penstock run --seed 0 examples/huggingface_datasets.py
"""

import torch
from torch.utils.data import DataLoader

from datasets import Dataset


def add_noise(rows: dict) -> dict:
    x = torch.tensor(rows["x"])
    return {"x": x + 0.1 * torch.randn_like(x), "y": torch.tensor(rows["y"])}


if __name__ == "__main__":
    rows = {"x": [[float(i), float(i % 5)] for i in range(40)], "y": [i % 2 for i in range(40)]}
    table = Dataset.from_dict(rows)
    noisy = table.with_transform(add_noise)
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(2):
        for batch in DataLoader(noisy, batch_size=8, shuffle=True, num_workers=2):
            loss = torch.nn.functional.cross_entropy(model(batch["x"]), batch["y"])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    print("loss", loss.item())
    stream = table.to_iterable_dataset(num_shards=2).with_format("torch")
    seen = [batch["x"][:, 0] for batch in DataLoader(stream, batch_size=4, num_workers=2)]
    print("streamed", sorted(torch.cat(seen).tolist()) == [float(i) for i in range(40)])
