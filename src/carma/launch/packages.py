"""Which frameworks a given Python would import: its module path worked out from files, as Python itself would do it.

In the order of `sys.path`, the first one found counts. Covered: virtual environments (with or without the system's
packages), conda, the system's own Python (also Debian's directories), packages in the home directory, PYTHONPATH, and
what lies beside the script. Not followed: `.pth` files and import hooks. What only those lead to is seen by the record
that its installer left, or not at all, which counts as not there.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping

from carma.launch.peek import Peek

FRAMEWORKS = ("torch", "jax", "tensorflow", "cupy")

# Where a package says its version itself, which is what counts when it is imported.
_VERSION_FILES = {"torch": "version.py", "jax": "version.py", "cupy": "_version.py"}
_VERSION = re.compile(
    r"""^_{0,2}version(?:__)?(?:\s*:\s*\w+)?\s*=\s*["']([0-9][0-9A-Za-z.+!-]{0,60})["']""", re.MULTILINE
)
# The same framework goes by several names in the index.
_DISTRIBUTIONS = {
    "torch": "torch",
    "jax": "jax",
    "tensorflow": "tensorflow(_cpu|_gpu|_intel|_rocm)?|tf_nightly(_cpu|_gpu)?",
    "cupy": "cupy(_cuda[0-9a-z]+|_rocm_[0-9_]+)?",
}
# What installers leave: torch-2.11.0+cu130.dist-info, torch-2.5.1-py3.11.egg-info.
_RECORDS = {
    framework: re.compile(rf"({names})-(?P<version>[0-9][0-9A-Za-z.+!_]{{0,60}})(-py[0-9.]+)?\.(dist-info|egg-info)")
    for framework, names in _DISTRIBUTIONS.items()
}
_WANTED = re.compile("|".join((*FRAMEWORKS, *(f"({names})-.*-info" for names in _DISTRIBUTIONS.values()))))
_LIBRARIES = re.compile(r"(python|pypy)3(\.[0-9]+)?t?")


def versions_in(
    peek: Peek, python: str, arguments: list[str], environment: Mapping[str, str], directory: str
) -> dict[str, str]:
    """Framework -> version; "" when it is there and does not say which."""
    found: dict[str, str] = {}
    for folder in dict.fromkeys(_module_path(peek, python, arguments, environment, directory)):
        names = peek.names(folder, _WANTED)
        for framework in FRAMEWORKS:
            if framework not in found and (version := _version(peek, folder, names, framework)) is not None:
                found[framework] = version
    return found


def _version(peek: Peek, folder: str, names: tuple[str, ...], framework: str) -> str | None:
    """None: it is not in this folder."""
    if framework in names and framework in _VERSION_FILES:
        told = _VERSION.search(peek.text(os.path.join(folder, framework, _VERSION_FILES[framework])))
        if told:
            return told[1]
    for name in names:
        if record := _RECORDS[framework].fullmatch(name):
            return record["version"]
    return "" if framework in names and peek.is_file(os.path.join(folder, framework, "__init__.py")) else None


def _module_path(
    peek: Peek, python: str, arguments: list[str], environment: Mapping[str, str], directory: str
) -> Iterator[str]:
    flags = _flags(arguments)
    if not flags & set("IP"):
        yield _beside_script(arguments, directory)
    if not flags & set("IE"):
        for folder in environment.get("PYTHONPATH", "").split(":")[:64]:
            if folder:
                yield os.path.join(directory, folder)
    home = os.path.dirname(os.path.dirname(os.path.normpath(python)))
    settings = _venv_settings(peek, home)
    if settings is None:
        real = os.path.realpath(python)
        prefix = environment.get("PYTHONHOME", "").split(":")[0] or os.path.dirname(os.path.dirname(real))
        yield from _system(peek, prefix, _user_base(environment, flags), os.path.basename(real))
        return
    yield from _site(peek, home)
    base = settings.get("home", "")
    if settings.get("include-system-site-packages", "").lower() == "true" and base:
        yield from _system(peek, os.path.dirname(os.path.normpath(base)), _user_base(environment, flags), "")


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


def _venv_settings(peek: Peek, home: str) -> dict[str, str] | None:
    text = peek.text(os.path.join(home, "pyvenv.cfg"))
    if not text:
        return None
    pairs = (line.partition("=") for line in text.splitlines() if "=" in line)
    return {name.strip().lower(): value.strip() for name, _, value in pairs}


def _user_base(environment: Mapping[str, str], flags: set[str]) -> str | None:
    """Where `pip install --user` puts things; None when that is switched off."""
    if environment.get("PYTHONNOUSERSITE") or flags & set("Is"):
        return None
    home = environment.get("HOME")
    return environment.get("PYTHONUSERBASE") or (os.path.join(home, ".local") if home else None)


def _system(peek: Peek, prefix: str, user_base: str | None, name: str) -> Iterator[str]:
    """`name` of the real file, python3.11: of several versions below one prefix it is that one."""
    if user_base is not None:
        yield from _site(peek, user_base, name)
    if os.path.normpath(prefix) == "/usr":  # Debian and Ubuntu
        yield from _site(peek, "/usr/local", name)
    yield from _site(peek, prefix, name)
    yield os.path.join(prefix, "lib", "python3", "dist-packages")


def _site(peek: Peek, prefix: str, name: str = "") -> Iterator[str]:
    for library in ("lib", "lib64"):
        folders = peek.names(os.path.join(prefix, library), _LIBRARIES)
        exact = [entry for entry in folders if entry == name]
        for folder in exact or folders:
            yield os.path.join(prefix, library, folder, "site-packages")
            yield os.path.join(prefix, library, folder, "dist-packages")
