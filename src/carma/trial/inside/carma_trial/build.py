"""Compiles the shim (C++) once against the headers of the installed torch, and loads it."""

import ctypes
import hashlib
import os
import shlex
import shutil
import subprocess
import sysconfig
import tempfile

_HERE = os.path.dirname(os.path.abspath(__file__))
_FILES = ("shim.cpp", "shim_card.h", "shim_kernels.h", "shim_memory.h", "shim_scratch.h")
SOURCES = [os.path.join(_HERE, name) for name in _FILES]
library = None


class CannotBuild(Exception):
    pass


def load(torch_folder):
    global library
    if library is None:
        try:
            library = ctypes.CDLL(_built(torch_folder), mode=ctypes.RTLD_GLOBAL)
        except OSError as error:
            raise CannotBuild(f"CARMA's C++ part does not load into this torch: {error}") from error
        _declare(library)
    return library


def _declare(lib):
    lib.carma_attach.restype = ctypes.c_char_p
    lib.carma_attach.argtypes = [ctypes.c_char_p, ctypes.c_int, ctypes.c_int]
    lib.carma_note.argtypes = [ctypes.c_int, ctypes.c_uint32, ctypes.c_uint64, ctypes.c_int64]
    lib.carma_override.argtypes = [ctypes.c_char_p, ctypes.c_char_p]
    lib.carma_blas.argtypes = [ctypes.c_char_p, ctypes.c_uint32]
    lib.carma_set_stream.argtypes = [ctypes.c_int, ctypes.c_int64]
    lib.carma_stream.restype = ctypes.c_int64
    lib.carma_made_up.restype = ctypes.c_int64
    lib.carma_events.restype = ctypes.c_uint64
    lib.carma_read.argtypes = [ctypes.c_void_p, ctypes.c_uint64]
    lib.carma_ops.argtypes = [ctypes.c_char_p, ctypes.c_uint64]
    lib.carma_ops.restype = ctypes.c_uint64


def _built(torch_folder):
    name = f"shim-{_key(torch_folder)}.so"
    for folder in _folders():
        path = os.path.join(folder, name)
        if os.path.exists(path):
            return path
    return _compile(torch_folder, name)


def _folders():
    """Directories for compiled files: the one that CARMA gives and keeps between trials, then the user's cache."""
    given = os.environ.get("CARMA_TRACE_BUILD")
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return [folder for folder in (given, os.path.join(home, "carma", "shim")) if folder]


def _key(torch_folder):
    version = os.path.join(torch_folder, "version.py")
    digest = hashlib.sha256()
    for path in (*SOURCES, version):
        with open(path, "rb") as file:
            digest.update(file.read())
    digest.update(torch_folder.encode())
    digest.update(sysconfig.get_platform().encode())
    return digest.hexdigest()[:16]


def _compile(torch_folder, name):
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++") or shutil.which("c++")
    if not compiler:
        raise CannotBuild("a trial run needs a C++ compiler, once for each version of torch: install g++")
    include, lib = os.path.join(torch_folder, "include"), os.path.join(torch_folder, "lib")
    if not os.path.isdir(include):
        raise CannotBuild(f"a trial run needs the headers of torch, and {include} does not exist")
    trouble = ""
    for folder in [*_folders(), tempfile.gettempdir()]:
        try:
            os.makedirs(folder, exist_ok=True)
            handle, unfinished = tempfile.mkstemp(suffix=".so", dir=folder)
            os.close(handle)
        except OSError as error:
            trouble = str(error)
            continue
        _run(unfinished, [
            *shlex.split(compiler), "-O1", "-std=c++20", "-fPIC", "-shared", "-w", SOURCES[0], "-o", unfinished,
            "-I" + include, "-I" + os.path.join(include, "torch", "csrc", "api", "include"),
            f"-D_GLIBCXX_USE_CXX11_ABI={_abi(lib)}",
            "-L" + lib, "-ltorch_cpu", "-lc10", "-Wl,-rpath," + lib,
        ])  # fmt: skip
        path = os.path.join(folder, name)
        os.replace(unfinished, path)
        return path
    raise CannotBuild(f"no directory for CARMA's C++ part can be written: {trouble}")


def _run(unfinished, command):
    environment = {key: value for key, value in os.environ.items() if key not in ("LD_PRELOAD", "PYTHONPATH")}
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", env=environment)
        output, code = done.stderr.splitlines(), done.returncode
    except OSError as error:
        output, code = [str(error)], 1
    if code:
        os.unlink(unfinished)
        lines = [line for line in output if "error" in line] or output or [f"{command[0]} ended with code {code}"]
        raise CannotBuild(f"CARMA's C++ part does not compile against this torch: {lines[0]}")


def _abi(lib):
    """Which string class this torch was built with; wheels before 2.6 have the old one."""
    with open(os.path.join(lib, "libc10.so"), "rb") as file:
        return int(b"__cxx11" in file.read())
