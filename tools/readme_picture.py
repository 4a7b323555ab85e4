"""Draws docs/overview.svg and docs/top.svg from real output: `python -m tools.readme_picture`.

Starts a private daemon with four virtual GPUs, submits eight tasks, waits until they share GPUs, and prints what
`carma gpus`, `carma queue` and `carma explain`, and `carma top`, show in a terminal of 104 columns with colours.
"""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
import time
from pathlib import Path

from rich.console import Console
from rich.text import Text

from carma.cli.top.app import Top
from carma.testing.private_daemon import PrivateDaemon, PrivateSettings

DOCS = Path(__file__).parents[1] / "docs"
COLUMNS = 104
TOP_ROWS = 20
TASKS = (  # name, memory in MiB, SM activity
    ("resnet50", 9_400, 0.38),
    ("bert-base", 21_300, 0.41),
    ("vit-small", 15_800, 0.35),
    ("unet", 12_600, 0.32),
    ("mobilenet", 5_200, 0.16),
    ("lstm", 3_700, 0.12),
    ("resnet18", 4_100, 0.20),
    ("gpt2-large", 37_500, 0.62),
)
COMMANDS = ("carma gpus", "carma queue", "carma explain 8")


def main() -> None:
    settings = PrivateSettings(gpus=4, speed=20.0, policy="magm")
    with PrivateDaemon(settings) as daemon:
        environment = {**daemon.environment, "FORCE_COLOR": "1", "COLUMNS": str(COLUMNS), "TERM": "xterm-256color"}

        def run(command: str) -> str:
            done = subprocess.run(
                [sys.executable, "-m", *command.split()],
                env=environment,
                cwd=daemon.work,
                text=True,
                stdout=subprocess.PIPE,
                check=True,
            )
            return done.stdout

        for name, memory_mib, sm in TASKS:
            run(
                f"carma submit --name {name} --gpu-mem {memory_mib + 600}M -- {sys.executable} -m "
                f"carma.vgpu.virtual_task --memory-mib {memory_mib} --sm {sm} --dram {sm / 3:.2f} --seconds 360000 "
                f"--steps-per-s {1 / sm:.2f}"
            )
        while len(re.findall(r"^\s*\d+ .*\bR\b", _plain(run("carma queue")), re.MULTILINE)) < len(TASKS) - 1:
            time.sleep(0.2)
        while "warming" in _plain(run("carma gpus")):
            time.sleep(0.2)
        _draw([(command, run(command)) for command in COMMANDS])
        os.environ["CARMA_HOME"] = daemon.environment["CARMA_HOME"]
        asyncio.run(_draw_top())


def _plain(output: str) -> str:
    return Text.from_ansi(output).plain


def _draw(shown: list[tuple[str, str]]) -> None:
    console = Console(record=True, width=COLUMNS, file=open("/dev/null", "w"), force_terminal=True)  # noqa: SIM115
    for number, (command, output) in enumerate(shown):
        console.print(Text.assemble(("" if number == 0 else "\n") + "$ ", (command, "bold")))
        console.print(Text.from_ansi(output.rstrip("\n")))
    _write("overview.svg", console.export_svg(title="CARMA"))


async def _draw_top() -> None:
    app = Top("all", 0.5)
    async with app.run_test(size=(COLUMNS, TOP_ROWS)) as pilot:
        while not app.running.rows:
            await pilot.pause(0.1)
        await pilot.pause(1.0)
        _write("top.svg", app.export_screenshot(title="carma top"))


def _write(name: str, picture: str) -> None:
    """No web fonts and no links: the picture must not load anything from another site."""
    picture = re.sub(r"@font-face \{.*?\}\s*|<!-- Generated[^\n]*\n", "", picture, flags=re.DOTALL)
    (DOCS / name).write_text(picture, encoding="utf-8")


if __name__ == "__main__":
    main()
