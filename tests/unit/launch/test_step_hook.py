"""The import hook that counts optimizer steps, in interpreters of its own: what it counts, and what it leaves alone."""

from __future__ import annotations

import importlib.util
import json
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

from carma import step_file
from tests.unit.launch.step_interpreter import HOOK, LIBRARIES, STUB, STUB_OF_TORCH_1, Interpreter

needs_torch = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed")

TRAIN = """
import sys, torch
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(25):
    optimizer.zero_grad()
    model(torch.randn(2, 4)).sum().backward()
    optimizer.step()
print("trained")
"""


@pytest.fixture
def interpreter(tmp_path: Path) -> Interpreter:
    return Interpreter(tmp_path)


# -- what is counted, with the real torch -----------------------------------------------------------------------------


def of_a_script(interpreter: Interpreter) -> tuple[str, ...]:
    return (sys.executable, interpreter.write("train.py", TRAIN))


def of_a_module(interpreter: Interpreter) -> tuple[str, ...]:
    interpreter.write("package/train.py", TRAIN)
    return (sys.executable, "-m", "package.train")


def of_a_shell_script(interpreter: Interpreter) -> tuple[str, ...]:
    interpreter.write("train.py", TRAIN)
    return ("sh", interpreter.write("run.sh", f"set -e\necho start\n'{sys.executable}' train.py"))


def of_torchrun(interpreter: Interpreter) -> tuple[str, ...]:
    launcher = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    return (*launcher, interpreter.write("train.py", TRAIN))


@needs_torch
@pytest.mark.parametrize("command", [of_a_script, of_a_module, of_a_shell_script, of_torchrun])
def test_every_step_is_counted_once(
    interpreter: Interpreter, command: Callable[[Interpreter], tuple[str, ...]]
) -> None:
    assert "trained" in interpreter.run(*command(interpreter))
    assert interpreter.steps == 25
    assert interpreter.processes == (2 if command is of_torchrun else 1)


@needs_torch
def test_skipped_steps_and_forked_processes_that_make_no_step_are_not_counted(interpreter: Interpreter) -> None:
    interpreter.python(
        """
        import os, torch
        from torch.utils.data import DataLoader, TensorDataset

        model = torch.nn.Linear(4, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu")
        loader = DataLoader(TensorDataset(torch.randn(24, 4)), batch_size=2, num_workers=2)
        for place, (batch,) in enumerate(loader):  # 12 batches, of which every third overflows
            optimizer.zero_grad()
            scaler.scale(model(batch).sum() * (float("inf") if place % 3 == 0 else 1.0)).backward()
            scaler.step(optimizer)
            scaler.update()
        child = os.fork()
        if child == 0:  # its own training, in a slot of its own
            for _ in range(3):
                optimizer.step()
            os._exit(0)
        os.waitpid(child, 0)
        optimizer.step()
        """
    )
    assert interpreter.steps == 9
    assert interpreter.processes == 2


@needs_torch
@pytest.mark.parametrize("library", LIBRARIES)
def test_steps_of_libraries_are_counted_once(interpreter: Interpreter, library: str) -> None:
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"{library} is not installed")
    interpreter.python(LIBRARIES[library])
    assert interpreter.steps == 6


@needs_torch
def test_a_compiled_step_has_the_same_graphs_as_without_the_hook(interpreter: Interpreter) -> None:
    program = """
        import torch
        from torch._dynamo.testing import CompileCounter
        model = torch.nn.Linear(4, 4)
        optimizer = torch.optim.Adam(model.parameters())
        model(torch.randn(2, 4)).sum().backward()
        graphs = CompileCounter()
        step = torch.compile(optimizer.step, backend=graphs)
        for _ in range(5):
            step()
        print(graphs.frame_count, graphs.op_count)
        """
    assert interpreter.python(program) == interpreter.python(program, hook=False)
    assert interpreter.steps == 0  # a compiled step is not counted


@needs_torch
def test_the_program_finds_the_modules_paths_and_loaders_that_it_would_find_without_the_hook(
    interpreter: Interpreter,
) -> None:
    program = """
        import importlib.util, json, sys
        importlib.util.find_spec("torch")  # libraries look for torch before they import it
        import torch
        print(json.dumps([sys.path, sorted(sys.modules), [str(type(one)) for one in sys.meta_path],
                          sorted(vars(torch.__loader__)), str(type(torch.__spec__.loader)),
                          sorted(path for path in sys.path_importer_cache if "hook" in path)]))
        """
    with_hook, without = (json.loads(interpreter.python(program, hook=hook)) for hook in (True, False))
    assert with_hook == without


# -- what it leaves alone ---------------------------------------------------------------------------------------------


def test_without_torch_only_the_finder_differs(interpreter: Interpreter) -> None:
    program = """
        import sys
        assert "sitecustomize" not in sys.modules
        try:
            import sitecustomize
        except ModuleNotFoundError:
            print(sys.path, sorted(sys.modules), len(sys.meta_path))
        """
    python = (sys.executable, "-c", textwrap.dedent(program))
    with_hook, without = (interpreter.run(*python, hook=hook) for hook in (True, False))
    one_more = without.rpartition(" ")
    assert with_hook == f"{one_more[0]} {int(one_more[2]) + 1}\n"
    assert interpreter.processes == 0


def test_the_users_own_sitecustomize_runs_under_its_name(interpreter: Interpreter) -> None:
    own = interpreter.write("own/sitecustomize.py", "import sys\nsys.own = __name__, __file__")
    interpreter.stub_torch()
    interpreter.python_path.append(str(Path(own).parent))
    program = """
        import sys, torch
        assert sys.own == ("sitecustomize", sys.modules["sitecustomize"].__file__)
        torch.optim.optimizer.Optimizer().step()
        print(sys.own[1])
        """
    assert interpreter.python(program) == f"{own}\n"
    assert interpreter.steps == 1


def test_a_missing_torch_is_missing_as_always(interpreter: Interpreter) -> None:
    program = """
        import sys
        sys.path[:] = [folder for folder in sys.path if "site-packages" not in folder]
        for _ in range(2):
            try:
                import torch
            except ModuleNotFoundError as error:
                print(error.name)
        """
    assert interpreter.python(program) == "torch\ntorch\n"


def test_a_torch_whose_import_fails_at_first_is_counted_later(interpreter: Interpreter) -> None:
    interpreter.stub_torch(first="import os\nif not os.path.exists('ready'): raise OSError('no library')")
    program = """
        try:
            import torch
        except OSError:
            open("ready", "w").close()
        import torch
        from torch.optim.optimizer import Optimizer
        Optimizer().step()
        """
    interpreter.python(program)
    assert interpreter.steps == 1


def test_steps_of_torch_1_are_counted_and_return_what_they_return(interpreter: Interpreter) -> None:
    interpreter.stub_torch(STUB_OF_TORCH_1)
    program = """
        import torch
        class Adam(torch.optim.optimizer.Optimizer):
            def step(self):
                return "adam"
        class Own(Adam):
            pass
        for optimizer in (Adam(), Adam(), Own()):
            assert optimizer.step() == "adam"
        """
    interpreter.python(program)
    assert interpreter.steps == 3


def test_all_steps_of_a_fast_program_are_counted(interpreter: Interpreter) -> None:
    """Their times are not read one by one."""
    interpreter.stub_torch()
    program = """
        from torch.optim.optimizer import Optimizer
        import torch, time
        optimizer, ends = Optimizer(), time.monotonic() + 0.5
        for step in range(10 ** 9):
            optimizer.step()
            if time.monotonic() > ends:
                break
        print(step + 1)
        """
    assert int(interpreter.python(program)) == interpreter.steps


def test_trainings_in_forked_processes_that_follow_one_another_add_up(interpreter: Interpreter) -> None:
    """They were forked before torch was imported."""
    interpreter.stub_torch()
    program = """
        import os
        for _ in range(2):
            child = os.fork()
            if child == 0:
                import torch
                for _ in range(20):
                    torch.optim.optimizer.Optimizer().step()
                sys = __import__("sys")
                sys.exit(0)
            os.waitpid(child, 0)
        """
    interpreter.python(program)
    assert interpreter.steps == 40


HANDLED = """
    import os, signal, torch
    from torch.optim.optimizer import Optimizer, _hooks
    class Timeout(ERROR): pass
    def stop(number, frame):
        raise Timeout
    signal.signal(signal.SIGALRM, stop)
    optimizer = Optimizer()
    names = dict(zip(_hooks[0].__code__.co_freevars, _hooks[0].__closure__))
    meter = names["meter"].cell_contents
    write = meter.append
    def interrupted(*arguments):  # the signal arrives during the write
        signal.raise_signal(signal.SIGALRM)
        return write(*arguments)
    meter.append = interrupted
    try:
        optimizer.step()
    except Timeout:
        print("stopped")
    meter.append = write
    for _ in range(9):
        optimizer.step()
    """


@pytest.mark.parametrize("error", ["Exception", "OSError"])
def test_an_exception_of_the_programs_signal_handler_reaches_the_program(interpreter: Interpreter, error: str) -> None:
    interpreter.stub_torch()
    assert interpreter.python(HANDLED.replace("ERROR", error)) == "stopped\n"
    assert interpreter.steps == 10


def test_after_a_pause_every_step_is_looked_at_again(interpreter: Interpreter) -> None:
    """Slow steps after fast ones: the time of each is written."""
    interpreter.stub_torch()
    program = """
        import torch
        from torch.optim.optimizer import Optimizer, _hooks
        names = dict(zip(_hooks[0].__code__.co_freevars, _hooks[0].__closure__))
        meter, optimizer = names["meter"].cell_contents, Optimizer()
        now = [10 ** 9]
        meter.clock = lambda: now[0]
        for _ in range(5000):
            now[0] += 10 ** 5
            optimizer.step()
        print(meter.stride)
        meter.due = 10 ** 18  # a write that took long
        for _ in range(meter.stride):
            now[0] += 2 * 10 ** 9
            optimizer.step()
        print(meter.stride)
        """
    assert interpreter.python(program) == "16\n1\n"


# -- it fails open ----------------------------------------------------------------------------------------------------

BROKEN = {
    "torch has no optimizers": {"torch": "import sys; del sys.modules['torch.optim.optimizer']"},
    "torch refuses the hook": {"optimizer": STUB + "\ndef register_optimizer_step_post_hook(hook): raise RuntimeError"},
    "torch cannot say whether it compiles": {"torch": "del torch.compiler.is_compiling"},
}
STEP_ALWAYS = """
    import sys, torch
    try:
        from torch.optim.optimizer import Optimizer
    except ImportError:
        Optimizer = None
    for _ in range(30):
        Optimizer and Optimizer().step()
    print("the end")
    """


@pytest.mark.parametrize("broken", BROKEN.values(), ids=BROKEN.keys())
def test_a_script_in_which_the_hook_cannot_attach_runs_to_its_end(
    interpreter: Interpreter, broken: dict[str, str]
) -> None:
    interpreter.stub_torch(**broken)
    assert interpreter.python(STEP_ALWAYS) == "the end\n"
    assert interpreter.steps == 0


def no_file(interpreter: Interpreter) -> None:
    interpreter.file.unlink()


def a_directory(interpreter: Interpreter) -> None:
    interpreter.file.unlink()
    interpreter.file.mkdir()


def a_link(interpreter: Interpreter) -> None:
    target = interpreter.folder / "target"
    interpreter.file.rename(target)
    interpreter.file.symlink_to(target)


def a_full_file(interpreter: Interpreter) -> None:
    interpreter.file.write_bytes(b"\0" * step_file.LIMIT_BYTES)


def a_broken_hook(interpreter: Interpreter) -> None:
    """As after an upgrade that changed only a part of the files."""
    text = (Path(HOOK) / "sitecustomize.py").read_text()
    interpreter.hook = str(
        Path(interpreter.write("broken/sitecustomize.py", text.replace(".to_bytes", ".nothing"))).parent
    )


@pytest.mark.parametrize("damage", [no_file, a_directory, a_link, a_full_file, a_broken_hook])
def test_a_script_whose_steps_cannot_be_written_runs_to_its_end(
    interpreter: Interpreter, damage: Callable[[Interpreter], None]
) -> None:
    interpreter.stub_torch()
    damage(interpreter)
    assert interpreter.python(STEP_ALWAYS) == "the end\n"
    if interpreter.file.is_file():
        assert interpreter.steps == 0


def test_the_program_keeps_its_descriptors_and_may_close_or_replace_everything(interpreter: Interpreter) -> None:
    """The number of the next free descriptor is the same, and closing all of them disturbs neither side."""
    interpreter.stub_torch()
    program = """
        import os, torch
        def free():
            fd = os.open("/dev/null", os.O_RDONLY)
            os.close(fd)
            return fd
        before = free()
        optimizer = torch.optim.optimizer.Optimizer()
        optimizer.step()
        assert free() == before
        os.closerange(3, 100)
        os.open = None
        optimizer.step()
        """
    interpreter.python(program)
    assert interpreter.steps == 2
