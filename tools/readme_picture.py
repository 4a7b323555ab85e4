"""Draws docs/overview.svg, the picture in the README, from real output: `python -m tools.readme_picture`.

Starts a private daemon with four virtual GPUs, submits eight tasks, waits until they share GPUs, and prints what
`carma gpus`, `carma queue` and `carma explain` show in a terminal of 104 columns with colours.
"""

from __future__ import annotations

import re
import subprocess
import sys
import time
from pathlib import Path

from rich.console import Console
from rich.text import Text

from carma.testing.private_daemon import PrivateDaemon, PrivateSettings

PICTURE = Path(__file__).parents[1] / "docs" / "overview.svg"
COLUMNS = 104
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
                f"carma.vgpu.virtual_task --memory-mib {memory_mib} --sm {sm} --dram {sm / 3:.2f} --seconds 360000"
            )
        while len(re.findall(r"^\s*\d+ .*\bR\b", _plain(run("carma queue")), re.MULTILINE)) < len(TASKS) - 1:
            time.sleep(0.2)
        while "warming" in _plain(run("carma gpus")):
            time.sleep(0.2)
        _draw([(command, run(command)) for command in COMMANDS])


def _plain(output: str) -> str:
    return Text.from_ansi(output).plain


def _draw(shown: list[tuple[str, str]]) -> None:
    console = Console(record=True, width=COLUMNS, file=open("/dev/null", "w"), force_terminal=True)  # noqa: SIM115
    for number, (command, output) in enumerate(shown):
        console.print(Text.assemble(("" if number == 0 else "\n") + "$ ", (command, "bold")))
        console.print(Text.from_ansi(output.rstrip("\n")))
    picture = console.export_svg(title="CARMA")
    # No web fonts and no links: the picture must not load anything from another site.
    picture = re.sub(r"@font-face \{.*?\}\s*|<!-- Generated[^\n]*\n", "", picture, flags=re.DOTALL)
    PICTURE.write_text(picture, encoding="utf-8")


if __name__ == "__main__":
    main()
