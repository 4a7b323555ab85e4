"""Whole stories through the core, keyed by the sentence that each proves.

A scenario is a list of short lines: events, passing time, and the place of each task afterwards. One line a step:
`submit A 12000 [gpus=2] [exclusive] [limit=60] [priority=1] [after=B] [est] [saves]`, `wait 30`, `end A [ok|fail|oom]`,
`holds A 9000`, `cancel A`, `preempt A`, `drain 0`, `resume 0`, `busy 0 0.9 0.1 0.1`, `blind 0`, `foreign 0 5000`, and
what must hold then: `A on 0,1`, `A waits CODE`, `A ended KIND`. After each line all that is due happens; what was
placed starts and holds its booking.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from carma.core.model.events import GpuDrained, GpuResumed, PreemptionRequested
from carma.core.model.outcome import Failed, Outcome, OutOfMemory, Succeeded
from carma.core.model.settings import Gate, Preemption, QueueRules, Rules
from carma.core.model.values import Dependency, GpuId, SaveSignal, TaskId
from carma.core.policies import best_fit, exclusive, first_fit, lug, magm, round_robin
from carma.core.scheduling.placement import Policy
from carma.testing.builders import World

POLICIES: dict[str, Policy] = {
    policy.POLICY.name: policy.POLICY for policy in (best_fit, exclusive, first_fit, lug, magm, round_robin)
}

SCENARIOS: dict[str, str] = {
    "tasks of known size start on a GPU together, as far as the activity that they book allows": """
        1 gpu
        submit A 10000
        submit B 10000
        submit C 10000
        A on 0
        B on 0
        C waits WarmUp
        busy 0 0.5 0.2 0.2
        wait 25
        C on 0
    """,
    "a task of unknown size closes its GPU until it has settled": """
        1 gpu
        submit A unknown
        submit B 10000
        A on 0
        B waits WarmUp
        wait 25
        B on 0
    """,
    "idle GPUs are taken before one is shared": """
        2 gpus
        submit A 10000
        wait 25
        submit B 10000
        B on 1
        wait 25
        submit C 10000
        C on 0
    """,
    "without sharing the third task waits for an end": """
        2 gpus exclusive
        submit A 1000
        submit B 1000
        submit C 1000
        C waits Exclusive
        end A ok
        C on 0
    """,
    "a busy GPU is left alone until it is quiet": """
        1 gpu
        submit A 10000
        busy 0 0.95 0.1 0.1
        wait 40
        submit B 1000
        B waits Utilisation
        busy 0 0.2 0.1 0.1
        wait 40
        B on 0
    """,
    "a GPU whose metrics are missing takes no task until they return": """
        1 gpu
        submit A 10000
        wait 30
        blind 0
        wait 3
        submit B 1000
        B waits Metrics
        busy 0 0.2 0.1 0.1
        wait 3
        B on 0
    """,
    "a task that wants two GPUs gets both or waits, and small ones pass": """
        2 gpus
        submit A 30000 limit=600
        wait 25
        submit B 30000 gpus=2
        B waits Memory
        submit C 5000 limit=30
        C on 1
        end A ok
        wait 25
        end C ok
        B on 0,1
    """,
    "a long task does not slip in before the gang": """
        2 gpus
        submit A 30000 limit=600
        wait 25
        submit B 30000 gpus=2
        submit C 30000 limit=6000
        C waits Reserved
        end A ok
        B on 0,1
    """,
    "an out-of-memory task comes back beside others, not on an empty GPU": """
        2 gpus
        submit A 20000
        wait 25
        submit B 12000
        wait 25
        submit C 5000
        C on 1
        end C oom
        wait 5
        C on 0
        A on 0
        B on 1
    """,
    "a task that keeps running out of memory ends, and the others go on": """
        1 gpu
        submit A 5000
        wait 25
        submit B 5000
        B on 0
        end B oom
        wait 80
        end B oom
        wait 80
        end B oom
        B waits Recovery
        end A ok
        wait 80
        B on 0
        end B oom
        B ended out_of_memory
        A ended succeeded
    """,
    "an ordinary failure is the end of it": """
        1 gpu
        submit A 5000
        end A fail
        A ended failed
        wait 120
        A ended failed
    """,
    "a dependent starts after its parent and is cancelled when that fails": """
        2 gpus
        submit A 5000
        submit B 5000 after=A
        B waits Dependency
        submit C 5000 after=B
        end A ok
        B on 0
        end B fail
        C ended cancelled
    """,
    "a drained GPU takes no task until it is resumed": """
        1 gpu
        submit A 5000
        wait 25
        drain 0
        submit B 5000
        B waits Drained
        end A ok
        B waits Drained
        resume 0
        B on 0
    """,
    "a foreign process leaves the rest of the GPU to use": """
        1 gpu
        foreign 0 30000
        wait 5
        submit A 8000
        A on 0
        submit B 20000
        B waits Memory
        foreign 0 0
        wait 40
        B on 0
    """,
    "a growing task takes its memory from later tasks, not from neighbours": """
        1 gpu
        submit A 10000
        holds A 25000
        wait 30
        submit B 15500
        B waits Memory
        submit C 3000 limit=5
        C on 0
    """,
    "an estimate above every card runs alone on the largest": """
        2 gpus 24576 40960
        submit A 48000 est
        A on 1
        wait 25
        submit B 1000
        B on 0
        wait 25
        submit C 24000
        C waits Memory
    """,
    "an exclusive task has its GPU alone from first to last": """
        1 gpu
        submit A 1000 exclusive
        wait 60
        submit B 1000
        B waits Exclusive
        end A ok
        B on 0
    """,
    "priority goes before age": """
        1 gpu exclusive
        submit A 1000
        submit B 1000
        submit C 1000 priority=5
        end A ok
        C on 0
        B waits Exclusive
    """,
    "a time limit ends a task": """
        1 gpu
        submit A 1000 limit=30
        wait 31
        end A fail
        A ended timed_out
    """,
    "a cancelled task ends when its process does": """
        1 gpu
        submit A 1000 exclusive
        submit B 1000
        cancel B
        B ended cancelled
        cancel A
        A on 0
        end A fail
        A ended cancelled
    """,
}


class Play:
    """Reads a scenario's lines and checks what they say."""

    def __init__(self, first: str) -> None:
        words = first.split()
        sizes = [int(word) for word in words[2:] if word.isdigit()] or [40_960] * int(words[0])
        policy = next((POLICIES[word] for word in words if word in POLICIES), magm.POLICY)
        preemption = Preemption(enabled="preempting" in words, after_s=60.0, least_run_s=100.0)
        self.world = World(sizes, policy=policy, rules=Rules(queue=QueueRules(overtakes=10), preemption=preemption))
        self.names: dict[str, TaskId] = {}

    def line(self, line: str) -> None:
        verb, *rest = line.split()
        if verb in self.names:
            self.check(verb, rest[0], rest[1], line)
            return
        verbs: dict[str, Callable[..., None]] = {
            "submit": self.submit,
            "wait": lambda seconds: self.pass_time(int(seconds)),
            "end": self.end,
            "holds": lambda name, mib: self.world.memory.update({self.key(name): int(mib)}),
            "cancel": lambda name: self.cancel(name),
            "preempt": self.preempt,
            "drain": lambda index: self.drain(index),
            "resume": lambda index: self.resume(index),
            "busy": lambda index, *shares: self.busy(index, *(float(share) for share in shares)),
            "blind": lambda index: self.busy(index, None, None, None),
            "foreign": self.foreign,
        }
        verbs[verb](*rest)
        self.go_on()

    def key(self, name: str):  # type: ignore[no-untyped-def]
        return self.world.state.active[self.names[name]]

    def go_on(self) -> None:
        self.world.settle()
        for task in list(self.world.state.active):
            if self.world.task(task).attempts[-1].pid is None:
                self.world.start(task)

    def submit(self, name: str, mib: str, *words: str) -> None:
        spec: dict[str, object] = {"exclusive": "exclusive" in words, "source": "est" if "est" in words else "declared"}
        for word in words:
            field, _, value = word.partition("=")
            if field == "limit":
                spec["time_limit_s"] = float(value)
            elif field == "after":
                spec["after"] = (Dependency(self.names[value], "ok"),)
            elif field == "saves":
                spec["checkpoint"] = SaveSignal(10, 30.0)
            elif value:
                spec[field] = int(value)
        self.names[name] = self.world.submit(None if mib == "unknown" else int(mib), **spec)  # type: ignore[arg-type]

    def pass_time(self, seconds: int) -> None:
        for _ in range(seconds):
            self.world.wait(1)
            self.go_on()

    def end(self, name: str, how: str) -> None:
        outcomes: dict[str, Outcome] = {"ok": Succeeded(), "fail": Failed(1), "oom": OutOfMemory("gpu", 1, 2_000, None)}
        self.world.end(self.names[name], outcomes[how])

    def cancel(self, name: str) -> None:
        self.world.stop(self.names[name])

    def preempt(self, name: str) -> None:
        self.world.emit(PreemptionRequested(self.world.now, self.names[name], "alice", 10, 30.0))

    def drain(self, index: str) -> None:
        self.world.emit(GpuDrained(self.world.now, GpuId(f"GPU-{index}"), "by hand"))

    def resume(self, index: str) -> None:
        self.world.emit(GpuResumed(self.world.now, GpuId(f"GPU-{index}")))

    def busy(self, index: str, *shares: float | None) -> None:
        self.world.activity[GpuId(f"GPU-{index}")] = (shares[0], shares[1], shares[2])

    def foreign(self, index: str, mib: str) -> None:
        gpu = GpuId(f"GPU-{index}")
        self.world.foreign[gpu] = int(mib)
        if not int(mib):
            del self.world.foreign[gpu]

    def check(self, name: str, verb: str, expected: str, line: str) -> None:
        task = self.names[name]
        if verb == "on":
            assert self.world.placed(task), f"{line}: {self.world.task(task).status}"
            assert sorted(self.world.gpus_of(task)) == [int(index) for index in expected.split(",")], line
        elif verb == "waits":
            assert not self.world.placed(task), f"{line}: on {self.world.gpus_of(task)}"
            assert self.world.why(task).code == expected, f"{line}: {self.world.why(task)}"
        else:
            outcome = self.world.outcome(task)
            assert outcome is not None, f"{line}: {self.world.task(task).status}"
            assert outcome.__struct_config__.tag == expected, f"{line}: {outcome}"


def play(story: str) -> World:
    first, *lines = [line.strip() for line in story.strip().splitlines()]
    played = Play(first)
    for line in lines:
        played.line(line)
    return played.world


@pytest.mark.parametrize("sentence", SCENARIOS)
def test_scenario(sentence: str) -> None:
    play(SCENARIOS[sentence])


@pytest.mark.parametrize("sentence", SCENARIOS)
def test_the_same_scenario_gives_the_same_log_twice(sentence: str) -> None:
    assert play(SCENARIOS[sentence]).log == play(SCENARIOS[sentence]).log


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("combine", ["any", "published"])
def test_a_day_of_mixed_work_ends_under_every_policy(policy: str, combine: str) -> None:
    """Sixty tasks of four sizes, some for two GPUs, some of unknown size, some that run out of memory: all end."""
    world = World(4, policy=POLICIES[policy], rules=Rules(gate=Gate(combine=combine)))  # type: ignore[arg-type]
    ends: dict[TaskId, float] = {}
    tried: set[TaskId] = set()
    submitted = 0
    while submitted < 60 or world.state.active or world.state.queue or world.state.between_attempts:
        assert world.now < 100_000, "it goes on for ever"
        if submitted < 60 and int(world.now) % 8 == 0:
            size = (1_500, 6_000, 20_000, 39_000)[submitted % 4]
            unknown = submitted % 7 == 6
            world.submit(None if unknown else size, gpus=2 if submitted % 9 == 8 else 1, priority=submitted % 3 - 1)
            submitted += 1
        world.settle()
        for task in list(world.state.active):
            if world.task(task).attempts[-1].pid is None:
                world.start(task)
                ends[task] = world.now + 30 + task % 5 * 20
            elif ends[task] <= world.now:
                if task % 11 == 0 and task not in tried:
                    tried.add(task)
                    world.oom(task)
                else:
                    world.end(task)
        world.wait(2, every_s=2)
    assert {type(world.outcome(task)) for task in world.state.tasks} == {Succeeded}
    assert sum(len(world.task(task).attempts) for task in world.state.tasks) == 60 + len(tried)
