"""Runs programs that need torch in forks of one process that has imported it: importing torch takes seconds."""

from __future__ import annotations

import atexit
import functools
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from gpumemnet.dataset.torch_interpreter import environment

LIMIT_S = 300
SERVER = """
import json, os, signal, sys, traceback
import torch, torch.onnx, torch.profiler
torch.nn.Linear(1, 1, device="meta")(torch.empty(1, 1, device="meta"))
torch.set_num_threads(1)

def run(asked):
    signal.alarm(asked["limit_s"])
    for number, name in ((0, "stdin"), (1, "stdout"), (2, "stderr")):
        os.dup2(os.open(asked[name], os.O_RDWR), number)
    sys.argv = asked["argv"]
    sys.path.insert(0, os.path.dirname(asked["argv"][0]))
    try:
        scope = vars(sys.modules["__main__"])  # so that functions of the program can be pickled
        scope["__file__"] = asked["argv"][0]
        exec(compile(asked["code"], asked["argv"][0], "exec"), scope)
    except SystemExit as ended:
        return ended.code or 0
    except BaseException:
        traceback.print_exc()
        return 1
    return 0

for line in sys.stdin:
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            code = run(json.loads(line))
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            os._exit(code)
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
"""


@functools.cache
def _server() -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", SERVER], env=environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    atexit.register(process.kill)
    return process


def run_in_torch(code: str, *words: str, given: bytes = b"", name: str = "-c") -> str:
    """What the program prints. It must end without an error, within LIMIT_S. `name` is the program's file, if any."""
    server = _server()
    assert server.stdin is not None
    assert server.stdout is not None
    with tempfile.TemporaryDirectory(prefix="torch-program-") as folder:
        files = {stream: Path(folder, stream) for stream in ("stdin", "stdout", "stderr")}
        for file in files.values():
            file.write_bytes(given if file.name == "stdin" else b"")
        asked = {"code": code, "argv": [name, *words], "limit_s": LIMIT_S}
        server.stdin.write(json.dumps({**asked, **{stream: str(file) for stream, file in files.items()}}) + "\n")
        server.stdin.flush()
        status = server.stdout.readline().strip()
        assert status == "0", f"exit status {status}: {files['stderr'].read_text()[-2000:]}"
        return files["stdout"].read_text()


def run_file(file: Path, words: Sequence[str]) -> str:
    return run_in_torch(file.read_text(), *words, name=str(file))
