"""The checks of the GPUs: driver, what each card tells, its modes. Modes are told and never changed."""

from __future__ import annotations

from collections.abc import Iterable

from carma.cli.checks.machine_facts import Finding, Look
from carma.core.model.values import Gpu
from carma.core.telemetry.window import METRICS
from carma.monitor.card_modes import CardFacts

_SOURCES = {
    "gpm": "SM activity, occupancy, DRAM and tensor activity from NVML's GPM",
    "dcgm": "SM activity, occupancy and DRAM activity from DCGM",
    "processes": "SM activity by the processes' own utilisation; no occupancy, no DRAM activity",
    "nvml": "coarse utilisation only",
}
_HOPPER = "Hopper and newer give it through NVML's GPM (driver 520 or newer); Ampere through a DCGM host engine"


def named(indices: Iterable[int]) -> str:
    return "GPU " + ", ".join(str(index) for index in indices)


def driver(look: Look) -> Finding | None:
    """Driver and NVML. A machine without either may still have virtual GPUs, which the next check tells."""
    machine = look.machine
    if machine is None:
        return None
    parts = [f"driver {machine.driver or 'of unknown version'}", f"NVML {machine.nvml}" if machine.nvml else ""]
    parts.append(f"CUDA up to {machine.cuda}" if machine.cuda else "")
    text = ", ".join(part for part in parts if part)
    faults = [f"GPU {card.index}: {card.fault}" for card in machine.cards if card.fault]
    if faults:
        return Finding(
            "driver", "bad", f"{text}; {'; '.join(faults)}", "nvidia-smi and the kernel's log (dmesg, Xid) say more"
        )
    return Finding("driver", "ok", text)


def gpus(look: Look) -> Finding:
    found = look.found
    if found.error is not None:
        if look.virtual:
            text = f"the daemon has {look.virtual} virtual; this machine has none that NVML knows"
            return Finding("gpus", "ok", text)
        return Finding("gpus", "warn", str(found.error), found.error.hint)
    text = ", ".join(f"{gpu.index}: {gpu.name} {gpu.memory_mib / 1024:.0f} GiB" for gpu in found.gpus)
    if found.problems:
        return Finding("gpus", "warn", f"{text}; {'; '.join(found.problems)}")
    return Finding("gpus", "ok", text)


def activity(look: Look) -> Finding | None:
    """Where SM activity comes from on each GPU, and what it costs where nobody gives it."""
    found = look.found.gpus
    if not found:
        return None
    text = "; ".join(f"{named(indices)}: {_SOURCES.get(source, source)}" for source, indices in _by_source(found))
    blind = [gpu.index for gpu in found if blind_to(gpu)]
    if not blind:
        return Finding("activity", "ok", text)
    if not look.setting("gate.enabled", True):
        return Finding("activity", "ok", f"{text}; the gate is off (gate.enabled = false): shared by memory alone")
    cost = f"{named(blind)}: what is missing never passes the gate, so each takes one task at a time"
    limitation = f"no complete SM and memory activity on {named(blind)}: each takes one task at a time"
    return Finding("activity", "warn", f"{text}; {cost}", _remedy(look), limitation)


def blind_to(gpu: Gpu) -> bool:
    """Whether the gate misses something on it."""
    return not set(METRICS) <= set(gpu.capabilities.metrics)


def _by_source(found: tuple[Gpu, ...]) -> list[tuple[str, list[int]]]:
    sources: dict[str, list[int]] = {}
    for gpu in found:
        sources.setdefault(gpu.capabilities.source, []).append(gpu.index)
    return list(sources.items())


def _remedy(look: Look) -> str:
    cards = look.machine.cards if look.machine is not None else ()
    forbidden = [card.index for card in cards if card.gpm == "forbidden"]
    off = "or share by memory alone: gate.enabled = false"
    if forbidden:
        return (
            f"{named(forbidden)} has GPM, and this user may not read it: run the daemon as root, or an administrator "
            f"sets the driver option NVreg_RestrictProfilingToAdminUsers=0; {off}"
        )
    dcgm = f" (here: {look.found.dcgm_problem})" if look.found.dcgm_problem else ""
    return f"{_HOPPER}{dcgm}; {off}"


def mig(look: Look) -> Finding | None:
    capable = [card for card in _cards(look) if card.mig is not None]
    empty = [card.index for card in capable if card.mig and not card.instances]
    text = "; ".join(_mig_text(card) for card in capable if card.mig or card.mig_pending) or "off"
    only = look.setting("sharing.mechanism", "auto") == "mig"
    if only and (look.virtual or not any(card.instances for card in capable)):
        return _no_instance(look, f"MIG is {text}" if text == "off" else text, bool(capable), empty)
    if not capable:
        return None
    if empty:
        return Finding("mig", "warn", f"{text}; {named(empty)} takes no task", _mig_hint(empty[0]))
    return Finding("mig", "ok", text)


def _no_instance(look: Look, text: str, capable: bool, empty: list[int]) -> Finding:
    """Only MIG instances may take tasks, and there is none."""
    other = "choose sharing.mechanism = 'auto', 'mps' or 'timeslice'"
    if look.virtual:
        text, hint = "the daemon's GPUs are virtual", other
    elif not capable:
        text, hint = "no GPU here has MIG", other
    else:
        hint = f"{_mig_hint(empty[0] if empty else None)}; or {other}"
    return Finding("mig", "bad", f"{text}: sharing.mechanism = 'mig', so no GPU takes a task", hint)


def _mig_text(card: CardFacts) -> str:
    count = "1 instance" if card.instances == 1 else f"{card.instances} instances"
    told = f"GPU {card.index}: on, {count}" if card.mig else f"GPU {card.index}: off"
    return told if card.mig == card.mig_pending else f"{told}, {'off' if card.mig else 'on'} after the next reset"


def _mig_hint(index: int | None) -> str:
    if index is None:
        return "an administrator turns MIG on (nvidia-smi -i N -mig 1) and makes instances (nvidia-smi mig -cgi … -C)"
    return (
        f"an administrator makes instances (nvidia-smi mig -i {index} -cgi … -C; nvidia-smi mig -lgip lists them) or "
        f"turns MIG off (nvidia-smi -i {index} -mig 0); CARMA never does"
    )


def modes(look: Look) -> Finding | None:
    """Compute mode: who may use a card at all."""
    cards = [card for card in _cards(look) if card.compute_mode is not None]
    if not cards:
        return None
    shut = [card.index for card in cards if card.compute_mode == "prohibited"]
    single = [card.index for card in cards if card.compute_mode in ("exclusive_process", "exclusive_thread")]
    if shut:
        text = f"{named(shut)}: compute mode PROHIBITED, so that no task can use it"
        return Finding("compute mode", "bad", text, f"an administrator: nvidia-smi -i {shut[0]} -c DEFAULT")
    if single:
        text = (
            f"{named(single)}: compute mode EXCLUSIVE_PROCESS: one process at a time. Under MPS that is the server, so "
            "tasks of one user can share; in time slices, or of two users, the second task fails"
        )
        return Finding("compute mode", "warn", text, f"an administrator: nvidia-smi -i {single[0]} -c DEFAULT")
    return Finding("compute mode", "ok", "DEFAULT: processes may share")


def persistence(look: Look) -> Finding | None:
    """Only told: it costs time and no more."""
    cards = [card for card in _cards(look) if card.persistence is not None]
    if not cards:
        return None
    off = [card.index for card in cards if not card.persistence]
    if not off:
        return Finding("persistence", "ok", "on")
    text = f"off on {named(off)}: the driver forgets a card that nobody uses, and the next start on it takes longer"
    return Finding("persistence", "ok", text, "an administrator starts nvidia-persistenced, or nvidia-smi -pm 1")


def _cards(look: Look) -> tuple[CardFacts, ...]:
    machine = look.machine
    return () if machine is None else tuple(card for card in machine.cards if not card.fault)
