"""The reference page of the command line, from the verbs (not from click's help text, which changes with click)."""

from __future__ import annotations

from collections.abc import Iterator

import click

from carma.cli import ALIASES, VERBS, carma
from carma.cli.columns import FIELDS
from carma.cli.option_types import Parsed
from carma.cli.task_flags import IGNORED
from tools.markdown import GENERATED, code, paragraphs, table

INTRODUCTION = """\
# Command line

`carma VERB --help` prints the same text. Exit codes: 0 success, 1 refused, 2 wrong usage, 3 the daemon does not answer,
4 not found or not allowed, 75 no capacity with `--nonblock`; [errors](errors.md) lists all. `wait`, `run` and
`submit --wait` return the exit code of the task. Every verb has `-h` and `--help`.

Results go to standard output, errors and notes to standard error. Tables are cut to the terminal's width (`COLUMNS`);
`--json` is complete. `NO_COLOR` disables colours. `CARMA_DEBUG=1` prints the traceback of an internal error.
"""


def page() -> str:
    sections = dict.fromkeys(entry.section for entry in VERBS.values())
    parts = [GENERATED, INTRODUCTION, _overview()]
    for section in sections:
        parts.append(f"## {section}\n")
        for name, entry in VERBS.items():
            if entry.section == section:
                parts.extend(_verb(name))
    parts.append(_columns())
    return "\n".join(parts)


def _overview() -> str:
    rows = [[f"[`{name}`](#carma-{name})", entry.help] for name, entry in VERBS.items()]
    return table(["verb", "purpose"], rows)


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
    """`shared`: a command whose options this one also has; they are not repeated."""
    known = {each.name for each in shared.params} if shared is not None else set()
    yield f"{level} {path}\n"
    yield f"{code(_usage(path, command))}\n"
    yield paragraphs(command.help) + "\n"
    if shared is not None:
        yield "All options of [submit](#carma-submit) except its own output options, and:\n"
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
        for name in sorted(command.list_commands(context)):  # `commands` lacks verbs that are imported on demand
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
    return "Accepted for compatibility with Slurm scripts; CARMA prints a note:\n\n" + table(["flag", "note"], rows)


def _columns() -> str:
    rows = [[code(name), field.column.title, field.about] for name, field in FIELDS.items()]
    return "## Columns\n\nColumns of `carma queue` and `carma history` for `--format`:\n\n" + table(
        ["name", "title", "content"], rows
    )
