"""DistributedDataParallel with several CPU processes. The sampler divides the samples among them.

torchrun --nproc-per-node 3 -m penstock run --seed 0 examples/ddp_gloo.py
"""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler


class Noisy(Dataset):
    def __len__(self) -> int:
        return 48

    def __getitem__(self, index: int) -> tuple:
        return torch.full((4,), index / 48) + 0.1 * torch.randn(4), index


if __name__ == "__main__":
    dist.init_process_group("gloo")
    model = DistributedDataParallel(torch.nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    dataset = Noisy()
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=4, sampler=sampler, num_workers=2)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        seen = []
        for x, index in loader:
            seen.append(index)
            loss = torch.nn.functional.cross_entropy(model(x), index % 2)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    own = torch.cat(seen)
    parts = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, own)
    dist.all_reduce(loss.detach())
    if dist.get_rank() == 0:
        print("each once", sorted(torch.cat(parts).tolist()) == list(range(48)))
        print("loss", loss.item())
    dist.destroy_process_group()
