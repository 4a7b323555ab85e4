"""Several processes, one traced: a process group that answers at once and moves nothing; buckets and all are allocated."""

import os

from . import report


def install(torch):
    distributed = torch.distributed
    if not distributed.is_available():
        return
    begin = distributed.init_process_group

    def init_process_group(backend=None, *_args, rank=-1, world_size=-1, **_words):
        from torch.testing._internal.distributed.fake_pg import FakeStore

        rank = rank if rank >= 0 else int(os.environ.get("RANK") or 0)
        size = world_size if world_size > 0 else int(os.environ.get("WORLD_SIZE") or 1)
        report.facts.update(rank=rank, world_size=size)
        report.flags.add("distributed")
        begin(backend="fake", rank=rank, world_size=size, store=FakeStore())

    distributed.init_process_group = init_process_group
    distributed.distributed_c10d.init_process_group = init_process_group
    _patch_replicas(torch)


def _patch_replicas(torch):
    """All processes hold the same model; nothing has to be compared or sent."""
    from torch.distributed import utils

    for name in ("_verify_param_shape_across_processes", "_sync_module_states"):
        if hasattr(utils, name):
            setattr(utils, name, lambda *_a, **_w: None)
    make = torch.nn.parallel.DistributedDataParallel.__init__

    def __init__(self, *args, **words):
        report.flags.add("ddp")
        make(self, *args, **words)

    torch.nn.parallel.DistributedDataParallel.__init__ = __init__

    def refuse(*_args, **_words):
        report.refuse("unsupported", "nn.DataParallel copies the model inside a step, which a trial does not follow")

    torch.nn.DataParallel = refuse
