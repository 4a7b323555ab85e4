"""Interpreters that run programs with the import hook and without it, and stubs of torch for them."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import carma.launch
from carma import step_file

HOOK = str(Path(carma.launch.__file__).parent / "hook")

# As much of torch 2 as the hook uses.
STUB = """
import functools, atexit
_hooks = []
def register_optimizer_step_post_hook(hook):
    _hooks.append(hook)
class Optimizer:
    def step(self):
        for hook in _hooks:
            hook(self, (), {})
"""
# Of torch 1: the class of each optimizer is wrapped when its first object is made.
STUB_OF_TORCH_1 = """
import functools, atexit
class Optimizer:
    def __init__(self):
        self._hook_for_profile()
    def _hook_for_profile(self):
        step = type(self).step
        if not getattr(step, "hooked", False):
            @functools.wraps(step)
            def profiled(*args, **kwargs):
                return step(*args, **kwargs)
            profiled.hooked = True
            type(self).step = profiled
    def step(self):
        return "base"
"""
# With libraries that make the steps themselves.
LIBRARIES = {
    "accelerate": """
        import torch
        from accelerate import Accelerator
        accelerator = Accelerator(cpu=True)
        model = torch.nn.Linear(4, 4)
        model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
        for _ in range(6):
            accelerator.backward(model(torch.randn(2, 4)).sum())
            optimizer.step()
            optimizer.zero_grad()
        """,
    "lightning": """
        import torch, lightning
        class Model(lightning.LightningModule):
            def __init__(self):
                super().__init__()
                self.layer = torch.nn.Linear(4, 4)
            def training_step(self, batch, _):
                return self.layer(batch).sum()
            def configure_optimizers(self):
                return torch.optim.AdamW(self.parameters())
        trainer = lightning.Trainer(max_steps=6, accelerator="cpu", logger=False, enable_checkpointing=False,
                                    enable_progress_bar=False, enable_model_summary=False)
        trainer.fit(Model(), torch.utils.data.DataLoader(torch.randn(64, 4), batch_size=2))
        """,
    "transformers": """
        import torch, transformers
        class Model(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.layer = torch.nn.Linear(4, 4)
            def forward(self, x):
                return {"loss": self.layer(x).sum()}
        arguments = transformers.TrainingArguments("out", max_steps=6, use_cpu=True, report_to=[], save_strategy="no",
                                                   gradient_accumulation_steps=2, per_device_train_batch_size=2)
        transformers.Trainer(Model(), arguments, train_dataset=[{"x": torch.randn(4)} for _ in range(32)]).train()
        """,
}


def write_stub_torch(folder: Path, optimizer: str = STUB, torch: str = "", first: str = "") -> None:
    """A package `torch` in this folder."""
    texts = {
        "__init__.py": f"{first}\nimport torch.optim.optimizer, torch.compiler\n{torch}",
        "compiler.py": "def is_compiling(): return False",
        "optim/__init__.py": "",
        "optim/optimizer.py": optimizer,
    }
    (folder / "torch/optim").mkdir(parents=True, exist_ok=True)
    for name, text in texts.items():
        (folder / "torch" / name).write_text(text)


class Interpreter:
    """Runs programs in a directory, with the hook and without it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.file = folder / "steps.bin"
        self.file.touch()
        self.hook = HOOK
        self.python_path: list[str] = []

    def write(self, name: str, text: str) -> str:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text))
        return str(path)

    def stub_torch(self, optimizer: str = STUB, torch: str = "", first: str = "") -> None:
        write_stub_torch(self.folder, optimizer, torch, first)
        self.python_path = [str(self.folder)]

    def run(self, *command: str, hook: bool = True) -> str:
        """Its standard output. It must succeed and write nothing to standard error."""
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        environment["PYTHONDONTWRITEBYTECODE"] = "1"
        folders = [*([self.hook] if hook else []), *self.python_path]
        if folders:
            environment["PYTHONPATH"] = os.pathsep.join(folders)
        if hook:
            environment[step_file.VARIABLE] = str(self.file)
        done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=self.folder)
        assert done.returncode == 0, done.stderr
        assert "sitecustomize" not in done.stderr
        return done.stdout

    def python(self, program: str, hook: bool = True) -> str:
        return self.run(sys.executable, self.write("program.py", program), hook=hook)

    @property
    def steps(self) -> int:
        found = step_file.count(self.file.read_bytes(), time.monotonic_ns())
        return 0 if found is None else found.steps

    @property
    def processes(self) -> int:
        return len(self.file.read_bytes()) // step_file.SLOT_BYTES
