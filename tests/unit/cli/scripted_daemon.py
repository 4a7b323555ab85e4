"""A daemon for the tests of the command line: a real Unix socket, answers that the test lays out in wire types."""

from __future__ import annotations

import http.server
import re
import shutil
import socket
import socketserver
import sys
import tempfile
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from urllib.parse import parse_qsl, urlsplit

import msgspec

from carma import __version__
from carma.errors import CarmaError, NotFound
from carma.wire import api_types as t
from carma.wire.routes import API, ROUTES, Route

NOW = 1_800_000_000.0


def task_view(task: int, **changes: Any) -> t.TaskView:
    plain = t.TaskView(
        id=task,
        name="train",
        user="ada",
        uid=1000,
        state="queued",
        code="PD",
        outcome=None,
        reason="needs 12.4 GiB; most free is 9.1 GiB on GPU 2",
        reason_code="GpuMemory",
        command=("python", "train.py"),
        directory="/data/ada",
        gpus=(),
        gpu_memory_mib=12_700,
        submitted_at=NOW - 300,
    )
    return msgspec.structs.replace(plain, **changes)


def running(task: int, **changes: Any) -> t.TaskView:
    attempt = t.AttemptView(
        number=1,
        gpus=("GPU-2",),
        booking_mib=12_700,
        booking_source="declared",
        alone=False,
        decision="GPU 2: most free memory",
        placed_at=NOW - 100,
        started_at=NOW - 99,
        pid=4321,
        observed_mib=11_000,
        stdout="/data/logs/1.out",
        stderr="/data/logs/1.err",
    )
    view = task_view(
        task,
        state="running",
        code="R",
        reason="",
        reason_code="",
        gpus=("GPU-2",),
        gpu_indices=(2,),
        booking_mib=12_700,
        observed_mib=11_000,
        attempts=(attempt,),
        started_at=NOW - 99,
        estimate=t.EstimateView(footprint_mib=12_000, upper_mib=12_700, source="history"),
    )
    return msgspec.structs.replace(view, **changes)


def finished(task: int, code: int = 0, **changes: Any) -> t.TaskView:
    outcome = {"kind": "succeeded"} if code == 0 else {"kind": "failed", "code": code}
    view = running(task)
    attempt = msgspec.structs.replace(view.attempts[0], ended_at=NOW - 9, outcome=outcome)
    view = msgspec.structs.replace(
        view,
        state="finished",
        code="CD" if code == 0 else "F",
        outcome=outcome,
        reason="succeeded" if code == 0 else f"failed with exit code {code}",
        ended_at=NOW - 9,
        exit_code=code,
        attempts=(attempt,),
    )
    return msgspec.structs.replace(view, **changes)


def gpu_view(index: int, **changes: Any) -> t.GpuView:
    plain = t.GpuView(
        gpu=f"GPU-{index}",
        index=index,
        name="NVIDIA H200 with a long product name",
        kind="card",
        state="open",
        reason="",
        memory_mib=40_960,
        used_mib=11_000,
        booked_mib=12_700,
        room_mib=28_000,
        tasks=(1, 2),
        sm_active=0.45,
        sm_occupancy=0.2,
        dram_active=0.1,
        power_w=180.0,
    )
    return msgspec.structs.replace(plain, **changes)


SERVER = t.ServerView(
    version=__version__,
    pid=999_999_999,
    user="ada",
    uid=1000,
    home="/data/carma",
    policy="magm",
    started_at=NOW - 1000,
    now=NOW,
    speed=1.0,
    drained=None,
    gpus=4,
    queued=1,
    running=1,
)


class FakeDaemon:
    """`tasks` by id, `answers` and `refuses` (an error) by route; `requests` is what came."""

    def __init__(self) -> None:
        self.home = Path(tempfile.mkdtemp(prefix="carma-cli-", dir="/tmp"))
        self.tasks: dict[int, t.TaskView] = {}
        self.output: dict[str, bytes] = {"stdout": b"", "stderr": b""}
        self.answers: dict[str, Any] = {"server": SERVER}
        self.refuses: dict[str, CarmaError] = {}
        self.requests: list[tuple[str, int | None, dict[str, str], Any]] = []
        self._next_id = 1
        self._server = _Server(str(self.home / "carma.sock"), self)
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.stop()
        shutil.rmtree(self.home, ignore_errors=True)

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def asked(self, route: str) -> list[Any]:
        """The bodies that came to a route."""
        return [body for name, _task, _query, body in self.requests if name == route]

    def answer(self, route: Route, task: int | None, query: dict[str, str], body: Any) -> Any:
        self.requests.append((route.name, task, query, body))
        if route.name in self.refuses:
            raise self.refuses[route.name]
        if task is not None and task not in self.tasks:
            raise NotFound(f"there is no task {task}", "carma history lists finished tasks")
        if route.name == "submit":
            return self._submit(body)
        if route.name == "logs":
            return self.output[query.get("stream", "stdout")]
        if route.name == "task" and "wait_s" in query and self.tasks[task or 0].state != "finished":
            time.sleep(min(0.05, float(query["wait_s"])))
        if route.name in ("task", "update"):
            return self.tasks[task or 0]
        if route.name in self.answers:
            return self.answers[route.name]
        if route.name == "tasks":
            return [view for view in self.tasks.values() if view.state != "finished"]
        if route.name == "history":
            return [view for view in self.tasks.values() if view.state == "finished"]
        return t.Done(note=f"{route.name} {task}") if route.answer is t.Done else []

    def _submit(self, request: t.SubmitRequest) -> t.SubmitAnswer:
        if request.dry_run:
            entry = t.ExplainEntry(gpu="GPU-2", index=2, accepted=True, reason="", score=29.9, chosen=True)
            return t.SubmitAnswer(ids=(), note="would start on GPU 2 now", explain=(entry,))
        count = len(request.array.indices) if request.array else 1
        ids = tuple(range(self._next_id, self._next_id + count))
        self._next_id += count
        return t.SubmitAnswer(ids=ids)


class _Server(socketserver.ThreadingUnixStreamServer):
    daemon_threads = True
    block_on_close = False

    def __init__(self, path: str, fake: FakeDaemon) -> None:
        self.fake = fake
        super().__init__(path, _Handler)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that went away is no error, and its trace would land in the middle of what a test reads."""
        if not isinstance(sys.exc_info()[1], OSError):
            super().handle_error(request, client_address)


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.0"  # one request a connection: nothing is left open when a test ends
    server: _Server

    def address_string(self) -> str:
        return "unix"

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def _serve(self) -> None:
        url = urlsplit(self.path)
        size = int(self.headers.get("content-length", 0))
        raw = self.rfile.read(size)
        status, data = 404, b"{}"
        for route in ROUTES:
            pattern = API + route.path.replace("{id}", r"(\d+)")
            match = re.fullmatch(pattern, url.path)
            if match and route.method == self.command:
                status, data = self._answer(route, int(match[1]) if match.groups() else None, url.query, raw)
                break
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(data)

    def _answer(self, route: Route, task: int | None, query: str, raw: bytes) -> tuple[int, bytes]:
        body = msgspec.json.decode(raw, type=route.request) if route.request and raw else None
        try:
            answer = self.server.fake.answer(route, task, dict(parse_qsl(query)), body)
        except CarmaError as error:
            return error.http_status, msgspec.json.encode(
                t.Problem(code=error.code, message=str(error), hint=error.hint)
            )
        return route.status, answer if isinstance(answer, bytes) else msgspec.json.encode(answer)

    do_GET = do_POST = do_PATCH = _serve


def stale_socket(path: Path) -> None:
    """A socket file without a listening process."""
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(path))
