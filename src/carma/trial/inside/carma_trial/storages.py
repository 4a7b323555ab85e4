"""Storages on the emulated GPU, and checkpoints: of what the script saves, the shapes are remembered and restored."""

import os

import torch

from . import replaces, report

_saved = {}  # path -> what was saved there
_SMALL = 4096  # elements that are kept with their values


def install():
    _storages()
    _checkpoints()


def _storages():
    """A CPU build makes no storage on a GPU: copies of models and loaded checkpoints ask for one."""
    kind = torch.UntypedStorage
    make = kind.__new__

    def __new__(cls, *args, device=None, **words):
        if device is not None and torch.device(device).type == "cuda" and (not args or isinstance(args[0], int)):
            count = args[0] if args else 0
            return torch.empty(count, dtype=torch.uint8, device=device).untyped_storage()
        if device is not None:
            words["device"] = device
        return make(cls, *args, **words)

    @replaces(kind, "resize_")
    def resize_(resize, self, count):
        if self.device.type != "cuda":
            return resize(self, count)
        if not hasattr(torch.ops.carma, "resize_storage"):
            report.refuse(
                "unsupported",
                "the script resizes storages (as FSDP does), which a trial run cannot follow with this torch",
            )
        window = torch.empty(0, dtype=torch.uint8, device=self.device).set_(self)
        torch.ops.carma.resize_storage(window, count)
        return self

    kind.__new__ = staticmethod(__new__)


class _SavedTensor:
    """A tensor of a checkpoint: its shape, and its values where they are few and on the CPU."""

    def __init__(self, tensor):
        self.shape, self.dtype, self.device = tuple(tensor.shape), tensor.dtype, tensor.device
        self.grad = isinstance(tensor, torch.nn.Parameter)
        few = tensor.numel() <= _SMALL and not tensor.is_cuda and tensor.layout == torch.strided
        self.values = tensor.detach().clone() if few else None

    def restored(self, place):
        device = self.device if place is None else torch.device(place)
        if self.values is None:
            made = torch.empty(self.shape, dtype=self.dtype, device=device)
        else:
            made = self.values.to(device)
        return torch.nn.Parameter(made, self.grad) if self.grad and made.is_floating_point() else made


def _checkpoints():
    @replaces(torch, "save")
    def save(write, obj, f, *args, **words):  # parameters have torch's names: scripts may pass them by name
        path = _path(f)
        if path is None:
            write(obj, f, *args, **words)
            return
        with open(path, "wb"):
            _saved[path] = _map(obj, _SavedTensor, torch.Tensor)

    @replaces(torch, "load")
    def load(read, f, map_location=None, *args, **words):
        path = _path(f)
        if path not in _saved or os.path.getsize(path):
            return read(f, map_location, *args, **words)
        place = map_location if isinstance(map_location, (str, int, torch.device)) else None
        return _map(_saved[path], lambda kept: kept.restored(place), _SavedTensor)


def _path(target):
    """None for a target that is no file."""
    if not isinstance(target, (str, bytes)) and not hasattr(target, "__fspath__"):
        target = getattr(target, "name", None)  # of an open file
    return os.path.realpath(os.fsdecode(target)) if target and not isinstance(target, int) else None


def _map(value, change, kind):
    """Changes the values of this kind inside containers; other values stay."""
    if isinstance(value, kind):
        return change(value)
    if isinstance(value, dict):
        mapped = {key: _map(each, change, kind) for key, each in value.items()}
        return mapped if type(value) is dict else _like(value, mapped)
    if type(value) in (list, tuple, set):
        return type(value)(_map(each, change, kind) for each in value)
    return value


def _like(value, mapped):
    """A dict of the same class; a plain dict if the class cannot be constructed from one."""
    try:
        return type(value)(mapped)
    except Exception:
        return mapped
