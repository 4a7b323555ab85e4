"""Uses a GPU behind CARMA's back: `python -m carma.vgpu.foreign_process --gpu UUID --memory-mib N --seconds S`."""

from __future__ import annotations

import argparse
import sys
import time

from carma.core.model.values import Demand
from carma.errors import CarmaError, NotFound
from carma.vgpu.cuda_errors import device_lost, out_of_memory
from carma.vgpu.device import Device, OutOfDeviceMemory, allocate, device_from_environment, join, leave

_POLL_S = 0.25


def main(arguments: list[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    try:
        device = Device(options.dir) if options.dir else device_from_environment()
        return hold(device, options.gpu, options.memory_mib, options.seconds, Demand(options.sm, 0.0, options.dram))
    except CarmaError as error:
        print(f"carma.vgpu.foreign_process: {error}. {error.hint}".rstrip(), file=sys.stderr)
        return error.exit_code
    except OutOfDeviceMemory as error:
        print(out_of_memory(error, 0), file=sys.stderr)
        return 1


def hold(device: Device, name: str, memory_mib: int, seconds: float, demand: Demand) -> int:
    """Take the memory and keep the GPU busy for so many virtual seconds."""
    with device.changing() as world:
        gpu = world.gpu(name)
        if gpu is None:
            raise NotFound(f"there is no virtual GPU {name}", "Give a UUID or an index of this world.")
        me = join(world, [gpu.index], demand, None, "foreign")
        allocate(world, me, memory_mib)
        until_s = world.at_s + seconds
    print(f"holding {memory_mib} MiB of {gpu.id}", flush=True)
    while True:
        world = device.look()
        if world.at_s >= until_s:
            break
        if world.gpus[gpu.index].lost:
            print(device_lost(), file=sys.stderr)
            return 1
        time.sleep(max(0.002, min(_POLL_S, (until_s - world.at_s) / world.speed)))
    with device.changing() as world:
        leave(world, me)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m carma.vgpu.foreign_process", description=__doc__)
    add = parser.add_argument
    add("--gpu", required=True, help="UUID or index")
    add("--memory-mib", type=int, required=True)
    add("--seconds", type=float, required=True, help="virtual seconds")
    add("--sm", type=float, default=0.0, help="SM activity, 0 to 1")
    add("--dram", type=float, default=0.0, help="DRAM activity, 0 to 1")
    add("--dir", help="the world's directory (default: CARMA_VGPU_DIR)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
