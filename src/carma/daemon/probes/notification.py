"""Sends one message to its targets: a command, a webhook, a mail address, or a URL of Apprise.

Runs in a process of the user whose message it is (program.py), so that a command has the rights of that user and a
receiver that hangs delays no other. Nothing of the message is interpreted by a shell.
"""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
from collections.abc import Mapping
from contextlib import suppress
from email.message import EmailMessage

import msgspec

from carma.core.model.values import Record

NET_LIMIT_S = 8.0  # for each step of a connection
COMMAND_LIMIT_S = 20.0
_PROXIES = ("http_proxy", "https_proxy", "no_proxy", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY")
_URL = re.compile(r"[a-z][a-z0-9+.-]*://", re.IGNORECASE)


class Message(Record, frozen=True, kw_only=True):
    """`facts` are in the JSON of a webhook, and in variables such as CARMA_TASK_ID of a command."""

    targets: tuple[str, ...]
    subject: str
    text: str
    facts: dict[str, str | int | float | None]
    smtp: str
    sender: str


class Delivery(Record, frozen=True, kw_only=True):
    sent_to: tuple[str, ...] = ()  # kinds of targets
    problems: tuple[str, ...] = ()


def kind_of(target: str) -> str:
    """For users: the target itself may contain a password."""
    if target.startswith("mailto:") and not _URL.match(target):
        return "e-mail"
    if target.lower().startswith(("http://", "https://")):
        return "webhook"
    return target.partition(":")[0] if _URL.match(target) else "command"


def deliver(message: Message, environment: Mapping[str, str], directory: str) -> Delivery:
    sent: list[str] = []
    problems: list[str] = []
    for target in message.targets:
        kind = kind_of(target)
        try:
            _send(kind, target, message, environment, directory)
            sent.append(kind)
        except Exception as error:  # whatever a receiver, a library or a target's spelling leads to
            problems.append(f"{kind}: {_reason(error)}")
    return Delivery(sent_to=tuple(sent), problems=tuple(problems))


def _reason(error: Exception) -> str:
    """Without the target, which an error of a library may quote: only the first line, and no URL."""
    return re.sub(r"\S+://\S+", "…", f"{error}".partition("\n")[0])[:200] or type(error).__name__


def _send(kind: str, target: str, message: Message, environment: Mapping[str, str], directory: str) -> None:
    match kind:
        case "e-mail":
            _mail(target.partition(":")[2], message)
        case "webhook":
            os.environ.update({name: environment[name] for name in _PROXIES if name in environment})
            _post(target, message)
        case "command":
            _run(target, message, environment, directory)
        case _:
            _apprise(target, message)


def _mail(address: str, message: Message) -> None:
    import smtplib

    mail = EmailMessage()
    mail["Subject"], mail["From"], mail["To"] = message.subject, message.sender, address
    mail["Auto-Submitted"] = "auto-generated"
    mail.set_content(message.text)
    host, _, port = message.smtp.partition(":")
    with smtplib.SMTP(host, int(port or 25), timeout=NET_LIMIT_S) as server:
        server.send_message(mail)


def _post(url: str, message: Message) -> None:
    """`text` is what Slack, Mattermost and Teams show."""
    import urllib.request

    body = msgspec.json.encode({"subject": message.subject, **message.facts, "text": message.text})
    request = urllib.request.Request(url, body, {"content-type": "application/json", "user-agent": "carma"})
    with urllib.request.urlopen(request, timeout=NET_LIMIT_S):
        pass


def _run(line: str, message: Message, environment: Mapping[str, str], directory: str) -> None:
    """The text is the standard input. The command and what it started end with the notice."""
    facts = {f"CARMA_{name.upper()}": str(value) for name, value in message.facts.items() if value is not None}
    with open(os.memfd_create("stderr"), "w+b") as said:  # a pipe would stay open in children
        command = subprocess.Popen(
            shlex.split(line),
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=said,
            cwd=directory if os.path.isdir(directory) else "/",
            env={"PATH": os.defpath, **environment, **facts, "CARMA_SUBJECT": message.subject},
            start_new_session=True,
        )
        try:
            command.communicate(message.text.encode(), COMMAND_LIMIT_S)
        except subprocess.TimeoutExpired:
            raise TimeoutError(f"it did not end within {COMMAND_LIMIT_S:g} s") from None
        finally:
            with suppress(ProcessLookupError):
                os.killpg(command.pid, signal.SIGKILL)
            command.wait()
        if command.returncode:
            said.seek(max(0, said.seek(0, os.SEEK_END) - 1_000))
            last = said.read().decode(errors="replace").strip().rpartition("\n")[2]
            raise OSError(f"it ended with code {command.returncode}" + (f": {last}" if last else ""))


def _apprise(url: str, message: Message) -> None:
    try:
        import apprise
    except ImportError:
        raise OSError("this target needs Apprise on the server: pip install apprise") from None
    service = apprise.Apprise()
    if not service.add(url):
        raise ValueError("Apprise does not know this kind of URL")
    if not service.notify(body=message.text, title=message.subject):
        raise OSError("Apprise could not send it")
