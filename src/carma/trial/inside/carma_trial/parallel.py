"""Distributed training. Only the first rank is followed; its process group returns at once and transfers nothing.

Replicas allocate their buckets as always.
"""

import multiprocessing
import os

import torch

from . import cuda_api, gpu_processes, kernels, replaces, report


def leave_unless_first():
    """Only the first rank's trial counts; the others would slow it down."""
    if int(report.facts.get("rank", 0)):
        gpu_processes.forget()
        report.leave()


def _want_cards(size):
    """One GPU for each local process. Only the launcher knows how many processes are on other machines."""
    local = os.environ.get("LOCAL_WORLD_SIZE")
    if local or multiprocessing.parent_process() is not None:
        gpu_processes.want_cards(int(local or size))


def install():
    _one_card()
    _want_cards(1)
    distributed = torch.distributed
    if not distributed.is_available():
        return
    leave_unless_first()

    @replaces(distributed, "init_process_group")
    def init_process_group(begin, backend=None, *_args, rank=-1, world_size=-1, **_words):
        from torch.testing._internal.distributed.fake_pg import FakeStore

        rank = rank if rank >= 0 else int(os.environ.get("RANK") or 0)
        size = world_size if world_size > 0 else int(os.environ.get("WORLD_SIZE") or 1)
        report.facts.update(rank=rank, world_size=size)
        leave_unless_first()
        _want_cards(size)
        if not distributed.is_initialized():
            _register_norms()
        report.flags.add("distributed")
        begin(backend="fake", rank=rank, world_size=size, store=FakeStore())

    distributed.distributed_c10d.init_process_group = distributed.init_process_group
    _answers(distributed)
    _patch_replicas()


_ANSWERS = (
    (None, "broadcast_object_list barrier monitored_barrier"),
    (True, "is_nccl_available"),
    ("nccl", "get_backend"),
)


def _completed(value):
    future = torch.futures.Future()
    future.set_result(value)
    return future


class CompletedWork:
    """The work object of a call that does not wait: its result is the tensor itself."""

    def __init__(self, tensor):
        self._tensor = tensor

    def wait(self, *_args):
        return True

    is_completed = is_success = wait

    def get_future(self):
        return _completed([self._tensor])


def _answers(distributed):
    """Collectives that torch's fake process group refuses, or whose answer scripts read."""
    reduce = distributed.all_reduce

    def all_reduce(tensor, *args, async_op=False, **words):
        reduce(tensor, *args, **words)
        return CompletedWork(tensor) if async_op else None

    def gather_objects(objects, mine, *_args, **_words):
        objects[:] = [mine] * len(objects)

    for holder in (distributed, distributed.distributed_c10d):
        holder.all_reduce, holder.all_gather_object = all_reduce, gather_objects
        cuda_api.answer(holder, _ANSWERS)


def _patch_replicas():
    """All processes hold the same model, so nothing is compared. The reducer makes its buckets as it always does."""
    from torch.distributed import utils
    from torch.nn.parallel import distributed as module

    for holder in (utils, module):
        if hasattr(holder, "_verify_param_shape_across_processes"):
            holder._verify_param_shape_across_processes = lambda *_args, **_words: None
    replica = module.DistributedDataParallel
    register = replica.register_comm_hook

    @replaces(replica, "__init__")
    def made(make, self, *args, **words):
        report.flags.add("ddp")
        make(self, *args, **words)
        if self.find_unused_parameters:
            # The reducer insists that its map of used parameters is pinned, which no memory is without a GPU.
            kernels.register({"is_pinned": lambda _tensor, device=None: True}, "CPU")
        self._carma_hook = None
        self.logger = _Silent()
        register(self, self, _hook)

    def _hook(self, bucket):
        """The group's own answer has no value; this is what the reducer would get."""
        if self._carma_hook is not None:
            state, hook = self._carma_hook
            return hook(state, bucket)
        return _completed(bucket.buffer())

    _hook.__annotations__ = {"bucket": torch.distributed.GradBucket, "return": torch.futures.Future[torch.Tensor]}

    def register_comm_hook(self, state, hook):
        self._carma_hook = (state, hook)

    replica.register_comm_hook = register_comm_hook
    replica._register_builtin_comm_hook = lambda *_args: None
    replica._get_ddp_logging_data = lambda _self: {}


class _Silent:
    """Replaces the reducer's log of timings, which queries the GPU."""

    def __getattr__(self, name):
        return lambda *_args, **_words: None


def _one_card():
    """nn.DataParallel with one card only moves its inputs there; with several it copies the model in each step."""
    from torch.nn.parallel import comm

    @replaces(torch.nn.DataParallel, "__init__")
    def made(make, self, module, device_ids=None, *args, **words):
        count = torch.cuda.device_count() if device_ids is None else len(device_ids)
        if count > 1:
            report.refuse(
                "unsupported", "nn.DataParallel copies the model inside a step, which a trial run cannot follow"
            )
        make(self, module, device_ids, *args, **words)

    def scatter(tensor, devices=None, chunk_sizes=None, dim=0, streams=None, *, out=None):
        return (tensor.to(torch.device("cuda", torch.cuda._utils._get_device_index(devices[0], True))),)

    comm.scatter = scatter


# Batch normalisation across processes: torch has kernels for GPUs only, none that give shapes alone.


def _channels(input, *_rest):
    dtype = torch.float64 if input.dtype == torch.float64 else torch.float32
    return torch.empty((input.shape[1],), dtype=dtype, device="meta")


def _statistics(input, *_rest):
    return _channels(input), _channels(input)


def _reduced(grad, input, mean, invstd, weight, input_g, weight_g, bias_g):
    like = weight if weight is not None else mean
    nothing = torch.empty((0,), dtype=like.dtype, device="meta")
    sums = (_channels(input) if input_g else nothing for _ in range(2))
    return (*sums, *(torch.empty_like(like) if wanted else nothing for wanted in (weight_g, bias_g)))


def _register_norms():
    wanted = {
        "batch_norm_stats": _statistics,
        "batch_norm_gather_stats": _statistics,
        "batch_norm_gather_stats_with_counts": _statistics,
        "batch_norm_elemt": lambda input, *_rest: torch.empty_like(input),
        "batch_norm_backward_reduce": _reduced,
        "batch_norm_backward_elemt": lambda _grad, input, *_rest: torch.empty_like(input),
    }
    for name, kernel in wanted.items():
        if not torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", "Meta"):
            kernels.register({name: kernel}, "Meta")
