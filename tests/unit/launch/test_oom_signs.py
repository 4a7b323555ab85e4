"""Output of frameworks that ran out of memory, and output that only looks like it."""

from __future__ import annotations

import signal

import pytest

from carma.core.model.outcome import Failed, OutOfMemory, Succeeded
from carma.launch.exit_outcome import ExitRecord, LastWords, judge_exit
from carma.launch.failure_signs import OUTPUT_LIMIT, find_oom, last_exception

FRAMES = 'Traceback (most recent call last):\n  File "/home/me/train.py", line 12, in <module>\n    loss.backward()\n'
TORCH = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 39.39 GiB of"
    " which 1.01 GiB is free. Process 4711 has 5.00 GiB memory in use. Including non-PyTorch memory, this process has"
    " 33.37 GiB memory in use. Of the allocated memory 32.89 GiB is allocated by PyTorch, and 12.50 MiB is reserved by"
    " PyTorch but unallocated. If reserved but unallocated memory is large try setting"
    " PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid fragmentation.\n"
)
TORCH_OLD = (
    "RuntimeError: CUDA out of memory. Tried to allocate 20.00 MiB (GPU 0; 39.59 GiB total capacity; 37.52 GiB already"
    " allocated; 12.19 MiB free; 37.60 GiB reserved in total by PyTorch)\n"
)
XLA = (
    "jaxlib.xla_extension.XlaRuntimeError: RESOURCE_EXHAUSTED: Out of memory while trying to allocate 8589934592"
    " bytes.\n"
)
TF = (
    "tensorflow.python.framework.errors_impl.ResourceExhaustedError: {{function_node __wrapped__Mul}} OOM when"
    " allocating tensor with shape[32768,32768] and type float on /job:localhost/replica:0/task:0/device:GPU:0 by"
    " allocator GPU_0_bfc [Op:Mul]\n"
)
TF_GRAPH = (
    "tensorflow.python.framework.errors_impl.ResourceExhaustedError: Graph execution error:\n\n"
    "Detected at node 'model/dense/MatMul' defined at (most recent call last):\n"
    + '    File "/home/me/train.py", line 3, in <module>\n'
    * 60
    + "Node: 'model/dense/MatMul'\n"
    "OOM when allocating tensor with shape[1024,1024,256] and type half on /job:localhost/replica:0/task:0/device:GPU:0"
    " by allocator GPU_0_bfc\n\t [[{{node model/dense/MatMul}}]]\nHint: If you want to see a list of allocated tensors"
    " when OOM happens, add report_tensor_allocations_upon_oom to RunOptions. [Op:__inference_train_function_1]\n"
)
CPU_TORCH = (
    "RuntimeError: [enforce fail at alloc_cpu.cpp:116] err == 0. DefaultCPUAllocator: can't allocate memory: you tried"
    " to allocate 4398046511104 bytes. Error code 12 (Cannot allocate memory)\n"
)
CHILD_FAILED = (
    FRAMES
    + "torch.distributed.elastic.multiprocessing.errors.ChildFailedError: \n"
    + "=" * 60
    + "\ntrain.py FAILED\n"
    + "-" * 60
    + "\nFailures:\n"
    + "[1]:\n  rank      : 1 (local_rank: 1)\n  exitcode  : 1 (pid: 77)\n" * 20
)

GPU = [  # name, text, asked MiB, peak MiB
    ("torch", FRAMES + TORCH, 2048, 34171),
    ("torch.cuda", FRAMES + TORCH.replace("torch.Out", "torch.cuda.Out"), 2048, 34171),
    ("torch 1", FRAMES + TORCH_OLD, 20, None),
    ("without its traceback", TORCH, 2048, 34171),
    ("of a rank", "".join(f"[rank0]: {line}\n" for line in (FRAMES + TORCH).splitlines()), 2048, 34171),
    ("with an impossible figure", FRAMES + TORCH.replace("33.37 GiB", "17179869184.00 GiB"), 2048, None),
    ("CUDA error", FRAMES + "RuntimeError: CUDA error: out of memory\nCUDA kernel errors might be\n", None, None),
    ("accelerator error", FRAMES + "torch.AcceleratorError: CUDA error: out of memory\n", None, None),
    (
        "cuBLAS",
        FRAMES + "RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`\n",
        None,
        None,
    ),
    ("cuDNN", FRAMES + "RuntimeError: cuDNN error: CUDNN_STATUS_ALLOC_FAILED\n", None, None),
    ("tensorflow", FRAMES + TF, 4096, None),
    ("tensorflow graph", FRAMES + TF_GRAPH, 512, None),
    ("jax", FRAMES + XLA, 8192, None),
    (
        "jax, older",
        FRAMES + XLA.replace("while trying to allocate 8589934592", "allocating 1048577"),
        2,
        None,
    ),
    (
        "jax, newer",
        FRAMES + "jax.errors.JaxRuntimeError: RESOURCE_EXHAUSTED: Out of memory while trying to allocate 4.00GiB.\n",
        4096,
        None,
    ),
    (
        "jax, with its footer",
        FRAMES + XLA + "-" * 20 + "\nFor simplicity, JAX has removed its internal frames from the traceback\n",
        8192,
        None,
    ),
    (
        "C++",
        "terminate called after throwing an instance of 'c10::OutOfMemoryError'\n  what():  CUDA out of memory. Tried"
        " to allocate 1.00 GiB.\n",
        1024,
        None,
    ),
    ("cuda sample", 'CUDA error at main.cu:12 code=2(cudaErrorMemoryAllocation) "cudaMalloc(&p, n)" \n', None, None),
    ("raw CUDA", "CUDA error: out of memory\n", None, None),
    ("raw driver", "main.cu:40: CUDA_ERROR_OUT_OF_MEMORY: out of memory\n", None, None),
    ("GPUassert", "GPUassert: out of memory main.cu 31\n", None, None),
    (
        "cupy",
        FRAMES + "cupy.cuda.memory.OutOfMemoryError: Out of memory allocating 2,097,152 bytes (allocated so far: 1)\n",
        2,
        None,
    ),
    (
        "NCCL",
        FRAMES + "torch.distributed.DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:1\nncclUnhandledCudaError:\n"
        "Last error:\nCuda failure 2 'out of memory'\n",
        None,
        None,
    ),
    ("torchrun's echo", FRAMES + TORCH + CHILD_FAILED, 2048, 34171),
    (
        "a launcher's echo",
        FRAMES + TORCH + FRAMES + "subprocess.CalledProcessError: Command 'x' returned non-zero exit status 1.\n",
        2048,
        34171,
    ),
    (
        "a spawned process's echo",
        FRAMES
        + TORCH
        + FRAMES
        + "torch.multiprocessing.spawn.ProcessExitedException: process 0 terminated with exit code 1\n",
        2048,
        34171,
    ),
    (
        "a direct cause",
        FRAMES
        + TORCH
        + "\nThe above exception was the direct cause of the following exception:\n\n"
        + FRAMES
        + "RuntimeError: the batch is too large\n",
        2048,
        34171,
    ),
    (
        "noise while the interpreter ends",
        FRAMES + TORCH + "Exception ignored in: <function D.__del__ at 0x7f>\n" + FRAMES + "AttributeError: gone\n",
        2048,
        34171,
    ),
    ("a progress bar before it", "step 1\rstep 2\r" + FRAMES + TORCH, 2048, 34171),
    ("colours", "\x1b[31m" + FRAMES.replace("\n", "\x1b[0m\n") + "\x1b[1m" + TORCH, 2048, 34171),
    ("a few lines after it", FRAMES + TORCH + "wandb: syncing\n" * 10, 2048, 34171),
]

HOST = [
    ("MemoryError", FRAMES + "MemoryError\n", None),
    (
        "numpy",
        FRAMES
        + "numpy._core._exceptions._ArrayMemoryError: Unable to allocate 29.8 GiB for an array with shape (1,)\n",
        30516,
    ),
    ("torch on the CPU", FRAMES + CPU_TORCH, 4194304),
    ("bad_alloc", "terminate called after throwing an instance of 'std::bad_alloc'\n  what():  std::bad_alloc\n", None),
    ("fork", FRAMES + "OSError: [Errno 12] Cannot allocate memory\n", None),
    (
        "tensorflow on the CPU",
        FRAMES + TF.replace("device:GPU:0 by allocator GPU_0_bfc", "device:CPU:0 by allocator cpu"),
        4096,
    ),
]

NEAR_MISSES = [
    ("nothing", ""),
    ("BLOOM", FRAMES + "OSError: bigscience/BLOOM-7b1 does not exist\n"),
    ("ZOOM", "ZOOM level out of range\n"),
    ("a path", FRAMES + "FileNotFoundError: [Errno 2] No such file or directory: '/data/OOM/CUDA out of memory'\n"),
    ("a warning", "UserWarning: you may run into CUDA out of memory (OOM) errors with this batch size\n"),
    (
        "advice in another error",
        FRAMES + "ValueError: batch 512 may give CUDA out of memory. Tried to allocate less?\n",
    ),
    ("only the word", "OOM\nout of memory\nCUDA out of memory\n"),
    ("caught, then another failure", FRAMES + TORCH + "retrying with batch 8\n" + FRAMES + "KeyError: 'loss'\n"),
    (
        "another failure while handling it",
        FRAMES
        + TORCH
        + "\nDuring handling of the above exception, another exception occurred:\n\n"
        + FRAMES
        + "TypeError: unsupported\n",
    ),
    ("caught, then a class without Error in its name", FRAMES + TORCH + FRAMES + "__main__.f.<locals>.Stop: enough\n"),
    ("caught, and a program that went on", FRAMES + TORCH + "step done\n" * (OUTPUT_LIMIT + 1)),
    ("interrupted later", FRAMES + TORCH + FRAMES + "KeyboardInterrupt\n"),
    (
        "tensorflow trying smaller",
        "2024: I tensorflow/x.cc:1] failed to allocate 2.0G: CUDA_ERROR_OUT_OF_MEMORY: out\n",
    ),
    ("a logger's warning", "WARNING: CUDA error: out of memory, falling back\n"),
    ("a source line in a traceback", FRAMES + '    raise RuntimeError("CUDA out of memory.")\nValueError: x\n'),
    ("gRPC", FRAMES + "grpc.RpcError: RESOURCE_EXHAUSTED: Received message larger than max (5 vs. 4)\n"),
    ("tensorflow's quota", FRAMES + "errors_impl.ResourceExhaustedError: /tmp/x; No space left on device\n"),
    ("an illegal access", FRAMES + "RuntimeError: CUDA error: an illegal memory access was encountered\n"),
    ("a user's own class", FRAMES + "myapp.OutOfMemoryError: the shopping list is full\n"),
    ("printed evidence", "the log said: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB\n"),
]


def ids(table: list[tuple[str, str, int | None, int | None]]) -> list[str]:
    return [row[0] for row in table]


@pytest.mark.parametrize(("_", "text", "asked", "peak"), GPU, ids=ids(GPU))
def test_gpu_memory_that_ran_out(_: str, text: str, asked: int | None, peak: int | None) -> None:
    outcome = judge_exit(ExitRecord(1.0, code=1), LastWords(text, ""))
    assert isinstance(outcome, OutOfMemory)
    assert (outcome.where, outcome.code, outcome.asked_mib, outcome.peak_mib) == ("gpu", 1, asked, peak)
    assert outcome.message


@pytest.mark.parametrize(("_", "text", "asked"), HOST, ids=[row[0] for row in HOST])
def test_host_memory_that_ran_out(_: str, text: str, asked: int | None) -> None:
    outcome = judge_exit(ExitRecord(1.0, code=1), LastWords(text, ""))
    assert isinstance(outcome, OutOfMemory)
    assert (outcome.where, outcome.asked_mib) == ("host", asked)


@pytest.mark.parametrize(("_", "text"), NEAR_MISSES, ids=[row[0] for row in NEAR_MISSES])
def test_what_only_looks_like_it(_: str, text: str) -> None:
    assert find_oom(text) is None
    assert isinstance(judge_exit(ExitRecord(1.0, code=1), LastWords(text, text)), Failed)


def test_a_program_that_succeeded_had_no_oom() -> None:
    assert judge_exit(ExitRecord(1.0, code=0), LastWords(FRAMES + TORCH, "")) == Succeeded()


def test_a_killed_program_did_not_end_by_an_error_that_it_caught() -> None:
    for record in (ExitRecord(1.0, signal=signal.SIGTERM), ExitRecord(1.0, code=143), ExitRecord(1.0, signal=9)):
        assert isinstance(judge_exit(record, LastWords(FRAMES + TORCH, "")), Failed)


def test_an_abort_with_the_message_is_an_oom() -> None:
    text = "terminate called after throwing an instance of 'c10::OutOfMemoryError'\n  what():  CUDA out of memory.\n"
    assert isinstance(judge_exit(ExitRecord(1.0, signal=signal.SIGABRT), LastWords(text, "")), OutOfMemory)


def test_standard_output_counts_when_standard_error_says_nothing() -> None:
    record = ExitRecord(1.0, code=1)
    assert isinstance(judge_exit(record, LastWords("warming up\n", FRAMES + TORCH)), OutOfMemory)
    other = FRAMES + "ValueError: no\n"
    assert judge_exit(record, LastWords(other, FRAMES + TORCH)) == Failed(1, "ValueError: no")


def test_sigkill_is_a_host_oom_only_if_the_kernel_counted_one() -> None:
    words = LastWords("", "")
    for record in (ExitRecord(1.0, signal=9, oom_kills=1), ExitRecord(1.0, code=137, oom_kills=2)):
        outcome = judge_exit(record, words)
        assert isinstance(outcome, OutOfMemory)
        assert (outcome.where, outcome.code) == ("host", 137)
    for count in (0, None):
        outcome = judge_exit(ExitRecord(1.0, signal=9, oom_kills=count), words)
        assert outcome == Failed(137, "ended by SIGKILL")
    assert judge_exit(ExitRecord(1.0, code=1, oom_kills=1), words) == Failed(1)


def test_a_killed_loader_is_a_host_oom_only_if_the_kernel_counted_one() -> None:
    text = FRAMES + "RuntimeError: DataLoader worker (pid 4711) is killed by signal: Killed. \n"
    outcome = judge_exit(ExitRecord(1.0, code=1, oom_kills=1), LastWords(text, ""))
    assert isinstance(outcome, OutOfMemory)
    assert outcome.where == "host"
    assert isinstance(judge_exit(ExitRecord(1.0, code=1, oom_kills=0), LastWords(text, "")), Failed)


def test_what_did_not_start_says_why() -> None:
    record = ExitRecord(1.0, code=127, message="cannot start x: not found")
    assert judge_exit(record, LastWords("", "")) == Failed(127, "cannot start x: not found")


def test_an_ordinary_failure_carries_its_last_exception() -> None:
    text = FRAMES + "ValueError: shapes (3,) and (4,) differ\nsecond line\n"
    assert last_exception(text) == "ValueError: shapes (3,) and (4,) differ"
    assert judge_exit(ExitRecord(1.0, code=1), LastWords(text, "")) == Failed(1, last_exception(text))
    assert len(last_exception(FRAMES + "ValueError: " + "x" * 5000)) == 300


def test_any_text_is_read_without_an_exception() -> None:
    for text in ("\0\n\x1b[", "Traceback (most recent call last):", "\n" * 1000, ": :\n: ", "what():", "\udcff: x"):
        assert find_oom(text) is None


def test_the_message_of_a_failure_without_an_exception_is_its_last_line() -> None:
    usage = "usage: train.py [-h] --lr LR\ntrain.py: error: the following arguments are required: --lr\n\n"
    assert judge_exit(ExitRecord(1.0, code=2), LastWords(usage, "")) == Failed(
        2, "train.py: error: the following arguments are required: --lr"
    )
    noisy = "\x1b[31mbad\x07 " + "x" * 500
    outcome = judge_exit(ExitRecord(1.0, code=1), LastWords(noisy, ""))
    assert isinstance(outcome, Failed)
    assert len(outcome.message) == 200
    assert outcome.message.isprintable()
