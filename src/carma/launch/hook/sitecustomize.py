"""Counts the optimizer steps of a task, in each of its Python processes. Runs in the user's interpreter, at its start.

1. Python finds this file through PYTHONPATH. It leaves sys.path and sys.modules as they would be without it, and runs
   the user's own `sitecustomize`, which it hides.
2. It waits for the import of torch, then registers a hook that torch calls after each step of any optimizer.
3. It writes the count into a slot of the file that CARMA_STEPS_FILE names (carma/step_file.py has the format), at most
   ten times a second.

It must not disturb the program: every error ends the counting and nothing else, no module is imported, no file stays
open, and nothing is mapped into memory (a file that is cut short, or a full disk, would kill the process). Its syntax
is that of every Python, because any interpreter of the task may find this file.
"""

import os
import sys

_HERE = os.path.dirname(os.path.abspath(__file__))
_FILE = os.environ.get("CARMA_STEPS_FILE")
_MAGIC, _SLOT, _SLOTS = 0x3153504554534143, 64, 256
_WRITE_NS = 100000000  # least time between two writes
_SHARE = 1000  # the writes take at most 1 / _SHARE of the time, however slow the file system or busy other threads are
_PAUSE_NS = 1000000000  # between two reads of the clock; after it the stride is 1 again
_STRIDES, _LONGEST_STRIDE = 32, 16  # reads of the clock between two writes; steps between two reads
_NEVER = 1 << 62
_ERRORS = 10  # failed writes in a row after which the counting ends


class _StepMeter(object):
    """The count of this process. The functions it needs are kept: the program may replace those of `os`."""

    def __init__(self, path, clock):
        self.path, self.clock = path, clock
        self.open, self.close, self.pid = os.open, os.close, os.getpid
        self.append, self.rewrite, self.seek = os.write, os.pwrite, os.lseek
        self.flags = os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW
        self.reset()

    def reset(self):
        """In a forked process too: it has made no step, and the slot belongs to its parent."""
        self.steps = self.written = self.last = self.due = self.errors = 0
        self.stride = self.left = 1
        self.began, self.offset = self.clock(), -1

    def count(self):
        self.left -= 1
        if self.left <= 0:
            self.read_clock()

    def read_clock(self):
        """After `stride` steps: the clock is not read more often than every millisecond or so."""
        self.steps += self.stride - self.left
        now = self.clock()
        if now - self.last > _PAUSE_NS:
            self.stride = 1
        elif now >= self.due:
            self.stride = max(1, min(_LONGEST_STRIDE, (self.steps - self.written) // _STRIDES))
        self.left, self.last = self.stride, now
        if now >= self.due:
            self.write(now)

    def write(self, now):
        try:
            self._write(self.steps)
            self.errors = 0
        except Exception as error:
            if not _raised_here(error.__traceback__):
                raise
            self.errors += 1
        took = self.clock() - now
        self.due = now + max(_WRITE_NS, _SHARE * took)
        if self.errors > _ERRORS:
            self.due = _NEVER

    def _write(self, steps):
        words = (_MAGIC, self.pid(), steps, self.began, self.last, 0, 0, 0)
        slot = b"".join([word.to_bytes(8, "little") for word in words])
        fd = self.open(self.path, self.flags | (os.O_APPEND if self.offset < 0 else 0))
        try:
            if self.offset < 0:
                self.append(fd, slot)
                self.offset = self.seek(fd, 0, 1) - _SLOT
                if self.offset % _SLOT or self.offset >= _SLOT * _SLOTS:
                    self.errors = _ERRORS
                    raise ValueError("no place for another process")
            else:
                self.rewrite(fd, slot, self.offset)
        finally:
            self.close(fd)
        self.written = steps

    def finish(self):
        """At the end of the process: what was counted since the last write."""
        self.steps += self.stride - self.left
        self.left = self.stride
        if self.steps > self.written and self.due < _NEVER:
            self.write(self.clock())


def _raised_here(trace):
    """Otherwise a signal handler of the program raised it, and it belongs to the program."""
    while trace.tb_next is not None:
        trace = trace.tb_next
    return trace.tb_frame.f_globals is globals()


class _TorchFinder(object):
    """First in sys.meta_path until torch was imported. Others find torch; the end of its import is noticed."""

    def __init__(self, attach):
        self.attach = attach

    def find_spec(self, name, path=None, target=None):
        if name != "torch":
            return None
        for finder in list(sys.meta_path):
            find = getattr(finder, "find_spec", None)
            spec = find(name, path, target) if finder is not self and find is not None else None
            if spec is not None:
                try:
                    self._watch(spec.loader)
                except Exception:
                    pass
                return spec
        return None

    def _watch(self, loader):
        """For this one import, and by an attribute: the loader keeps its type, and the class is not changed."""
        if "exec_module" in vars(loader):
            return
        execute = loader.exec_module

        def exec_module(module):
            vars(loader).pop("exec_module", None)
            execute(module)
            try:
                if self in sys.meta_path and module.__name__ == "torch":
                    sys.meta_path.remove(self)
                    self.attach(module)
            except Exception:
                pass

        loader.exec_module = exec_module


def _attach(torch, meter):
    """`torch` has just been imported."""
    optimizer = sys.modules["torch.optim.optimizer"]
    register = getattr(optimizer, "register_optimizer_step_post_hook", None)
    if register is None:
        _wrap_steps(optimizer.Optimizer, meter.count)  # torch 1
    else:
        # Of torch 2.1 or newer. While torch.compile traces a step, the hook must do nothing: it would split the graph.
        compiling = getattr(torch.compiler, "is_dynamo_compiling", None) or torch.compiler.is_compiling

        def count_step(optimizer, args, kwargs):
            if not compiling():
                meter.left -= 1
                if meter.left <= 0:
                    meter.read_clock()

        register(count_step)
    sys.modules["atexit"].register(meter.finish)


def _wrap_steps(optimizer, count):
    """torch 1 has no hooks, but wraps the step of each class when its first object is made."""
    wrap, wraps = optimizer._hook_for_profile, sys.modules["functools"].wraps

    def _hook_for_profile(self):
        wrap(self)
        owner = type(self)
        step = owner.step
        if getattr(step, "counted", False):
            return

        @wraps(step)
        def counted_step(*args, **kwargs):
            result = step(*args, **kwargs)
            count()
            return result

        counted_step.counted = True
        owner.step = counted_step

    optimizer._hook_for_profile = _hook_for_profile


def _hide():
    """Leave the interpreter as it would be without this file."""
    sys.path[:] = [folder for folder in sys.path if folder != _HERE]
    sys.path_importer_cache.pop(_HERE, None)
    sys.modules.pop("sitecustomize", None)


try:
    _hide()
    if _FILE and sys.version_info >= (3, 9):
        # Made now, because the slot tells when the process began; `time` is loaded at the start of any interpreter.
        meter = _StepMeter(_FILE, sys.modules["time"].monotonic_ns)
        os.register_at_fork(after_in_child=meter.reset)  # a child may import torch that its parent has not imported
        sys.meta_path.insert(0, _TorchFinder(lambda torch: _attach(torch, meter)))
except Exception:
    pass
import sitecustomize  # noqa: E402, F401  the user's own; without one, the ImportError that `site` expects
