"""`torch.cuda` as it answers on the emulated GPU. Functions that launch, wait or measure do nothing.

Memory figures are plausible, never exact: a script that steers by them is traced as if the GPU were nearly empty.
"""

import contextlib
import itertools
import json
import os
import types

import torch

from . import build, gpu_processes, replaces, report

GIB = 1 << 30
_gpu = json.loads(os.environ.get("CARMA_TRACE_GPU") or "{}")  # of trial_environment.gpu_description
COUNT = int(_gpu.get("count", 1))
CAPABILITY = tuple(_gpu.get("capability", (9, 0)))
MEMORY_BYTES = int(_gpu.get("memory_bytes", 80 * GIB))
MULTIPROCESSORS = int(_gpu.get("multiprocessors", 132))
THREADS_PER_MULTIPROCESSOR = 2048
_CUDNN_VERSION, _CUDA_VERSION = 91900, (13, 0)
_PROPERTIES = types.SimpleNamespace(
    name=_gpu.get("name", "NVIDIA H200"),
    major=CAPABILITY[0],
    minor=CAPABILITY[1],
    total_memory=MEMORY_BYTES,
    multi_processor_count=MULTIPROCESSORS,
    is_integrated=0,
    is_multi_gpu_board=0,
    max_threads_per_multi_processor=THREADS_PER_MULTIPROCESSOR,
    max_threads_per_block=1024,
    warp_size=32,
    regs_per_multiprocessor=65536,
    shared_memory_per_block=49152,
    shared_memory_per_block_optin=232448,
    shared_memory_per_multiprocessor=233472,
    L2_cache_size=60 << 20,
    gcnArchName="",
    uuid="GPU-00000000-0000-0000-0000-000000000000",
)
_AMPERE = (8, 0)
SEEDING = "manual_seed manual_seed_all seed seed_all set_rng_state set_rng_state_all"
# (answer, names of functions). Of torch._C, after `_cuda_`: functions that a CPU build lacks and Python code calls.
_ANSWERS_OF_C = (
    (None, "init synchronize ipc_collect setMemoryFraction resetPeakMemoryStats resetAccumulatedMemoryStats"),
    (None, "record_memory_history lock_mutex unlock_mutex"),
    (0, "getCurrentRawStream cudaHostAllocator"),
    (False, "isCurrentStreamCapturing"),
    (True, "canDeviceAccessPeer"),
    (_CUDA_VERSION[0] * 1000, "getCompiledVersion"),
    (COUNT, "getDeviceCount"),
)
_ANSWERS = (
    (None, f"init _lazy_init synchronize {SEEDING}"),
    (None, "reset_peak_memory_stats reset_accumulated_memory_stats reset_max_memory_allocated ipc_collect"),
    (None, "reset_max_memory_cached set_per_process_memory_fraction"),
    (True, "is_available is_initialized _is_compiled can_device_access_peer"),
    (False, "is_current_stream_capturing"),
    (0, "utilization power_draw temperature clock_rate memory_usage initial_seed"),
    (COUNT, "device_count _device_count_nvml"),
    (CAPABILITY, "get_device_capability"),
    (CAPABILITY >= _AMPERE, "is_bf16_supported is_tf32_supported"),
    (_PROPERTIES, "get_device_properties _get_device_properties"),
    (_PROPERTIES.name, "get_device_name"),
    ("", "get_gencode_flags memory_summary"),
    (GIB, "memory_allocated max_memory_allocated memory_reserved max_memory_reserved memory_cached max_memory_cached"),
)


def install():
    cuda = torch.cuda
    answer(torch._C, _ANSWERS_OF_C, prefix="_cuda_")
    answer(cuda, _ANSWERS)
    _patch_c()
    _patch_device(cuda)
    _patch_accelerator(cuda)
    _patch_streams(cuda)
    _patch_memory(cuda)
    _patch_random(cuda)
    _patch_backends()
    _patch_graphs(cuda)
    _patch_default_type()


def _returns(value):
    return lambda *_args, **_words: value


def answer(holder, answers, prefix=""):
    for value, names in answers:
        for name in names.split():
            setattr(holder, prefix + name, _returns(value))


def repeat_in(module, names):
    """Copies functions of torch.cuda into one of its modules."""
    for name in names.split():
        setattr(module, name, getattr(torch.cuda, name))


def _index(device):
    """0 for "cuda:0", torch.device("cuda", 0), 0 or None."""
    if isinstance(device, str):
        device = device.partition(":")[2]
        device = int(device) if device else None
    index = getattr(device, "index", None) if not isinstance(device, int) else device if device >= 0 else None
    return build.library.carma_device() if index is None else index


def _patch_c():
    functions = {
        "getCurrentStream": lambda device: (build.library.carma_stream(device), device, 1),
        "getDefaultStream": lambda device: (0, device, 1),
        "getDevice": lambda: build.library.carma_device(),
        "setDevice": _set_device,
        "exchangeDevice": _exchange,
        "maybeExchangeDevice": _exchange,
        "emptyCache": _empty_cache,
        "hostMemoryStats": lambda *_args: {},
    }
    for name, function in functions.items():
        setattr(torch._C, f"_cuda_{name}", function)
    torch._C._has_cudnn = True


def _empty_cache():
    build.library.carma_note(report.EMPTY_CACHE, 0, 0, 0)


def _exchange(device):
    before = build.library.carma_device()
    if device >= 0:
        _set_device(device)
    return before


def _set_device(device):
    gpu_processes.want_cards(device + 1)
    report.refuse_too_many_gpus()
    build.library.carma_set_device(device)


def _patch_device(cuda):
    cuda._initialized = True
    cuda._exchange_device = cuda._maybe_exchange_device = _exchange
    cuda._lazy_call = lambda function, **_words: function()
    cuda.current_device = lambda: build.library.carma_device()
    cuda.set_device = lambda device: _set_device(_index(device))
    cuda.get_arch_list = lambda: [f"sm_{CAPABILITY[0]}{CAPABILITY[1]}"]
    answer(cuda.nvtx, ((0, "range_push range_pop mark range_start range_end"),))
    cuda.nvtx.range = lambda *_args, **_words: contextlib.nullcontext()
    if not torch.version.cuda:
        torch.version.cuda = ".".join(map(str, _CUDA_VERSION))


def _patch_accelerator(cuda):
    accelerator = getattr(torch, "accelerator", None)
    if accelerator is None:
        return
    answer(accelerator, ((True, "is_available"), (COUNT, "device_count"), (None, "synchronize")))
    accelerator.current_accelerator = _returns(torch.device("cuda"))
    for end in ("index", "idx"):
        setattr(accelerator, f"current_device_{end}", lambda: build.library.carma_device())
        setattr(accelerator, f"set_device_{end}", lambda device, /: build.library.carma_set_device(_index(device)))
    for name in ("empty_cache", "memory_allocated", "memory_reserved", "max_memory_allocated"):
        if hasattr(accelerator, name):
            setattr(accelerator, name, lambda *_a, _name=name, **_w: getattr(cuda, _name)())


_stream_ids = itertools.count(1)


class Stream(torch.Stream):
    def __new__(cls, device=None, priority=0, stream_id=None, **_words):
        stream_id = next(_stream_ids) if stream_id is None else stream_id
        return super().__new__(cls, stream_id=stream_id, device_index=_index(device), device_type=1)

    def __init__(self, *_args, **_words):
        pass

    cuda_stream = property(lambda self: self.stream_id)
    priority = 0
    query = _returns(True)
    synchronize = wait_event = wait_stream = _returns(None)

    def record_event(self, event=None):
        return event if event is not None else Event()


class Event:
    def __init__(self, *_args, **_words):
        pass

    query = _returns(True)
    record = wait = synchronize = _returns(None)
    elapsed_time = _returns(1.0)
    ipc_handle = _returns(b"")


class StreamContext:
    def __init__(self, stream):
        self.stream = stream

    def __enter__(self):
        if self.stream is not None:
            self.before = build.library.carma_stream(self.stream.device_index)
            _set_stream(self.stream)

    def __exit__(self, *_error):
        if self.stream is not None:
            build.library.carma_set_stream(self.stream.device_index, self.before)


def _set_stream(stream):
    build.library.carma_set_stream(stream.device_index, stream.stream_id)


def _patch_streams(cuda):
    cuda.Stream, cuda.Event, cuda.ExternalStream = Stream, Event, Stream
    cuda.streams.Stream, cuda.streams.Event = Stream, Event
    cuda.StreamContext = StreamContext
    cuda.stream = lambda stream: StreamContext(stream)
    cuda.current_stream = lambda device=None: Stream(device, stream_id=build.library.carma_stream(_index(device)))
    cuda.default_stream = lambda device=None: Stream(device, stream_id=0)
    cuda.set_stream = _set_stream


class _Stats(dict):
    def __missing__(self, key):
        return 0


def _patch_memory(cuda):
    cuda.mem_get_info = _returns((int(MEMORY_BYTES * 0.98), MEMORY_BYTES))
    cuda.memory_stats = cuda.memory_stats_as_nested_dict = lambda *_a, **_w: _Stats()
    cuda.memory_snapshot = lambda *_a, **_w: []
    cuda.empty_cache = _empty_cache
    repeat_in(cuda.memory, f"{_ANSWERS[-1][1]} empty_cache mem_get_info")
    answer(cuda.memory, ((None, "_record_memory_history _dump_snapshot"),))
    cuda.memory._snapshot = lambda *_a, **_w: {"segments": [], "device_traces": []}


def _patch_random(cuda):
    state = torch.get_rng_state()[:16].clone()
    cuda.get_rng_state = lambda *_a, **_w: state.clone()
    cuda.get_rng_state_all = lambda: [state.clone() for _ in range(COUNT)]
    repeat_in(cuda.random, f"{SEEDING} get_rng_state get_rng_state_all initial_seed")
    cuda.default_generators = tuple(torch.Generator() for _ in range(COUNT))


def _patch_backends():
    cudnn, cuda = torch.backends.cudnn, torch.backends.cuda
    cudnn.is_available = cuda.is_built = _returns(True)
    cudnn.version = _returns(_CUDNN_VERSION)
    cudnn.is_acceptable = lambda tensor: bool(tensor.is_cuda and cudnn.enabled)
    cuda.preferred_linalg_library = _returns(None)
    cuda.cufft_plan_cache = types.SimpleNamespace(max_size=4096, size=0, clear=_returns(None))


def _patch_graphs(cuda):
    class RefusedGraph:
        def __init__(self, *_args, **_words):
            report.refuse("unsupported", "the script captures CUDA graphs; a trial run cannot see their memory pools")

    for name in ("CUDAGraph", "graph", "make_graphed_callables"):  # classes: they stand in annotations, too
        setattr(cuda, name, type(name, (RefusedGraph,), {}))


def _patch_default_type():
    """An old setting with which all tensors are created on the GPU."""

    @replaces(torch, "set_default_tensor_type")
    def set_default_tensor_type(plain, kind):
        name = kind if isinstance(kind, str) else f"{kind.__module__}.{kind.__name__}"
        if not name.startswith("torch.cuda."):
            torch.set_default_device("cpu")
            plain(kind)
            return
        plain(name.replace("torch.cuda.", "torch."))
        torch.set_default_device("cuda")
