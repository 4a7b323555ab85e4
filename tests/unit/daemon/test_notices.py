"""Notices leave the daemon once, in turns, in a process of the user; what a target does cannot harm the daemon."""

from __future__ import annotations

import asyncio
import contextlib
import http.server
import json
import os
import socketserver
import threading
from collections.abc import Callable, Coroutine, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from carma.core.model.events import IdleNoted
from carma.core.model.outcome import Failed
from carma.core.model.settings import NotifyRules
from carma.core.model.task import Notice
from carma.core.model.values import Notify, Owner, TaskId, TaskSpec
from carma.daemon.notices import Notices, read_targets
from carma.daemon.probes import notification, pool
from carma.daemon.probes.notification import Delivery, Message, deliver, kind_of
from carma.daemon.probes.pool import Probes
from carma.daemon.shell import Shell
from carma.daemon.views.notice_text import NoticeText
from carma.errors import BadSettings
from carma.store.memory import MemoryStore
from carma.testing.builders import BOB, World
from tests.golden_text import assert_wording
from tests.launch_orders import gone
from tests.unit.daemon.api_server import until
from tests.unit.daemon.shells import make_shell, writing

LIMIT_S = 120.0
ALL = Notify(targets=("mailto:a@b",), on=("finish", "failure", "oom", "retry", "wait", "idle"))
MESSAGE = Message(
    targets=(),
    subject="CARMA: task 7",
    text="Task 7 failed.\n",
    facts={"task_id": 7, "exit_code": None},
    smtp="",
    sender="c@h",
)
PLAIN = {"PATH": os.environ["PATH"]}


def ended_world(*owners: Owner) -> World:
    """One failed task of each owner, with a notice to send."""
    world = World(1)
    for owner in owners:
        task = world.run(1_024, owner=owner, notify=ALL)
        world.end(task, Failed(1, "hunter2"))
        world.wait(5)
        world.settle()
    return world


# -- sending ----------------------------------------------------------------------------------------------------------


class Targets:
    """Records messages; those to an owner in `hanging` are not delivered before `release`."""

    def __init__(self, *hanging: int) -> None:
        self.messages: list[tuple[int, Message]] = []
        self.hanging = hanging
        self.release = asyncio.Event()
        self.began = asyncio.Event()

    async def deliver(self, owner: Owner, _spec: TaskSpec, message: Message) -> Delivery:
        self.began.set()
        if owner.uid in self.hanging:
            await self.release.wait()
        self.messages.append((owner.uid, message))
        return Delivery(sent_to=("e-mail",), problems=("webhook: HTTP Error 500",))


def run(work: Callable[[], Coroutine[Any, Any, None]]) -> None:
    async def limited() -> None:
        async with asyncio.timeout(LIMIT_S):
            await work()

    asyncio.run(limited())


async def all_sent(shell: Shell, *tasks: int) -> None:
    assert await shell.wait_for(lambda state: not any(state.tasks[TaskId(task)].notices for task in tasks), LIMIT_S)


def test_a_notice_is_sent_once_and_reported() -> None:
    async def work() -> None:
        world, targets = ended_world(BOB), Targets()
        shell = make_shell(MemoryStore(), world.state)
        async with writing(shell):
            events = shell.subscribe()
            notices = Notices(shell, NotifyRules(), targets.deliver)
            notices.send(TaskId(1))
            notices.send(TaskId(1))
            await all_sent(shell, 1)
            notices.send(TaskId(1))
            await notices.drain()
            _, event = await anext(events)
        assert [uid for uid, _ in targets.messages] == [BOB.uid]
        assert (event.sent_to, event.problems) == (("e-mail",), ("webhook: HTTP Error 500",))  # type: ignore[union-attr]

    run(work)


@pytest.mark.parametrize(("mode", "uid"), [(0o620, 0), (0o602, 0), (0o600, 65534)])
def test_a_targets_file_that_others_can_change_is_refused(tmp_path: Path, mode: int, uid: int) -> None:
    file = tmp_path / "targets"
    file.write_text("true\n")
    file.chmod(mode)
    if uid and os.geteuid() != 0:
        pytest.skip("only root can give a file away")
    os.chown(file, uid or -1, -1)
    with pytest.raises(BadSettings, match="read or changed by users who must not"):
        read_targets(str(file))


def test_the_administrator_gets_no_words_of_programs(tmp_path: Path) -> None:
    (tmp_path / "targets").write_text("# the operators\nhttps://chat.example/hook\n\n")

    async def work() -> None:
        world, targets = ended_world(BOB), Targets()
        shell = make_shell(MemoryStore(), world.state)
        rules = NotifyRules(targets_file=str(tmp_path / "targets"), on=("failure",))
        async with writing(shell):
            Notices(shell, rules, targets.deliver).send(TaskId(1))
            await all_sent(shell, 1)
        (_, own), (uid, server) = targets.messages
        assert (own.targets, server.targets) == (("mailto:a@b",), ("https://chat.example/hook",))
        assert uid == os.geteuid()
        assert "hunter2" in own.text
        assert "hunter2" not in server.text + server.subject
        assert "train.py" not in server.text + server.subject + str(server.facts)

    run(work)


def test_a_receiver_that_hangs_delays_only_its_user() -> None:
    async def work() -> None:
        carol = Owner(1003, 1003, "carol")
        world, targets = ended_world(BOB, BOB, carol), Targets(BOB.uid)
        shell = make_shell(MemoryStore(), world.state)
        async with writing(shell):
            notices = Notices(shell, NotifyRules(), targets.deliver)
            for task in (1, 2, 3):
                notices.send(TaskId(task))
            await all_sent(shell, 3)
            assert [uid for uid, _ in targets.messages] == [carol.uid]
            targets.release.set()
            await all_sent(shell, 1, 2)

    run(work)


def test_when_the_daemon_ends_what_is_sent_is_reported_and_the_rest_is_left_to_the_next_one() -> None:
    async def work() -> None:
        world, targets = ended_world(BOB, BOB), Targets(BOB.uid)
        shell = make_shell(MemoryStore(), world.state)
        async with writing(shell):
            notices = Notices(shell, NotifyRules(), targets.deliver)
            notices.send(TaskId(1))
            await targets.began.wait()
            notices.send(TaskId(2))
            shell.request_stop()
            targets.release.set()
            await notices.drain()
            assert [len(shell.state.tasks[TaskId(task)].notices) for task in (1, 2)] == [0, 1]
            await notices.close()

    run(work)


def test_a_file_of_targets_that_cannot_be_read_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(BadSettings):
        read_targets(str(tmp_path / "none"))


# -- delivery ---------------------------------------------------------------------------------------------------------


class _Hook(http.server.BaseHTTPRequestHandler):
    received: list[dict[str, Any]] = []

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.received.append(body)
        self.send_response(500 if self.path == "/broken" else 204)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


class _Mail(socketserver.StreamRequestHandler):
    received: list[str] = []

    def handle(self) -> None:
        self.wfile.write(b"220 test\r\n")
        in_data, lines = False, []
        for raw in self.rfile:
            line = raw.decode().rstrip("\r\n")
            line = line.upper() if line in ("data", "quit") else line
            if in_data and line != ".":
                lines.append(line)
                continue
            in_data = line == "DATA"
            if line == ".":
                self.received.append("\n".join(lines))
            self.wfile.write({"DATA": b"354 go\r\n", "QUIT": b"221 bye\r\n"}.get(line, b"250 ok\r\n"))


@contextlib.contextmanager
def listening(handler: type[socketserver.BaseRequestHandler]) -> Iterator[str]:
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), handler) as server:
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()


def to(*targets: str, **more: Any) -> Message:
    return replace(MESSAGE, targets=targets, **more)


def test_a_command_gets_the_text_and_the_facts_in_the_tasks_directory(tmp_path: Path) -> None:
    line = (
        """sh -c 'cat > got; echo "$CARMA_TASK_ID $CARMA_SUBJECT $OWN ${CARMA_EXIT_CODE-none}" >> got' $(touch bad)"""
    )
    done = deliver(to(line), {**PLAIN, "OWN": "mine"}, str(tmp_path))
    assert done == Delivery(sent_to=("command",))
    assert (tmp_path / "got").read_text() == "Task 7 failed.\n7 CARMA: task 7 mine none\n"
    assert not (tmp_path / "bad").exists()


def test_targets_that_fail_are_named_without_their_secrets_and_the_others_are_served(tmp_path: Path) -> None:
    with listening(_Hook) as place:
        done = deliver(
            to("nosuchprogram", "false", f"http://{place}/broken", "slack://s3cret/x", f"http://{place}/fine"),
            PLAIN,
            str(tmp_path),
        )
    assert done.sent_to == ("webhook",)
    assert [problem.partition(":")[0] for problem in done.problems] == ["command", "command", "webhook", "slack"]
    assert "s3cret" not in str(done.problems)
    assert "500" in done.problems[2]


def test_a_problem_quotes_no_url() -> None:
    assert notification._reason(OSError("no answer of https://hooks.example/s3cret\nbye")) == "no answer of …"


def test_a_webhook_gets_json() -> None:
    with listening(_Hook) as place:
        assert deliver(to(f"http://{place}/"), PLAIN, "/").problems == ()
    assert _Hook.received[-1] == {
        "subject": "CARMA: task 7",
        "text": "Task 7 failed.\n",
        "task_id": 7,
        "exit_code": None,
    }


def test_a_mail_reaches_the_mail_server() -> None:
    with listening(_Mail) as place:
        assert deliver(to("mailto:ada@example.org", smtp=place), PLAIN, "/").problems == ()
    mail = _Mail.received[-1]
    assert "To: ada@example.org" in mail
    assert "Subject: CARMA: task 7" in mail
    assert "Task 7 failed." in mail


def test_a_command_that_hangs_is_killed_with_its_children(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notification, "COMMAND_LIMIT_S", 0.5)
    done = deliver(to("sh -c 'sleep 612 & echo $! > child; sleep 612'"), PLAIN, str(tmp_path))
    assert "did not end" in done.problems[0]
    until(lambda: gone(int((tmp_path / "child").read_text())))


@pytest.mark.skipif(find_spec("apprise") is None, reason="apprise is not installed")
def test_apprise_sends_what_carma_does_not_know(tmp_path: Path) -> None:
    """In a probe, as in the daemon: it leaves files open."""

    async def work() -> None:
        probes = Probes()
        me, spec = Owner(os.geteuid(), os.getegid(), "me"), TaskSpec(command=("true",), directory=str(tmp_path))
        with listening(_Hook) as place:
            done = await probes.notify(me, spec, to(f"json://{place}/", "json://127.0.0.1:9/s3cret"))
        await probes.close()
        assert done == Delivery(sent_to=("json",), problems=("json: Apprise could not send it",))

    run(work)
    assert _Hook.received[-1]["title"] == MESSAGE.subject


def test_the_kind_of_a_target_follows_from_its_spelling() -> None:
    found = [kind_of(one) for one in ("mailto:a@b", "HTTPS://x/y", "slack://a/b", "mailto://u:p@h", "notify-send x")]
    assert found == ["e-mail", "webhook", "slack", "mailto", "command"]


def test_the_probe_of_a_user_delivers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def work() -> None:
        probes = Probes()
        me = Owner(os.geteuid(), os.getegid(), "me")
        spec = TaskSpec(command=("true",), directory=str(tmp_path), environment=PLAIN)
        assert await probes.notify(me, spec, to("sh -c 'cat > got'")) == Delivery(sent_to=("command",))
        monkeypatch.setattr(pool, "NOTIFY_LIMIT_S", 0.3)
        hanging = await probes.notify(me, spec, to("sleep 600"))
        await probes.close()
        assert "did not answer" in hanging.problems[0]

    run(work)
    assert (tmp_path / "got").read_text() == MESSAGE.text


# -- the text ---------------------------------------------------------------------------------------------------------


def test_the_text_says_what_happened() -> None:
    world = World(1)
    texts: dict[str, str] = {}

    def keep(name: str, task: TaskId, reason: str = "") -> None:
        for notice in world.task(task).notices:
            for whole in (True, False):
                text = NoticeText(world.task(task), notice, "gpu7", whole=whole, reason=reason)
                texts[f"{name}, {'owner' if whole else 'administrator'}"] = f"{text.subject}\n\n{text.text}"

    done = world.run(8_192, holds_mib=7_000, name="train", notify=ALL)
    world.end(done)
    failed = world.submit(8_192, name="", notify=ALL)
    world.wait(5)
    world.settle()
    world.start(failed)
    world.wait(60)
    world.end(failed, Failed(1, "ValueError: hunter2"))
    world.settle()
    keep("finish", done)
    keep("failure", failed)
    world.wait(5)
    oom = world.run(4_096, name="big", notify=ALL)
    world.oom(oom)
    world.settle()
    keep("oom, retried", oom)
    given_up = world.submit(1_024, name="small", notify=ALL, held=True)
    world.stop(given_up, by="root")
    keep("cancelled by another", given_up)
    world.wait(120)
    world.settle()
    world.start()
    world.emit(IdleNoted(world.now, oom, world.now - 1_800, "end"))
    keep("idle", oom)
    notice = Notice("wait", world.now + 3_600, 0)
    waits = replace(world.task(given_up), notices=(notice,))
    for whole in (True, False):
        text = NoticeText(waits, notice, "gpu7", whole=whole, reason="needs 1.0 GiB; most free is 0.4 GiB on GPU 0")
        texts[f"wait, {'owner' if whole else 'administrator'}"] = f"{text.subject}\n\n{text.text}"
    assert_wording("notices", texts)
    facts = NoticeText(world.task(failed), world.task(failed).notices[0], "gpu7", whole=True).facts
    assert (facts["exit_code"], facts["ran_s"], facts["gpu_memory_booked_mib"]) == (1, 60.0, 8_192)
