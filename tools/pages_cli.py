"""The page of the command line, from the verbs themselves (not from click's help text, which changes with click)."""

from __future__ import annotations

from collections.abc import Iterator

import click

from carma.cli import ALIASES, VERBS, carma
from carma.cli.columns import FIELDS
from carma.cli.option_types import Parsed
from carma.cli.task_flags import IGNORED
from tools.markdown import MADE, code, paragraphs, table

INTRODUCTION = """\
# Command line

`carma VERB --help` says the same at the terminal. Exit codes: 0 done, 1 refused, 2 usage, 3 the daemon is not
reachable, 4 not found or not allowed, 75 no capacity with `--nonblock`; [errors](errors.md) has them all. `wait`, `run`
and `submit --wait` return the task's own exit code. Every verb has `-h` and `--help`.

Results go to standard output, complaints and notes to standard error. Tables are cut to the terminal's width
(`COLUMNS`); `--json` never cuts. `NO_COLOR` turns colours off. `CARMA_DEBUG=1` shows where an internal error came from.
"""


def page() -> str:
    sections = dict.fromkeys(entry.section for entry in VERBS.values())
    parts = [MADE, INTRODUCTION, _overview()]
    for section in sections:
        parts.append(f"## {section}\n")
        for name, entry in VERBS.items():
            if entry.section == section:
                parts.extend(_verb(name))
    parts.append(_columns())
    return "\n".join(parts)


def _overview() -> str:
    rows = [[f"[`{name}`](#carma-{name})", entry.help] for name, entry in VERBS.items()]
    return table(["verb", "what it does"], rows)


def _get(name: str) -> click.Command:
    command = carma.get_command(click.Context(carma, info_name="carma"), name)
    assert command is not None
    return command


def _verb(name: str) -> Iterator[str]:
    command = _get(name)
    other = [alias for alias, target in ALIASES.items() if target == name]
    shared = _get("submit") if name == "run" else None
    yield from _command(f"carma {name}", command, "###", shared)
    if other:
        yield "Also: " + ", ".join(code(f"carma {alias}") for alias in other) + ".\n"
    if name == "submit":
        yield _ignored()


def _command(path: str, command: click.Command, level: str, shared: click.Command | None = None) -> Iterator[str]:
    """`shared`: a command whose flags this one has too; they are not listed again."""
    known = {each.name for each in shared.params} if shared is not None else set()
    yield f"{level} {path}\n"
    yield f"{code(_usage(path, command))}\n"
    yield paragraphs(command.help) + "\n"
    if shared is not None:
        yield "The flags that say what to run and what it needs are those of [submit](#carma-submit); and:\n"
    rows = [
        [_spelling(option), option.help or ""]
        for option in command.params
        if isinstance(option, click.Option) and _shown(option) and option.name not in known
    ]
    if rows:
        yield table(["flag", "meaning"], rows)
    examples = getattr(command, "examples", "")
    if examples:
        yield f"```\n{examples}\n```\n"
    if isinstance(command, click.Group):
        context = click.Context(command)
        for name in sorted(command.list_commands(context)):  # not `commands`: some are imported when they are asked for
            inner = command.get_command(context, name)
            assert inner is not None
            yield from _command(f"{path} {name}", inner, level + "#")


def _shown(parameter: click.Parameter) -> bool:
    return isinstance(parameter, click.Option) and not parameter.hidden


def _usage(path: str, command: click.Command) -> str:
    words = [path]
    if any(_shown(parameter) for parameter in command.params):
        words.append("[FLAGS]")
    if isinstance(command, click.Group):
        words.append("COMMAND")
    words += [_metavar(each) for each in command.params if isinstance(each, click.Argument)]
    return " ".join(words)


def _metavar(parameter: click.Parameter) -> str:
    if parameter.metavar:
        return parameter.metavar
    if isinstance(parameter, click.Argument):
        name = (parameter.name or "").upper()
        return name if parameter.required else f"[{name}]"
    if isinstance(parameter.type, click.Choice):
        return "|".join(str(choice) for choice in parameter.type.choices)
    if isinstance(parameter.type, Parsed):
        return parameter.type.name
    plain = {"integer range": "N", "integer": "N", "float": "X", "float range": "X"}
    return plain.get(parameter.type.name, parameter.type.name.upper())


def _spelling(parameter: click.Option) -> str:
    names = ", ".join(code(name) for name in (*parameter.opts, *parameter.secondary_opts))
    return names if parameter.is_flag else f"{names} {code(_metavar(parameter))}"


def _ignored() -> str:
    rows = [[", ".join(code(name) for name in names), why] for names, why in IGNORED.values()]
    return "Accepted for the sake of Slurm's scripts, with a note:\n\n" + table(["flag", "note"], rows)


def _columns() -> str:
    rows = [[code(name), field.column.title, field.about] for name, field in FIELDS.items()]
    return "## Columns\n\nOf `carma queue` and `carma history`, for `--format`:\n\n" + table(
        ["name", "title", "what it shows"], rows
    )
