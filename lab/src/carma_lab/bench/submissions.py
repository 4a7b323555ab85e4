"""How fast the daemon takes tasks: latency through the socket, each submission durable before it is answered.

All GPUs are taken by exclusive tasks, so that each submission also goes through a decision and joins the queue; what is
measured is the daemon and not the start of processes. Each client is a process of its own
(`python -m carma_lab.bench.submissions SOCKET DIRECTORY COUNT` prints its latencies).
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import msgspec

from carma.client import Client
from carma.core.model.values import TaskSpec
from carma.testing.private_daemon import PrivateDaemon, PrivateSettings, wait_until
from carma.wire.api_types import ArrayAsk, SubmitRequest
from carma_lab.bench.machine import task_spec, time_ms
from carma_lab.bench.results_file import Figure, percentiles

QUEUED = 10_000
GPUS = 4
MEMORY_MIB = 4096


def measure(count: int) -> Iterator[Figure]:
    """One client, eight clients, and one client with 10,000 tasks in the queue."""
    with PrivateDaemon(PrivateSettings(gpus=GPUS)) as daemon:
        fill_gpus(daemon)
        yield from _figures("one_client", daemon, clients=1, count=count)
        yield from _figures("eight_clients", daemon, clients=8, count=count)
        how = "one request for an array of 10,000 tasks, until it is answered"
        many = SubmitRequest(spec=_spec(str(daemon.work)), array=ArrayAsk(indices=tuple(range(QUEUED))))
        took_s = time_ms(lambda: daemon.client.submit(many)) / 1000
        yield Figure(name="submit.array_of_10000", value=took_s, unit="s", how=how)
        wait_until(
            lambda: not daemon.client.tasks(state="estimating", limit=1), 120.0, "the array was not estimated in time"
        )
        yield from _figures("with_10000_queued", daemon, clients=1, count=count)


def _figures(name: str, daemon: PrivateDaemon, *, clients: int, count: int) -> Iterator[Figure]:
    latencies_ms = run_clients(daemon, clients, count)
    total_s = sum(latencies_ms) / 1000 / clients
    how = f"{clients} client process(es), {count} submissions each, all GPUs taken"
    yield Figure(name=f"submit.{name}.rate", value=len(latencies_ms) / total_s, unit="1/s", how=how)
    yield from percentiles(f"submit.{name}", latencies_ms, how)


def run_clients(daemon: PrivateDaemon, clients: int, count: int) -> list[float]:
    """Latencies of all clients together, in milliseconds."""
    command = [sys.executable, "-m", "carma_lab.bench.submissions", str(daemon.socket), str(daemon.work), str(count)]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE) for _ in range(clients)]
    outputs = [process.communicate()[0] for process in processes]
    return [latency for output in outputs for latency in msgspec.json.decode(output, type=list[float])]


def fill_gpus(daemon: PrivateDaemon) -> None:
    """Starts an exclusive task on each GPU, which does not end."""
    spec = task_spec(daemon, "sleep", "100000", exclusive=True, gpu_memory_mib=MEMORY_MIB)
    for _ in range(GPUS):
        daemon.client.submit(SubmitRequest(spec=spec))
    wait_until(
        lambda: len(daemon.client.tasks(state="running")) == GPUS, 60.0, "the tasks that fill the GPUs did not start"
    )


def _spec(directory: str) -> TaskSpec:
    return TaskSpec(command=("true",), directory=directory, gpu_memory_mib=MEMORY_MIB)


def _client(socket: str, directory: str, count: int) -> list[float]:
    """Latencies of `count` submissions in milliseconds; a first one that opens the connection does not count."""
    request = SubmitRequest(spec=_spec(directory))
    with Client(socket) as client:
        client.server()
        return [time_ms(lambda: client.submit(request)) for _ in range(count)]


if __name__ == "__main__":
    print(msgspec.json.encode(_client(sys.argv[1], sys.argv[2], int(sys.argv[3]))).decode())
