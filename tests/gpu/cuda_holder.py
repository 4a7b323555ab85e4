"""Allocates the given number of MiB on the first GPU and writes to them until it is killed. Needs only the CUDA driver.

Says "holding" when it has them, or why it cannot.
"""

from __future__ import annotations

import ctypes
import sys

MIB = 1 << 20


def check(name: str, code: int) -> None:
    if code != 0:
        sys.exit(f"{name} failed with {code}")


def hold(mib: int) -> None:
    cuda = ctypes.CDLL("libcuda.so.1")
    device, context, memory = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_uint64()
    check("cuInit", cuda.cuInit(0))
    check("cuDeviceGet", cuda.cuDeviceGet(ctypes.byref(device), 0))
    check("cuDevicePrimaryCtxRetain", cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device))
    check("cuCtxSetCurrent", cuda.cuCtxSetCurrent(context))
    check("cuMemAlloc", cuda.cuMemAlloc_v2(ctypes.byref(memory), ctypes.c_size_t(mib * MIB)))
    print("holding", flush=True)
    while True:
        check("cuMemsetD32", cuda.cuMemsetD32_v2(memory, ctypes.c_uint(1), ctypes.c_size_t(mib * MIB // 4)))
        check("cuCtxSynchronize", cuda.cuCtxSynchronize())


if __name__ == "__main__":
    try:
        hold(int(sys.argv[1]))
    except OSError as error:
        print(error, flush=True)
    except SystemExit as error:
        print(error.code, flush=True)
