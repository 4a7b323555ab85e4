"""The frameworks of a command's Python: found from files, through virtual environments, first lines and wrappers."""

from __future__ import annotations

import os
import subprocess
import sys
import venv
from pathlib import Path

import pytest

from carma.core.model.values import Frameworks
from carma.launch.frameworks import find
from carma.launch.imported_packages import ENTRIES_LIMIT, READ_LIMIT_BYTES, read_start

PYTHON = f"python3.{sys.version_info.minor}"


def program(path: Path, text: str = "#!/bin/sh\n") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return path


def package(site: Path, name: str, version: str, file: str = "version.py") -> Path:
    (site / name).mkdir(parents=True)
    (site / name / "__init__.py").touch()
    (site / name / file).write_text(f"__version__ = '{version}'\n")
    return site / name


def environment_at(home: Path, torch: str | None = None) -> Path:
    """The files of a virtual environment. Returns its site-packages."""
    program(home / "bin" / "python")
    (home / "pyvenv.cfg").write_text("home = /usr/bin\ninclude-system-site-packages = false\nversion = 3.11.4\n")
    site = home / "lib" / PYTHON / "site-packages"
    site.mkdir(parents=True)
    if torch is not None:
        package(site, "torch", torch)
    return site


def look(*command: str | Path, directory: str | Path = "/", path: str | Path = "/nowhere", **more: str) -> Frameworks:
    return find([str(word) for word in command], {"PATH": str(path), **more}, str(directory))


def only(found: Frameworks) -> dict[str, str]:
    (interpreter,) = found.interpreters
    return interpreter.versions


def test_the_packages_of_a_real_virtual_environment_are_those_that_its_python_imports(tmp_path: Path) -> None:
    venv.create(tmp_path / "v", symlinks=True)
    python = tmp_path / "v" / "bin" / "python"
    say = "import sysconfig; print(sysconfig.get_path('purelib'))"
    site = subprocess.run([python, "-c", say], capture_output=True, text=True, check=True).stdout.strip()
    package(Path(site), "torch", "2.11.0+cu130")
    imported = subprocess.run(
        [python, "-c", "import torch.version; print(torch.version.__version__)"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
    found = look(python, "train.py")
    assert found.certain
    assert only(found) == {"torch": imported} == {"torch": "2.11.0+cu130"}


def test_a_name_is_looked_up_in_the_tasks_own_path(tmp_path: Path) -> None:
    environment_at(tmp_path / "a")
    environment_at(tmp_path / "b", "2.4.1")
    assert only(look("python", path=f"{tmp_path}/b/bin:{tmp_path}/a/bin")) == {"torch": "2.4.1"}
    assert only(look("python", path=f"{tmp_path}/a/bin:{tmp_path}/b/bin")) == {}


def test_a_path_is_taken_from_the_tasks_own_directory(tmp_path: Path) -> None:
    environment_at(tmp_path / ".venv", "2.10.0")
    assert only(look(".venv/bin/python", directory=tmp_path)) == {"torch": "2.10.0"}


@pytest.mark.parametrize(
    "first_line",
    [
        "#!{home}/bin/python",
        "#!{home}/bin/python -sE",
        "#!/usr/bin/env python",
        "#!/usr/bin/env -S python -u",
        "#!/bin/sh\n'''exec' {home}/bin/python \"$0\" \"$@\"\n' '''",
        "#!/bin/sh\n'''exec' \"{home}/bin/python\" \"$0\" \"$@\"\n' '''",
    ],
)
def test_a_console_script_is_followed_to_its_python(tmp_path: Path, first_line: str) -> None:
    home = tmp_path / "venv"
    environment_at(home, "2.11.0")
    script = program(tmp_path / "elsewhere" / "torchrun", first_line.format(home=home) + "\nimport torch\n")
    found = look(script, "--nproc-per-node=2", "train.py", path=home / "bin")
    assert found.certain
    assert only(found) == {"torch": "2.11.0"}


@pytest.mark.parametrize(
    "wrapper",
    [
        ("env",),
        ("env", "A=1", "B=2"),
        ("env", "-u", "A", "--unset=B"),
        ("nice", "-n", "5"),
        ("nohup",),
        ("timeout", "-k", "5", "60"),
        ("env", "A=1", "nice", "-n", "5", "stdbuf", "-oL"),
    ],
)
def test_what_only_wraps_a_command_is_looked_through(tmp_path: Path, wrapper: tuple[str, ...]) -> None:
    environment_at(tmp_path / "v", "2.11.0")
    path = f"{tmp_path}/v/bin:/usr/bin:/bin"
    found = look(*wrapper, "python", "train.py", path=path)
    assert found.certain
    assert only(found) == {"torch": "2.11.0"}


def test_variables_that_the_command_line_sets_are_reported(tmp_path: Path) -> None:
    environment_at(tmp_path / "v", "2.11.0")
    found = look("env", f"PATH={tmp_path}/v/bin", "-u", "B", "python")
    assert only(found) == {"torch": "2.11.0"}
    assert not found.reaches("PATH")
    assert not found.reaches("B")
    assert found.reaches("C")
    assert not look("env", "-i", tmp_path / "v/bin/python").reaches("C")


@pytest.mark.parametrize("command", [("bash", "run.sh"), ("sh", "-c", "python train.py"), ("./run.sh",), ("./binary",)])
def test_behind_a_shell_or_a_program_every_python_in_reach_is_a_guess(tmp_path: Path, command: tuple[str, ...]) -> None:
    for name, version in (("active", "2.11.0"), ("conda", "2.10.0"), ("first", "2.4.0")):
        environment_at(tmp_path / name, version)
    program(tmp_path / "run.sh", "#!/bin/bash\n")
    program(tmp_path / "binary", "\x7fELF")
    found = look(
        *command,
        directory=tmp_path,
        path=f"{tmp_path}/first/bin:/bin:/usr/bin",
        VIRTUAL_ENV=str(tmp_path / "active"),
        CONDA_PREFIX=str(tmp_path / "conda"),
        PYTHONNOUSERSITE="1",
    )
    assert not found.certain
    assert {"2.10.0", "2.11.0", "2.4.0"} <= set(found.versions("torch"))


@pytest.mark.parametrize("launcher", ["conda", "docker", "uv", "srun", "/opt/conda/bin/conda"])
def test_what_runs_a_command_elsewhere_says_nothing(tmp_path: Path, launcher: str) -> None:
    environment_at(tmp_path / "v", "2.11.0")
    found = look(launcher, "run", "python", path=tmp_path / "v" / "bin", VIRTUAL_ENV=str(tmp_path / "v"))
    assert (found.certain, found.interpreters) == (False, ())


def test_pythonpath_and_the_scripts_own_directory_come_first(tmp_path: Path) -> None:
    environment_at(tmp_path / "v", "2.11.0")
    python = tmp_path / "v" / "bin" / "python"
    package(tmp_path / "mine", "torch", "2.1.0")
    assert only(look(python, "x.py", PYTHONPATH=str(tmp_path / "mine"))) == {"torch": "2.1.0"}
    assert only(look(python, "x.py", PYTHONPATH="mine", directory=tmp_path)) == {"torch": "2.1.0"}
    assert only(look(python, "-E", "x.py", PYTHONPATH=str(tmp_path / "mine"))) == {"torch": "2.11.0"}
    assert only(look(python, tmp_path / "mine" / "x.py")) == {"torch": "2.1.0"}
    assert only(look(python, "-m", "train", directory=tmp_path / "mine")) == {"torch": "2.1.0"}
    assert only(look(python, "-I", "-m", "train", directory=tmp_path / "mine")) == {"torch": "2.11.0"}


def test_a_python_that_is_no_environment_has_its_prefix_and_the_home_directory(tmp_path: Path) -> None:
    """Such as conda's, or one built from source; with packages of `pip install --user`."""
    program(tmp_path / "conda" / "bin" / PYTHON)
    (tmp_path / "conda" / "bin" / "python").symlink_to(PYTHON)
    package(tmp_path / "conda" / "lib" / PYTHON / "site-packages", "torch", "2.5.1")
    package(tmp_path / "home" / ".local" / "lib" / PYTHON / "site-packages", "torch", "2.12.0")
    python, home = tmp_path / "conda" / "bin" / "python", str(tmp_path / "home")
    assert only(look(python)) == {"torch": "2.5.1"}
    assert only(look(python, HOME=home)) == {"torch": "2.12.0"}
    assert only(look(python, HOME=home, PYTHONNOUSERSITE="1")) == {"torch": "2.5.1"}
    assert only(look(python, "-s", HOME=home)) == {"torch": "2.5.1"}
    assert only(look(python, PYTHONUSERBASE=f"{home}/.local")) == {"torch": "2.12.0"}


def test_an_environment_with_the_systems_packages_has_both(tmp_path: Path) -> None:
    program(tmp_path / "system" / "bin" / PYTHON)
    package(tmp_path / "system" / "lib" / PYTHON / "site-packages", "torch", "2.5.1")
    environment_at(tmp_path / "v")
    assert only(look(tmp_path / "v/bin/python")) == {}
    home = tmp_path / "system" / "bin"
    (tmp_path / "v" / "pyvenv.cfg").write_text(f"home = {home}\ninclude-system-site-packages = true\n")
    assert only(look(tmp_path / "v/bin/python")) == {"torch": "2.5.1"}


def test_each_framework_is_found_by_its_installation_record(tmp_path: Path) -> None:
    site = environment_at(tmp_path / "v")
    package(site, "jax", "0.11.2").joinpath("version.py").write_text('_version = "0.11.2"\n__version__: str = _get()\n')
    package(site, "cupy", "14.2.0", "_version.py")
    (site / "tensorflow").mkdir()
    (site / "tensorflow_cpu-2.20.0.dist-info").mkdir()
    (site / "torch-2.11.0+cu130.dist-info").mkdir()  # an editable install: the package itself lies elsewhere
    (site / "torchvision-0.26.0.dist-info").mkdir()
    (site / "jaxtyping-0.3.11.dist-info").mkdir()
    assert only(look(tmp_path / "v/bin/python")) == {
        "torch": "2.11.0+cu130",
        "jax": "0.11.2",
        "tensorflow": "2.20.0",
        "cupy": "14.2.0",
    }


def test_a_framework_without_a_version_is_found_without_one(tmp_path: Path) -> None:
    package(environment_at(tmp_path / "v"), "torch", "x").joinpath("version.py").unlink()
    assert only(look(tmp_path / "v/bin/python")) == {"torch": ""}


def test_a_folder_of_that_name_is_no_framework(tmp_path: Path) -> None:
    (environment_at(tmp_path / "v") / "torch").mkdir()
    assert only(look(tmp_path / "v/bin/python")) == {}


# Hostile files: none may block, fill the memory or raise.


def test_a_pipe_in_the_place_of_a_file_is_not_opened(tmp_path: Path) -> None:
    site = environment_at(tmp_path / "v", "2.11.0")
    os.unlink(site / "torch" / "version.py")
    os.mkfifo(site / "torch" / "version.py")  # to open it would wait for a writer, for ever
    os.unlink(tmp_path / "v" / "pyvenv.cfg")
    os.mkfifo(tmp_path / "v" / "pyvenv.cfg")
    os.mkfifo(tmp_path / "script", 0o777)
    assert look(tmp_path / "v/bin/python").versions("torch") in ((), ("",))
    assert look(tmp_path / "script").interpreters == ()


def test_a_device_and_a_file_without_end_are_read_to_a_limit(tmp_path: Path) -> None:
    site = environment_at(tmp_path / "v", "2.11.0")
    version = site / "torch" / "version.py"
    version.unlink()
    version.symlink_to("/dev/zero")
    assert only(look(tmp_path / "v/bin/python")) == {"torch": ""}
    version.unlink()
    with version.open("wb") as file:
        file.truncate(2**40)  # sparse
    assert only(look(tmp_path / "v/bin/python")) == {"torch": ""}
    assert len(read_start(str(version))) == READ_LIMIT_BYTES


def test_loops_broken_text_and_odd_names_are_nothing(tmp_path: Path) -> None:
    site = environment_at(tmp_path / "v", "2.11.0")
    (tmp_path / "loop").symlink_to("loop")
    program(tmp_path / "a", f"#!{tmp_path}/b\n")
    program(tmp_path / "b", f"#!{tmp_path}/a\n")
    (site / "torch" / "version.py").write_bytes(b"\xff\xfe__version__ = \x00'2.11'")
    assert only(look(tmp_path / "v/bin/python")) == {"torch": ""}
    for odd in (tmp_path / "loop", tmp_path / "a", "", "x\0y", "/" * 5000, "a" * 300, tmp_path, "."):
        assert look(odd).interpreters == ()
    assert look().interpreters == ()
    assert find(["python"], {"PATH": "\0:" + ":" * 5000}, "/nowhere").interpreters == ()
    assert look(*["env"] * 50, "python").interpreters == ()


def test_a_version_is_never_more_than_a_version(tmp_path: Path) -> None:
    """Otherwise a link to another user's file would be read by a daemon that is root."""
    site = environment_at(tmp_path / "v", "2.11.0")
    (site / "torch" / "version.py").write_text("__version__ = 'a secret of another user'\n")
    assert only(look(tmp_path / "v/bin/python")) == {"torch": ""}


def test_a_huge_directory_is_listed_to_a_limit(tmp_path: Path) -> None:
    assert ENTRIES_LIMIT <= 100_000
    site = environment_at(tmp_path / "v")
    for number in range(1000):
        (site / f"torch-2.{number}.0.dist-info").touch()
    assert "torch" in only(look(tmp_path / "v/bin/python"))


def test_what_may_not_be_read_is_not_there(tmp_path: Path) -> None:
    if os.geteuid() == 0:
        pytest.skip("root may read everything")
    site = environment_at(tmp_path / "v", "2.11.0")
    (site / "torch" / "version.py").chmod(0)
    assert only(look(tmp_path / "v/bin/python")) == {"torch": ""}
    site.chmod(0)
    try:
        assert only(look(tmp_path / "v/bin/python")) == {}
    finally:
        site.chmod(0o755)
