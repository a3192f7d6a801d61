"""torchdata, with the StatefulDataLoader and with a pipeline of nodes."""

from __future__ import annotations

from typing import Any

import torch
import torchdata.nodes as nodes
from by_torch import PyTorch
from contract import Contender, Feed, Job
from torch.utils.data import RandomSampler, default_collate
from torchdata.stateful_dataloader import StatefulDataLoader


class Stateful(PyTorch):
    name = "torchdata StatefulDataLoader"
    kinds = PyTorch.kinds
    kind_of_loader = StatefulDataLoader

    def feed(self, loader: Any) -> Feed:
        return Feed(loader, state=loader.state_dict, restore=loader.load_state_dict)


class Nodes(Contender):
    """Sampler, mapper with threads, batcher and prefetcher, as in its documentation."""

    name = "torchdata nodes, threads"
    has_processes = False
    method = "thread"

    def open(self, job: Job) -> Feed:
        dataset = PyTorch().dataset(job)
        generator = torch.Generator()
        generator.manual_seed(job.seed or 0)
        sampler = nodes.SamplerWrapper(RandomSampler(dataset, generator=generator))
        keywords: dict[str, Any] = {"num_workers": job.num_workers, "method": self.method}
        batcher = nodes.Batcher(sampler, job.batch_size, drop_last=True)
        if job.kind in ("small", "large"):
            mapped = nodes.ParallelMapper(batcher, dataset.__getitems__, **keywords)
        else:
            mapped = nodes.ParallelMapper(batcher, _Fetch(dataset), **keywords)
        loader = nodes.Loader(nodes.Prefetcher(mapped, prefetch_factor=4))
        return Feed(loader, state=loader.state_dict, restore=loader.load_state_dict)


class _Fetch:
    """Maps whole batches, because each sample would otherwise pass through a queue."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __call__(self, indices: list[int]) -> Any:
        return default_collate([self.dataset[index] for index in indices])


class NodeProcesses(Nodes):
    name = "torchdata nodes, processes"
    kinds = ("numbers",)
    has_processes = True
    method = "process"


CONTENDERS = (Stateful, Nodes, NodeProcesses)
