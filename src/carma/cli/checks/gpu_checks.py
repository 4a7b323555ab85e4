"""Checks of the GPUs: driver, metrics and modes of each card."""

from __future__ import annotations

from collections.abc import Iterable

from carma.cli.checks.doctor_facts import DoctorFacts, Finding
from carma.core.model.settings import PlacementRules
from carma.core.model.units import show_count
from carma.core.telemetry.window import METRICS
from carma.monitor.card_modes import CardFacts
from carma.plugins import load_policy

_SOURCES = {
    "gpm": "SM activity, occupancy, DRAM and tensor activity from NVML's GPM",
    "dcgm": "SM activity, occupancy and DRAM activity from DCGM",
    "inferred": "SM activity, occupancy and DRAM activity inferred from power and utilisation",
    "processes": "SM activity from the utilisation of processes; no occupancy, no DRAM activity",
    "nvml": "coarse utilisation only",
}
_HOPPER = "Hopper and newer provide them through NVML's GPM (driver 520 or newer), Ampere through a DCGM host engine"
_OTHER_MECHANISM = "set sharing.mechanism to 'auto', 'mps' or 'timeslice'"


def names_of(indices: Iterable[int]) -> str:
    return "GPU " + ", ".join(str(index) for index in indices)


def driver(facts: DoctorFacts) -> Finding | None:
    """Versions of the driver and of NVML, and cards that do not answer."""
    machine = facts.machine
    if machine is None:
        return None
    parts = [f"driver {machine.driver or 'of unknown version'}", f"NVML {machine.nvml}" if machine.nvml else ""]
    parts.append(f"CUDA up to {machine.cuda}" if machine.cuda else "")
    text = ", ".join(part for part in parts if part)
    faults = [f"GPU {card.index}: {card.fault}" for card in machine.cards if card.fault]
    if not faults:
        return Finding("driver", "ok", text)
    hint = "nvidia-smi and the kernel log (dmesg, Xid) have details"
    return Finding("driver", "bad", f"{text}; {'; '.join(faults)}", hint)


def gpus(facts: DoctorFacts) -> Finding:
    found = facts.found
    if found.error is not None and facts.virtual:
        return Finding(
            "gpus", "ok", f"{show_count(facts.virtual, 'virtual GPU')} of the daemon; NVML has no GPU on this machine"
        )
    if found.error is not None:
        return Finding("gpus", "warn", str(found.error), found.error.hint)
    text = ", ".join(f"{gpu.index}: {gpu.name} {gpu.memory_mib / 1024:.0f} GiB" for gpu in found.gpus)
    if found.problems:
        return Finding("gpus", "warn", f"{text}; {'; '.join(found.problems)}")
    return Finding("gpus", "ok", text)


def activity(facts: DoctorFacts) -> Finding | None:
    """The source of SM activity on each GPU, and the effect of missing metrics."""
    found = facts.found.gpus
    if not found:
        return _activity_of_virtual_gpus(facts)
    sources: dict[str, list[int]] = {}
    for gpu in found:
        sources.setdefault(gpu.capabilities.source, []).append(gpu.index)
    text = "; ".join(f"{names_of(indices)}: {_SOURCES.get(source, source)}" for source, indices in sources.items())
    inferred = [gpu.index for gpu in found if gpu.capabilities.source == "inferred"]
    measured = [gpu.index for gpu in found if set(METRICS) <= set(gpu.capabilities.metrics)]
    missing = [gpu.index for gpu in found if gpu.index not in (*inferred, *measured)]
    if not inferred and not missing:
        return Finding("activity", "ok", text)
    gated = load_policy(facts.setting("placement.policy", PlacementRules().policy)).uses_gate
    gate = facts.setting("gate.enabled", True)
    if gated and not gate:
        return Finding("activity", "ok", f"{text}; gate.enabled = false: tasks share by memory alone")
    found_effects = [_effect_of_missing(names_of(missing), gate)] if missing else []
    if inferred:
        found_effects.insert(0, (_effect_on_gate if gated else _effect_on_prediction)(names_of(inferred)))
    effects, limitations = zip(*found_effects, strict=True)
    remedy = _remedy(facts, gate and (gated or bool(missing)))
    return Finding("activity", "warn", "; ".join((text, *effects)), remedy, "; ".join(limitations))


def _activity_of_virtual_gpus(facts: DoctorFacts) -> Finding | None:
    if not facts.virtual or facts.setting("monitor.sm_activity", "auto") != "inferred":
        return None
    gated = load_policy(facts.setting("placement.policy", PlacementRules().policy)).uses_gate
    effect, limitation = (_effect_on_gate if gated else _effect_on_prediction)("the virtual GPUs")
    return Finding("activity", "warn", f"{_SOURCES['inferred']}; {effect}", _remedy(facts, gated), limitation)


def _effect_of_missing(names: str, gate: bool) -> tuple[str, str]:
    """The consequence of missing activity, and the limitation in one line."""
    what = f"no complete SM and memory activity on {names}"
    if gate:
        return (
            f"{names}: the gate refuses GPUs with missing metrics, so each takes one task at a time",
            f"{what}: each takes one task at a time",
        )
    return (
        f"{names}: the policy learns nothing of the tasks there, and decides by what is known beforehand",
        f"{what}: the policy learns nothing of the tasks there",
    )


def _effect_on_prediction(names: str) -> tuple[str, str]:
    """The consequence of inferred activity under a policy that predicts slowdowns."""
    return (
        f"{names}: the policy learns the demands of tasks from that, with its error",
        f"SM activity of {names} is inferred from power and utilisation: slowdowns are predicted less well",
    )


def _effect_on_gate(names: str) -> tuple[str, str]:
    """The consequence of inferred activity for the gate."""
    return (
        f"{names}: the gate adds the error of the inference, so fewer tasks share than with measured activity",
        f"SM activity of {names} is inferred from power and utilisation, with a margin: fewer tasks share",
    )


def _remedy(facts: DoctorFacts, gated: bool) -> str:
    if facts.setting("monitor.sm_activity", "auto") == "inferred":
        return "monitor.sm_activity = 'auto' uses GPM or DCGM where a GPU has them"
    forbidden = [card.index for card in facts.cards if card.gpm == "forbidden"]
    off = "; or share by memory alone: gate.enabled = false" if gated else ""
    if forbidden:
        return (
            f"{names_of(forbidden)} has GPM, but this user may not read it: run the daemon as root, or let an "
            f"administrator set the driver option NVreg_RestrictProfilingToAdminUsers=0{off}"
        )
    dcgm = f" (here: {facts.found.dcgm_problem})" if facts.found.dcgm_problem else ""
    return f"{_HOPPER}{dcgm}{off}"


def mig(facts: DoctorFacts) -> Finding | None:
    capable = [card for card in facts.cards if card.mig is not None]
    empty = [card.index for card in capable if card.mig and not card.instances]
    text = "; ".join(_mig_text(card) for card in capable if card.mig or card.mig_pending) or "off"
    only = facts.setting("sharing.mechanism", "auto") == "mig"
    if only and (facts.virtual or not any(card.instances for card in capable)):
        return _no_instance(facts, f"MIG is {text}" if text == "off" else text, bool(capable), empty)
    if not capable:
        return None
    if empty:
        return Finding("mig", "warn", f"{text}; {names_of(empty)} takes no task", _mig_hint(empty[0]))
    return Finding("mig", "ok", text)


def _no_instance(facts: DoctorFacts, text: str, capable: bool, empty: list[int]) -> Finding:
    """Failure if only MIG instances may take tasks and there is none."""
    hint = _OTHER_MECHANISM
    if facts.virtual:
        text = "the daemon's GPUs are virtual"
    elif not capable:
        text = "no GPU of this machine supports MIG"
    else:
        hint = f"{_mig_hint(empty[0] if empty else None)}; or {hint}"
    return Finding("mig", "bad", f"{text}: sharing.mechanism = 'mig', so no GPU takes a task", hint)


def _mig_text(card: CardFacts) -> str:
    text = f"GPU {card.index}: " + (f"on, {show_count(card.instances, 'instance')}" if card.mig else "off")
    return text if card.mig == card.mig_pending else f"{text}, {'off' if card.mig else 'on'} after the next reset"


def _mig_hint(index: int | None) -> str:
    if index is None:
        return "an administrator enables MIG (nvidia-smi -i N -mig 1) and creates instances (nvidia-smi mig -cgi … -C)"
    return (
        f"an administrator creates instances (nvidia-smi mig -i {index} -cgi … -C; nvidia-smi mig -lgip lists them) or "
        f"disables MIG (nvidia-smi -i {index} -mig 0); CARMA never does"
    )


def modes(facts: DoctorFacts) -> Finding | None:
    """Compute modes, which may forbid tasks or sharing."""
    cards = [card for card in facts.cards if card.compute_mode is not None]
    if not cards:
        return None
    prohibited = [card.index for card in cards if card.compute_mode == "prohibited"]
    exclusive = [card.index for card in cards if card.compute_mode in ("exclusive_process", "exclusive_thread")]
    if not prohibited and not exclusive:
        return Finding("compute mode", "ok", "DEFAULT: processes may share")
    hint = f"an administrator: nvidia-smi -i {(prohibited or exclusive)[0]} -c DEFAULT"
    if prohibited:
        return Finding("compute mode", "bad", f"{names_of(prohibited)}: PROHIBITED, so no task can use it", hint)
    text = (
        f"{names_of(exclusive)}: EXCLUSIVE_PROCESS, one process at a time. Under MPS this is the MPS server, so "
        "tasks of one user can share; in time slices, or with two users, the second task fails"
    )
    return Finding("compute mode", "warn", text, hint)


def persistence(facts: DoctorFacts) -> Finding | None:
    """Never a warning: it only delays the first start."""
    cards = [card for card in facts.cards if card.persistence is not None]
    off = [card.index for card in cards if not card.persistence]
    if not off:
        return Finding("persistence", "ok", "on") if cards else None
    text = f"off on {names_of(off)}: the driver unloads an unused card, so the next start on it takes longer"
    return Finding("persistence", "ok", text, "an administrator starts nvidia-persistenced, or nvidia-smi -pm 1")
