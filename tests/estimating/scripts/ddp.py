"""DistributedDataParallel: under torchrun, or (`--spawn N`) by torch.multiprocessing."""

import argparse
import contextlib
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def train(rank, size, options):
    if options.spawn:
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29500")
        dist.init_process_group("nccl", rank=rank, world_size=size)
    else:
        dist.init_process_group(backend="nccl")
        rank, size = int(os.environ["LOCAL_RANK"]), dist.get_world_size()
    torch.cuda.set_device(rank)
    model = nn.Sequential(nn.Linear(512, 2048), nn.BatchNorm1d(2048), nn.ReLU(), nn.Linear(2048, 1024)).cuda(rank)
    model = nn.SyncBatchNorm.convert_sync_batchnorm(model) if options.sync else model
    if not options.plain:
        model = DistributedDataParallel(model, device_ids=[rank], find_unused_parameters=options.unused)
    optimizer = torch.optim.AdamW(model.parameters())
    if options.hook:
        from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

        model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    data = TensorDataset(torch.randn(4096, 512), torch.randint(0, 1024, (4096,)))
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=64, sampler=sampler, num_workers=2, pin_memory=True)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for index, (inputs, labels) in enumerate(loader):
            last = index % 2 == 1 or not options.accumulate
            with contextlib.nullcontext() if last else model.no_sync():
                loss = nn.functional.cross_entropy(model(inputs.cuda(rank)), labels.cuda(rank))
                loss.backward()
            if last:
                optimizer.step()
                optimizer.zero_grad()
            mean = loss.detach().clone()
            dist.all_reduce(mean)
            gathered = [torch.zeros_like(mean) for _ in range(size)]
            dist.all_gather(gathered, mean)
            if rank == 0:
                print(epoch, index, mean.item() / size, flush=True)
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--spawn", type=int, default=0)
    for name in ("accumulate", "unused", "sync", "hook", "plain"):
        parser.add_argument(f"--{name}", action="store_true")
    parser.add_argument("--local-rank", type=int)
    options = parser.parse_args()
    if options.spawn:
        torch.multiprocessing.spawn(train, args=(options.spawn, options), nprocs=options.spawn)
    else:
        train(0, 1, options)
