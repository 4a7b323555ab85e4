"""Finds the frameworks that a given Python would import. Its module path is computed from files; nothing is run.

The directories are searched in the order of `sys.path`; the first one that has a framework counts. Covered: virtual
environments (with or without the system's packages), conda, the system's own Python (also Debian's directories),
packages in the home directory, PYTHONPATH, and the directory of the script. Not covered: `.pth` files and import hooks.
A framework that is reachable only through them is found by the record that its installer left, or not at all.

The paths come from a user: they may lead to a pipe, a device, an endless file or a loop of links. Only regular files
are read, only their first READ_LIMIT_BYTES, and no path raises: what cannot be read counts as missing.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator, Mapping
from itertools import islice

READ_LIMIT_BYTES = 16 * 1024
ENTRIES_LIMIT = 20_000  # entries read of a directory; the largest site-packages have some thousand
NAMES_LIMIT = 200  # matching names returned of a directory
FRAMEWORKS = ("torch", "jax", "tensorflow", "cupy")

# The file in which a package states its version, which is decisive when it is imported.
_VERSION_FILES = {"torch": "version.py", "jax": "version.py", "cupy": "_version.py"}
_VERSION = re.compile(
    r"""^_{0,2}version(?:__)?(?:\s*:\s*\w+)?\s*=\s*["']([0-9][0-9A-Za-z.+!-]{0,60})["']""", re.MULTILINE
)
# One framework has several names in the package index.
_DISTRIBUTIONS = {
    "torch": "torch",
    "jax": "jax",
    "tensorflow": "tensorflow(_cpu|_gpu|_intel|_rocm)?|tf_nightly(_cpu|_gpu)?",
    "cupy": "cupy(_cuda[0-9a-z]+|_rocm_[0-9_]+)?",
}
# Records of installers: torch-2.11.0+cu130.dist-info, torch-2.5.1-py3.11.egg-info.
_RECORDS = {
    framework: re.compile(rf"({names})-(?P<version>[0-9][0-9A-Za-z.+!_]{{0,60}})(-py[0-9.]+)?\.(dist-info|egg-info)")
    for framework, names in _DISTRIBUTIONS.items()
}
_WANTED = re.compile("|".join((*FRAMEWORKS, *(f"({names})-.*-info" for names in _DISTRIBUTIONS.values()))))
_LIBRARIES = re.compile(r"(python|pypy)3(\.[0-9]+)?t?")


def versions_in(python: str, arguments: list[str], environment: Mapping[str, str], directory: str) -> dict[str, str]:
    """Framework -> version; "" if it is installed and its version is unknown."""
    found: dict[str, str] = {}
    for folder in dict.fromkeys(_module_path(python, arguments, environment, directory)):
        names = matching_names(folder, _WANTED)
        for framework in FRAMEWORKS:
            if framework not in found and (version := _version(folder, names, framework)) is not None:
                found[framework] = version
    return found


def _version(folder: str, names: tuple[str, ...], framework: str) -> str | None:
    """The version in this folder; None if the framework is not there."""
    if framework in names and framework in _VERSION_FILES:
        stated = _VERSION.search(read_start(os.path.join(folder, framework, _VERSION_FILES[framework])))
        if stated:
            return stated[1]
    for name in names:
        if record := _RECORDS[framework].fullmatch(name):
            return record["version"]
    return "" if framework in names and os.path.isfile(os.path.join(folder, framework, "__init__.py")) else None


def _module_path(python: str, arguments: list[str], environment: Mapping[str, str], directory: str) -> Iterator[str]:
    flags = _flags(arguments)
    if not flags & set("IP"):
        yield _beside_script(arguments, directory)
    if not flags & set("IE"):
        for folder in environment.get("PYTHONPATH", "").split(":")[:64]:
            if folder:
                yield os.path.join(directory, folder)
    home = os.path.dirname(os.path.dirname(os.path.normpath(python)))
    settings = _venv_settings(home)
    if settings is None:
        real = os.path.realpath(python)
        prefix = environment.get("PYTHONHOME", "").split(":")[0] or os.path.dirname(os.path.dirname(real))
        yield from _system(prefix, _user_base(environment, flags), os.path.basename(real))
        return
    yield from _site(home)
    base = settings.get("home", "")
    if settings.get("include-system-site-packages", "").lower() == "true" and base:
        yield from _system(os.path.dirname(os.path.normpath(base)), _user_base(environment, flags), "")


def _flags(arguments: list[str]) -> set[str]:
    """The one-letter options before the script."""
    flags: set[str] = set()
    for word in arguments:
        if not word.startswith("-") or word.startswith("--") or word == "-":
            break
        flags |= set(word[1:])
        if word[1] in "cm":
            break
    return flags


def _beside_script(arguments: list[str], directory: str) -> str:
    """The first entry of `sys.path`: the script's directory, or the one it is started in (`-m`, `-c`)."""
    script = next((word for word in arguments if not word.startswith("-")), "")
    if not script.endswith(".py"):
        return directory
    return os.path.dirname(os.path.realpath(os.path.join(directory, script)))


def _venv_settings(home: str) -> dict[str, str] | None:
    text = read_start(os.path.join(home, "pyvenv.cfg"))
    if not text:
        return None
    pairs = (line.partition("=") for line in text.splitlines() if "=" in line)
    return {name.strip().lower(): value.strip() for name, _, value in pairs}


def _user_base(environment: Mapping[str, str], flags: set[str]) -> str | None:
    """Directory to which `pip install --user` installs; None if that is switched off."""
    if environment.get("PYTHONNOUSERSITE") or flags & set("Is"):
        return None
    home = environment.get("HOME")
    return environment.get("PYTHONUSERBASE") or (os.path.join(home, ".local") if home else None)


def _system(prefix: str, user_base: str | None, name: str) -> Iterator[str]:
    """`name` of the interpreter, such as python3.11, selects one of several versions below a prefix."""
    if user_base is not None:
        yield from _site(user_base, name)
    if os.path.normpath(prefix) == "/usr":  # Debian and Ubuntu
        yield from _site("/usr/local", name)
    yield from _site(prefix, name)
    yield os.path.join(prefix, "lib", "python3", "dist-packages")


def _site(prefix: str, name: str = "") -> Iterator[str]:
    for library in ("lib", "lib64"):
        folders = matching_names(os.path.join(prefix, library), _LIBRARIES)
        exact = [entry for entry in folders if entry == name]
        for folder in exact or folders:
            yield os.path.join(prefix, library, folder, "site-packages")
            yield os.path.join(prefix, library, folder, "dist-packages")


# Reading. The kernel decides what this process may see.


def is_program(path: str) -> bool:
    return os.path.isfile(path) and os.access(path, os.X_OK)


def read_start(path: str) -> str:
    """The start of a regular file; empty if it cannot be read. O_NONBLOCK: a pipe in its place must not block."""
    if not os.path.isfile(path):
        return ""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
        try:
            data = os.read(fd, READ_LIMIT_BYTES) if stat.S_ISREG(os.fstat(fd).st_mode) else b""
        finally:
            os.close(fd)
    except (OSError, ValueError):
        return ""
    return data.decode("utf-8", "replace")


def matching_names(path: str, wanted: re.Pattern[str]) -> tuple[str, ...]:
    """The names in a directory that match, sorted; empty if it cannot be read."""
    try:
        with os.scandir(path) as entries:
            found = (entry.name for entry in islice(entries, ENTRIES_LIMIT) if wanted.fullmatch(entry.name))
            return tuple(sorted(islice(found, NAMES_LIMIT)))
    except (OSError, ValueError):
        return ()
