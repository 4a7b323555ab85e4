"""`carma doctor`: check this machine and the daemon."""

from __future__ import annotations

from carma.cli.checks import run_all
from carma.cli.checks.doctor_facts import Finding
from carma.cli.output import STATE_STYLES, print_json, print_rich, wrapped_table
from carma.cli.verb import json_flag, verb

EXAMPLES = """
carma doctor
carma doctor --json
"""


@verb("doctor", examples=EXAMPLES)
@json_flag
def command(as_json: bool) -> int:
    """Check this machine and the daemon. Exit code 1 if a finding is bad."""
    findings = run_all()
    if as_json:
        print_json(findings)
    else:
        _print(findings)
    return 1 if any(finding.verdict == "bad" for finding in findings) else 0


def _print(findings: list[Finding]) -> None:
    rows: list[tuple[str | tuple[str, str], str, str]] = []
    for finding in findings:
        first, *rest = (finding.text + (f"\n→ {finding.hint}" if finding.hint else "")).splitlines() or [""]
        rows.append(((finding.verdict, STATE_STYLES[finding.verdict]), finding.check, first))
        rows += [("", "", line) for line in rest]
    print_rich(wrapped_table(rows, ("", "", "")))
