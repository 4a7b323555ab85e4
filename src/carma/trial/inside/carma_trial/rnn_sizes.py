"""How many bytes cuDNN asks for to run a recurrent network: weights, the reserve kept for backward, the workspaces.

cuDNN publishes no formula. These were read off cudnnGetRNNTempSpaceSizes of cuDNN 9.19 on an H200 at 60 000 shapes:
weights and reserve are exact at all of them, workspaces at 98 in 100 and off by at most 128 bytes at the others.
Shapes are all that they depend on; the 8 MiB a layer and the persistent kernels may differ on other GPUs.
"""

from __future__ import annotations

import typing

RELU, TANH, LSTM, GRU = 0, 1, 2, 3
STANDARD, PERSIST_STATIC, PERSIST_SMALL = 0, 1, 3  # cudnnRNNAlgo_t

GATES = {RELU: 1, TANH: 1, LSTM: 4, GRU: 3}
# Of each step, in hidden sizes; an LSTM keeps its cells besides.
_KEPT = {RELU: 1, TANH: 1, LSTM: 4, GRU: 6}
_PERSISTENT_BACKWARD = {RELU: 9, TANH: 9, LSTM: 12, GRU: 14}
_PER_LAYER_BYTES = 8 << 20
_STEPS_AT_ONCE = 256
_STATIC_ROWS = 2432


class RnnRun(typing.NamedTuple):
    """One call. ``rows`` are all steps of all sequences; with packed ones fewer than ``steps * batch``."""

    mode: int
    item_bytes: int
    rows: int
    steps: int
    batch: int
    width: int
    hidden: int
    projected: int  # 0: the outputs are as wide as the hidden state
    layers: int
    directions: int
    packed: bool
    drops: bool

    @property
    def size(self) -> int:
        return self.projected or self.hidden

    @property
    def states(self) -> int:
        return 2 if self.mode == LSTM else 1

    def of_rows(self, width: int) -> int:
        return _aligned(self.item_bytes * self.rows * width)

    def of_states(self, width: int) -> int:
        """A state of every layer and direction, at one step."""
        return _aligned(self.item_bytes * self.batch * width * self.directions * self.layers)


def _aligned(count: int, to: int = 32) -> int:
    return -(-count // to) * to


def weight_items(run: RnnRun) -> int:
    """Numbers in the buffer that holds all weights; cuDNN always has both biases."""
    count = 0
    for layer in range(run.layers):
        width = run.width if layer == 0 else run.size * run.directions
        count += GATES[run.mode] * run.hidden * (width + run.size + 2) + run.projected * run.hidden
    return count * run.directions


def reserve_bytes(run: RnnRun) -> int:
    wide = run.item_bytes * run.rows * run.directions
    parts = [wide * run.layers * run.hidden * _KEPT[run.mode], wide * (run.layers - 1) * run.hidden]
    if run.mode == LSTM:
        parts.append(wide * run.layers * run.hidden)
    if run.projected:
        parts += [wide * run.layers * run.hidden, wide * run.layers * run.projected]
    mask = _aligned(-(-run.steps * run.batch * run.size * run.directions // 8)) if run.drops else 0
    return 256 + sum(map(_aligned, parts)) + mask * (run.layers - 1) * run.directions


def workspace_bytes(run: RnnRun, algorithm: int, training: bool) -> int:
    """The same in training for forward, its input's gradient and its weights': cuDNN asks for the most of them."""
    forward = _common_bytes(run) + _forward_bytes(run, algorithm)
    return max(forward, _common_bytes(run) + _backward_bytes(run, algorithm)) if training else forward


def _common_bytes(run: RnnRun) -> int:
    """Libraries' own room, the weights without their biases, and the projection's input."""
    biases = 2 * GATES[run.mode] * run.hidden * run.directions * run.layers
    parts = _PER_LAYER_BYTES * run.layers * run.directions + 256
    parts += _aligned((weight_items(run) - biases) * run.item_bytes)
    return parts + (run.of_rows(run.hidden * run.directions) if run.projected else 0)


def _padded_bytes(run: RnnRun, times: int) -> int:
    """Padded sequences are copied into packed ones: inputs, outputs and states, in backward their gradients too."""
    if run.packed:
        return 0
    copies = run.of_rows(run.width) + run.of_rows(run.size * run.directions) + 2 * run.of_states(run.size)
    copies += 2 * run.of_states(run.hidden) * (run.states - 1)
    return times * copies + 2 * _aligned(4 * run.batch, 16)


def _forward_bytes(run: RnnRun, algorithm: int) -> int:
    gates, persistent = GATES[run.mode], algorithm != STANDARD
    total = _padded_bytes(run, 1) + run.of_states(run.hidden * (1 if persistent else gates))
    if run.directions == 2:
        total += 2 * run.states * run.of_states(run.hidden) + 2 * run.of_rows(2 * run.hidden)
        return total + run.of_rows(2 * gates * run.hidden * (3 if persistent else 1))
    total += run.of_rows(run.hidden) if run.drops else 0
    if persistent:
        return total + (2 * run.states - 1) * run.of_states(run.hidden) + run.of_rows(5 * gates * run.hidden)
    chunk = min(run.rows, run.batch * _STEPS_AT_ONCE)
    total += run.of_states((2 * run.states - 2) * run.hidden)
    return total + _aligned(run.item_bytes * gates * run.hidden * chunk)


def _backward_bytes(run: RnnRun, algorithm: int) -> int:
    persistent = algorithm != STANDARD
    row, state = run.of_rows(run.hidden), run.of_states(run.hidden)
    widest = max(run.width, run.hidden)
    total = _padded_bytes(run, 2)
    if persistent:
        total += run.of_rows(_PERSISTENT_BACKWARD[run.mode] * run.hidden)
    if algorithm == PERSIST_STATIC:
        total += run.hidden * max(0, 2 * (_STATIC_ROWS + run.batch) - 8 * run.item_bytes * run.rows)
    if run.directions == 2:
        beside = run.of_rows(2 * run.hidden) * (1 if run.layers == 1 else 2)
        return total + 2 * run.of_rows(2 * widest) + beside + (2 * run.states + 1) * state
    total += run.of_rows(widest)
    if persistent:
        return total + (1 if run.layers == 1 else 2) * row + 2 * run.states * state
    total += (2 * run.states - 1) * state
    if run.layers == 1:
        return total + row
    return total + _aligned(run.item_bytes * run.hidden * min(run.rows, run.batch * _steps_in_flight(run)))


def _steps_in_flight(run: RnnRun) -> int:
    """Layers of a standard network run side by side, each some steps behind the one below."""
    block = next(steps for most, steps in ((1, 32), (8, 16), (16, 8), (96, 4), (run.batch, 2)) if run.batch <= most)
    if run.steps >= 128:
        block = max(block, 8)
    return block * run.layers + max(block, 8)


def algorithm(run: RnnRun, dtype: str, forward: bool, capability: tuple[int, int], processors: int) -> int:
    """Which algorithm runs in effect: what PyTorch asks for (RNN.cpp, get_algo), bfloat16 has the standard one only."""
    if run.projected or run.packed or dtype not in ("float32", "float16"):
        return STANDARD
    plain = run.mode in (RELU, TANH)
    if run.hidden <= ((384 if plain else 192) if forward else (256 if plain else 128)):
        return PERSIST_SMALL
    if dtype == "float16" and _suits_static(run) and _has_static(run, capability, processors):
        return PERSIST_STATIC
    return STANDARD


def _suits_static(run: RnnRun) -> bool:
    one = run.layers == 1 and run.directions == 1
    return one and run.hidden <= 1024 and run.hidden % 128 == 0 and run.width % 128 == 0


def _has_static(run: RnnRun, capability: tuple[int, int], processors: int) -> bool:
    major, minor = capability
    if major == 7:
        even = (run.batch % 16 == 0 and run.batch not in (80, 112)) or run.batch == 8
        long = any(run.steps >= steps and run.batch <= most for steps, most in ((40, 128), (20, 96), (10, 32)))
        return minor != 5 and even and long
    if major < 8 or minor == 6 or processors < 98 or run.mode == GRU:
        return False
    wide = run.mode != LSTM and run.batch >= 96 and run.hidden >= 896
    return run.batch % 8 == 0 and run.batch <= 128 and not wide
