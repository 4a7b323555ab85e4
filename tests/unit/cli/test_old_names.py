"""Flags have one name over all verbs; the one that each had before is still understood, and no help shows it."""

from __future__ import annotations

import click
import pytest
from msgspec.structs import replace

from carma.cli import carma
from carma.cli.verb import Renamed
from carma.demo.figures import OLD_NAMES, ReplayedTask, summarise, with_old_names
from tests.unit.cli.scripted_daemon import running, task_view

# verb: the flag, what it was called, a value
OLD = {
    "estimate": ("--gpus", "--gpu-count", "2"),
    "train": ("--families", "--family", "cnn"),
    "trace describe": ("--out", "--plots", "pictures"),
    "dataset pack": ("--parallel", "--processes", "3"),
    "bench daemon": ("--out", "--json", "x.json"),
    "bench sampler": ("--out", "--json", "x.json"),
    "bench interference": ("--out", "--json", "x.json"),
    "bench collocation": ("--out", "--json", "x.json"),
    "bench gpu": ("--only", "--parts", "oom"),
    "bench paper": ("--parallel", "--jobs", "3"),
}


def found(verb: str) -> click.Command:
    command: click.Command = carma
    for word in verb.split():
        assert isinstance(command, click.Group)
        inner = command.get_command(click.Context(command), word)
        assert inner is not None
        command = inner
    return command


def all_verbs(command: click.Command, name: str = "") -> list[tuple[str, click.Command]]:
    if not isinstance(command, click.Group):
        return [(name, command)]
    ctx = click.Context(command)
    inner = [(word, command.get_command(ctx, word)) for word in command.list_commands(ctx)]
    return [each for word, one in inner if one is not None for each in all_verbs(one, f"{name} {word}".strip())]


@pytest.mark.parametrize("verb", OLD)
def test_the_old_name_of_a_flag_has_the_same_effect(verb: str) -> None:
    new, old, value = OLD[verb]
    command = found(verb)
    (option,) = (param for param in command.params if new in param.opts)
    assert option.name is not None
    read = []
    for flag in (new, old):
        ctx = click.Context(command, resilient_parsing=True)
        command.parse_args(ctx, [flag, value])
        read.append(ctx.params[option.name])
    assert read[0] == read[1]
    assert read[0] != option.get_default(click.Context(command))
    assert old not in command.get_help(click.Context(command)).split()
    assert new in option.opts
    assert old not in option.opts


def test_these_are_all_flags_that_were_called_otherwise() -> None:
    renamed = {name for name, verb in all_verbs(carma) for param in verb.params if isinstance(param, Renamed)}
    assert renamed == set(OLD)


def test_names_that_differed_are_in_no_verb_any_more() -> None:
    """`--json` is a flag without a value everywhere, files go to --out, and several at once are --parallel."""
    for name, verb in all_verbs(carma):
        for param in verb.params:
            assert not {"--gpu-count", "--plots", "--jobs", "--processes", "--family", "--parts"} & set(param.opts), (
                name
            )
            if "--json" in param.opts:
                assert isinstance(param, click.Option), name
                assert param.is_flag, name


def test_the_json_of_the_demo_has_new_and_old_names_of_figures() -> None:
    attempt = replace(running(1).attempts[0], started_at=5, ended_at=9)
    view = task_view(1, submitted_at=0, ended_at=9, outcome={"kind": "succeeded"}, attempts=(attempt,))
    run = ReplayedTask(view=view, alone_s=3)
    figures = summarise([run], sm_active_mean=0.5)
    told = with_old_names({"wait_mean_s": figures.wait_mean_s, "sm_active_mean": figures.sm_active_mean})
    assert told == {"wait_mean_s": 5.0, "waiting_mean_s": 5.0, "sm_active_mean": 0.5, "sm_active": 0.5}
    fields = set(type(figures).__struct_fields__)
    assert set(OLD_NAMES) <= fields
    assert not set(OLD_NAMES.values()) & fields
