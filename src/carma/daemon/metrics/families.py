"""Every metric of the Prometheus endpoint: its name, kind, labels and help text. The table in docs/metrics.md is made
from this one.

Labels hold the index of a GPU, the id of a task and the name of a user. They never hold names of tasks, commands or
paths, for two reasons: everyone who can read the endpoint would see them, and users could create any number of series.
"""

from __future__ import annotations

from typing import Literal, NamedTuple


class Family(NamedTuple):
    name: str
    kind: Literal["gauge", "counter", "histogram"]
    labels: tuple[str, ...]
    text: str
    buckets: tuple[float, ...] = ()
    values: tuple[str, ...] = ()  # known values of its label: their series begin at 0


TASK, ON_GPU = ("task", "user"), ("task", "user", "gpu")
_SECONDS = (1.0, 5.0, 15.0, 60.0, 300.0, 900.0, 3600.0, 4 * 3600.0, 24 * 3600.0)

# Read from the state at each scrape.
CURRENT = (
    Family("carma_build_info", "gauge", ("version", "policy"), "Version of CARMA and its placement policy; always 1."),
    Family("carma_gpu_info", "gauge", ("gpu", "uuid", "model"), "UUID and model of a GPU; always 1."),
    Family("carma_gpu_up", "gauge", ("gpu",), "1 if the GPU works; 0 after a fault or without a sample."),
    Family("carma_gpu_drained", "gauge", ("gpu",), "1 if the GPU or the server is drained, else 0."),
    Family("carma_gpu_sm_active_ratio", "gauge", ("gpu",), "SM activity, mean of the window of samples."),
    Family("carma_gpu_sm_occupancy_ratio", "gauge", ("gpu",), "SM occupancy, mean of the window of samples."),
    Family("carma_gpu_dram_active_ratio", "gauge", ("gpu",), "DRAM activity, mean of the window of samples."),
    Family("carma_gpu_memory_used_bytes", "gauge", ("gpu",), "Memory in use, by tasks and by other processes."),
    Family("carma_gpu_memory_booked_bytes", "gauge", ("gpu",), "Memory that tasks have booked."),
    Family("carma_gpu_memory_total_bytes", "gauge", ("gpu",), "Memory that tasks can use."),
    Family("carma_gpu_power_watts", "gauge", ("gpu",), "Power draw, newest sample."),
    Family("carma_gpu_energy_joules_total", "counter", ("gpu",), "Energy counter of the driver."),
    Family("carma_tasks", "gauge", ("state",), "Tasks that have not finished, by state."),
    Family("carma_waiting_tasks", "gauge", ("reason",), "Waiting tasks, by the short reason of `carma queue`."),
    Family("carma_task_info", "gauge", ON_GPU, "GPUs of a running task; always 1."),
    Family("carma_task_memory_bytes", "gauge", ON_GPU, "Memory of a running task on a GPU, newest sample."),
    Family("carma_task_booked_bytes", "gauge", ON_GPU, "Memory that a running task has booked on a GPU."),
    Family("carma_task_sm_ratio", "gauge", ON_GPU, "Share of the GPU's SM activity that is attributed to the task."),
    Family("carma_task_energy_joules_total", "counter", TASK, "Energy above idle attributed to the running attempt."),
    Family("carma_task_steps_total", "counter", TASK, "Optimizer steps of the running attempt."),
)
# Counted from events since the start of the daemon.
COUNTED = (
    Family(
        *("carma_ooms_total", "counter", ("blame",), "Attempts that ran out of memory; host: of host memory."),
        values=("own", "neighbour", "unknown", "host"),
    ),
    Family(
        *("carma_recoveries_total", "counter", ("rung",), "Planned retries, by step of the recovery."),
        values=("again", "larger", "alone", "first"),
    ),
    Family("carma_tasks_finished_total", "counter", ("outcome",), "Finished tasks, by outcome."),
    Family("carma_task_wait_seconds", "histogram", (), "Time from submission to the first start of a task.", _SECONDS),
    Family(
        *("carma_decision_seconds", "histogram", (), "Computing time of a scheduling pass while tasks wait."),
        (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5, 1.0),
    ),
    Family(
        *("carma_task_slowdown_ratio", "histogram", ("source",), "Time taken / time alone of an ended attempt."),
        (1.0, 1.05, 1.1, 1.25, 1.5, 1.8, 2.5, 4.0),
    ),
    Family(
        *("carma_estimate_error_ratio", "histogram", ("source",)),
        "|estimated - observed| / observed memory of a task that succeeded, by estimator.",
        (0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 1.0, 2.0),
    ),
)
FAMILIES = {family.name: family for family in (*CURRENT, *COUNTED)}
