"""Makes virtual GPUs fail on purpose: `python -m tests.virtual_faults --dir D lost --gpu 1`; `clear` repairs.

- lost: the GPU falls off the bus; its sample has a fault, and its tasks end with a CUDA error.
- metrics: activity, power and energy are missing (None).
- processes: the list of processes is missing (None).
"""

from __future__ import annotations

import argparse
import sys
from typing import get_args

from carma.errors import CarmaError, NotFound
from carma.vgpu.device import Device, device_from_environment
from carma.vgpu.device_state import FaultKind, VirtualGpu, VirtualWorld

KINDS: tuple[FaultKind, ...] = get_args(FaultKind)


def inject(device: Device, kind: FaultKind, gpu: str | int) -> None:
    """Idempotent. `gpu` is a UUID or an index."""
    with device.changing() as world:
        found = _find(world, gpu)
        if kind not in found.faults:
            found.faults = [*found.faults, kind]


def clear(device: Device, gpu: str | int | None = None, kind: FaultKind | None = None) -> None:
    """Repair one fault or all, of one GPU or all."""
    with device.changing() as world:
        for found in world.gpus if gpu is None else [_find(world, gpu)]:
            found.faults = [fault for fault in found.faults if kind is not None and fault != kind]


def _find(world: VirtualWorld, gpu: str | int) -> VirtualGpu:
    found = world.gpu(str(gpu))
    if found is None:
        raise NotFound(f"there is no virtual GPU {gpu}", f"There are {len(world.gpus)}, counted from 0.")
    return found


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.virtual_faults", description="Make virtual GPUs fail, or repair them."
    )
    parser.add_argument("what", choices=[*KINDS, "clear"])
    parser.add_argument("--gpu", help="UUID or index; clear without it repairs all")
    parser.add_argument("--dir", help="the world's directory (default: CARMA_VGPU_DIR)")
    options = parser.parse_args(arguments)
    if options.what != "clear" and options.gpu is None:
        parser.error("--gpu says which GPU is to fail")
    try:
        device = Device(options.dir) if options.dir else device_from_environment()
        if options.what == "clear":
            clear(device, options.gpu)
        else:
            inject(device, options.what, options.gpu)
    except CarmaError as error:
        print(f"tests.virtual_faults: {error}. {error.hint}".rstrip(), file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
