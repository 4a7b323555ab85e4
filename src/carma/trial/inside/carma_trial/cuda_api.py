"""`torch.cuda` as it answers on the target GPU. Whatever launches, waits or measures does nothing; memory figures are
plausible, never exact: a script that steers by them is traced as if the card were nearly empty."""

import contextlib
import types

from . import build, gpu_processes, report

GIB = 1 << 30


def install(torch, gpu):
    cuda = torch.cuda
    count = int(gpu.get("count", 1))
    capability = tuple(gpu.get("capability", (9, 0)))
    total = int(gpu.get("memory_bytes", 80 * GIB))
    properties = types.SimpleNamespace(
        name=gpu.get("name", "NVIDIA H200"),
        major=capability[0],
        minor=capability[1],
        total_memory=total,
        multi_processor_count=int(gpu.get("multiprocessors", 132)),
        is_integrated=0,
        is_multi_gpu_board=0,
        max_threads_per_multi_processor=2048,
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
    _patch_c(torch, count)
    _patch_device(torch, cuda, count, capability, properties)
    _patch_streams(torch, cuda)
    _patch_memory(cuda, total)
    _patch_random(torch, cuda, count)
    _patch_backends(torch)
    _patch_graphs(cuda)
    _patch_default_type(torch)


def _say(value):
    return lambda *_args, **_words: value


def _index(device):
    """0 for "cuda:0", torch.device("cuda", 0), 0 or None."""
    if device is None:
        return build.library.carma_device()
    if isinstance(device, int):
        return device if device >= 0 else build.library.carma_device()
    index = device.index if hasattr(device, "index") and not isinstance(device, str) else _of_text(device)
    return build.library.carma_device() if index is None else index


def _of_text(text):
    _, _, index = str(text).partition(":")
    return int(index) if index else None


def _patch_c(torch, count):
    """What a CPU build's extension module lacks and Python code of torch and others asks for."""
    absent = {
        "_cuda_getCurrentRawStream": _say(0),
        "_cuda_getCurrentStream": lambda device: (build.library.carma_stream(device), device, 1),
        "_cuda_getDefaultStream": lambda device: (0, device, 1),
        "_cuda_isCurrentStreamCapturing": _say(False),
        "_cuda_getDevice": lambda: build.library.carma_device(),
        "_cuda_setDevice": lambda device: _set_device(device),
        "_cuda_exchangeDevice": lambda device: _exchange(device),
        "_cuda_maybeExchangeDevice": lambda device: _exchange(device),
        "_cuda_init": _say(None),
        "_cuda_synchronize": _say(None),
        "_cuda_emptyCache": lambda: build.library.carma_note(report.EMPTY_CACHE, 0, 0, 0),
        "_cuda_ipc_collect": _say(None),
        "_cuda_cudaHostAllocator": _say(0),
        "_cuda_getCompiledVersion": _say(13000),
        "_cuda_canDeviceAccessPeer": _say(True),
        "_cuda_setMemoryFraction": _say(None),
        "_cuda_resetPeakMemoryStats": _say(None),
        "_cuda_resetAccumulatedMemoryStats": _say(None),
        "_cuda_record_memory_history": _say(None),
        "_cuda_hostMemoryStats": _say({}),
        "_cuda_lock_mutex": _say(None),
        "_cuda_unlock_mutex": _say(None),
    }
    for name, function in absent.items():
        setattr(torch._C, name, function)
    torch._C._cuda_getDeviceCount = _say(count)
    torch._C._has_cudnn = True


def _exchange(device):
    before = build.library.carma_device()
    if device >= 0:
        _set_device(device)
    return before


def _set_device(device):
    gpu_processes.want_cards(device + 1)
    reason = gpu_processes.too_many_cards()
    if reason:
        report.refuse("unsupported", reason)
    build.library.carma_set_device(device)


def _patch_device(torch, cuda, count, capability, properties):
    cuda._initialized = True
    cuda._lazy_init = _say(None)
    cuda.init = _say(None)
    cuda.is_available = _say(True)
    cuda.is_initialized = _say(True)
    cuda._is_compiled = _say(True)
    cuda._exchange_device = lambda device: _exchange(device)
    cuda._maybe_exchange_device = lambda device: _exchange(device)
    cuda._lazy_call = lambda function, **_words: function()
    cuda.device_count = _say(count)
    cuda._device_count_nvml = _say(count)
    cuda.current_device = lambda: build.library.carma_device()
    cuda.set_device = lambda device: _set_device(_index(device))
    cuda.get_device_capability = _say(capability)
    cuda.get_device_name = _say(properties.name)
    cuda.get_device_properties = _say(properties)
    cuda._get_device_properties = _say(properties)
    cuda.can_device_access_peer = _say(True)
    cuda.get_arch_list = lambda: [f"sm_{capability[0]}{capability[1]}"]
    cuda.get_gencode_flags = _say("")
    cuda.synchronize = _say(None)
    cuda.is_bf16_supported = _say(capability >= (8, 0))
    cuda.is_tf32_supported = _say(capability >= (8, 0))
    for name in ("utilization", "power_draw", "temperature", "clock_rate", "memory_usage"):
        setattr(cuda, name, _say(0))
    cuda.is_current_stream_capturing = _say(False)
    for name in ("range_push", "range_pop", "mark", "range_start", "range_end"):
        setattr(cuda.nvtx, name, _say(0))
    cuda.nvtx.range = lambda *_args, **_words: contextlib.nullcontext()
    if not torch.version.cuda:
        torch.version.cuda = "13.0"
    torch.backends.cuda.is_built = _say(True)
    accelerator = getattr(torch, "accelerator", None)
    if accelerator is not None:
        device = torch.device("cuda")
        accelerator.is_available = _say(True)
        accelerator.device_count = _say(count)
        accelerator.current_accelerator = _say(device)
        for name in ("current_device_index", "current_device_idx"):
            setattr(accelerator, name, lambda: build.library.carma_device())
        for name in ("set_device_index", "set_device_idx"):
            setattr(accelerator, name, lambda device, /: build.library.carma_set_device(_index(device)))
        accelerator.synchronize = _say(None)
        for name in ("empty_cache", "memory_allocated", "memory_reserved", "max_memory_allocated"):
            if hasattr(accelerator, name):
                setattr(accelerator, name, lambda *_a, _name=name, **_w: getattr(cuda, _name)())


def _patch_streams(torch, cuda):
    lib = build.library
    made = [0]

    class Stream(torch.Stream):
        def __new__(cls, device=None, priority=0, stream_id=None, **_words):
            if stream_id is None:
                made[0] += 1
                stream_id = made[0]
            return super().__new__(cls, stream_id=stream_id, device_index=_index(device), device_type=1)

        def __init__(self, *_args, **_words):
            pass

        cuda_stream = property(lambda self: self.stream_id)
        priority = 0
        query = _say(True)
        synchronize = wait_event = wait_stream = _say(None)

        def record_event(self, event=None):
            return event if event is not None else Event()

    class Event:
        def __init__(self, *_args, **_words):
            pass

        query = _say(True)
        record = wait = synchronize = _say(None)
        elapsed_time = _say(1.0)
        ipc_handle = _say(b"")

    class StreamContext:
        def __init__(self, stream):
            self.stream = stream

        def __enter__(self):
            if self.stream is not None:
                self.before = lib.carma_stream(self.stream.device_index)
                lib.carma_set_stream(self.stream.device_index, self.stream.stream_id)

        def __exit__(self, *_error):
            if self.stream is not None:
                lib.carma_set_stream(self.stream.device_index, self.before)

    cuda.Stream, cuda.Event, cuda.ExternalStream = Stream, Event, Stream
    cuda.streams.Stream, cuda.streams.Event = Stream, Event
    cuda.StreamContext = StreamContext
    cuda.stream = lambda stream: StreamContext(stream)
    cuda.current_stream = lambda device=None: Stream(device, stream_id=lib.carma_stream(_index(device)))
    cuda.default_stream = lambda device=None: Stream(device, stream_id=0)
    cuda.set_stream = lambda stream: lib.carma_set_stream(stream.device_index, stream.stream_id)


class _Stats(dict):
    def __missing__(self, key):
        return 0


def _patch_memory(cuda, total):
    cuda.mem_get_info = _say((int(total * 0.98), total))
    cuda.memory_stats = lambda *_a, **_w: _Stats()
    cuda.memory_stats_as_nested_dict = lambda *_a, **_w: _Stats()
    cuda.memory_summary = _say("")
    cuda.memory_snapshot = _say([])
    cuda.empty_cache = lambda: build.library.carma_note(report.EMPTY_CACHE, 0, 0, 0)
    for name in ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved",
                 "memory_cached", "max_memory_cached"):  # fmt: skip
        setattr(cuda, name, _say(GIB))
        setattr(cuda.memory, name, getattr(cuda, name))
    for name in ("reset_peak_memory_stats", "reset_accumulated_memory_stats", "reset_max_memory_allocated",
                 "reset_max_memory_cached", "set_per_process_memory_fraction", "ipc_collect"):  # fmt: skip
        setattr(cuda, name, _say(None))
    cuda.memory.empty_cache, cuda.memory.mem_get_info = cuda.empty_cache, cuda.mem_get_info
    cuda.memory._record_memory_history = _say(None)
    cuda.memory._dump_snapshot = _say(None)
    cuda.memory._snapshot = _say({"segments": [], "device_traces": []})


def _patch_random(torch, cuda, count):
    state = torch.get_rng_state()[:16].clone()
    for name in ("manual_seed", "manual_seed_all", "seed", "seed_all", "set_rng_state", "set_rng_state_all"):
        setattr(cuda, name, _say(None))
    cuda.initial_seed = _say(0)
    cuda.get_rng_state = lambda *_a, **_w: state.clone()
    cuda.get_rng_state_all = lambda: [state.clone() for _ in range(count)]
    for name in ("manual_seed", "manual_seed_all", "get_rng_state", "set_rng_state", "get_rng_state_all",
                 "set_rng_state_all", "initial_seed", "seed", "seed_all"):  # fmt: skip
        setattr(cuda.random, name, getattr(cuda, name))
    cuda.default_generators = tuple(torch.Generator() for _ in range(count))


def _patch_backends(torch):
    cudnn = torch.backends.cudnn
    cudnn.is_available = _say(True)
    cudnn.version = _say(91900)
    cudnn.is_acceptable = lambda tensor: bool(tensor.is_cuda and cudnn.enabled)
    torch.backends.cuda.preferred_linalg_library = _say(None)
    torch.backends.cuda.cufft_plan_cache = types.SimpleNamespace(max_size=4096, size=0, clear=_say(None))


def _patch_graphs(cuda):
    class Refused:
        def __init__(self, *_args, **_words):
            report.refuse("unsupported", "the script captures CUDA graphs, whose pools of memory no trial sees")

    for name in ("CUDAGraph", "graph", "make_graphed_callables"):  # classes: they stand in annotations, too
        setattr(cuda, name, type(name, (Refused,), {}))


def _patch_default_type(torch):
    """The old way to say that everything be made on the card."""
    plain = torch.set_default_tensor_type

    def set_default_tensor_type(kind):
        name = kind if isinstance(kind, str) else f"{kind.__module__}.{kind.__name__}"
        if not name.startswith("torch.cuda."):
            torch.set_default_device("cpu")
            plain(kind)
            return
        plain(name.replace("torch.cuda.", "torch."))
        torch.set_default_device("cuda")

    torch.set_default_tensor_type = set_default_tensor_type
