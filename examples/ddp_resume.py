"""DistributedDataParallel with a checkpoint after each epoch, from which a second run resumes.

torchrun --nproc-per-node 2 -m penstock run --seed 0 examples/ddp_resume.py checkpoint.pt 2
torchrun --nproc-per-node 2 -m penstock run --seed 0 examples/ddp_resume.py checkpoint.pt 4
"""

import os
import sys

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler


class Points(Dataset):
    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> tuple:
        return torch.full((4,), index / 32), index


if __name__ == "__main__":
    checkpoint, num_epochs, *rest = sys.argv[1:]
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    first_epoch = 0
    if os.path.exists(checkpoint):
        saved = torch.load(checkpoint)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        first_epoch = saved["epoch"]
    sampler = DistributedSampler(Points())
    num_workers = int(rest[0]) if rest else 2
    loader = DataLoader(Points(), batch_size=4, sampler=sampler, num_workers=num_workers)
    for epoch in range(first_epoch, int(num_epochs)):
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
        total = loss.detach().clone()
        dist.all_reduce(total)
        if dist.get_rank() == 0:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save({**state, "epoch": epoch + 1}, checkpoint)
            print("order", epoch, [part.tolist() for part in parts])
            print("loss", epoch, total.item(), flush=True)
        dist.barrier()
    dist.destroy_process_group()
