"""What a trial run leaves out: worker processes for data, first values of large weights, compiling, extensions."""

import inspect

import torch

from . import replaces, report, when_imported

_LARGE = 1 << 16  # elements; smaller tensors are initialised, which costs nothing, because scripts may read them


def install():
    _plain_loaders()
    _no_large_initialisation()
    _no_compiling()
    torch._C._jit_override_can_fuse_on_gpu(False)  # TorchScript would compile kernels
    when_imported("torch.utils.cpp_extension", _refuse_extensions)
    when_imported("torch.profiler.profiler", _profile_cpu_only)
    torch.Tensor.pin_memory = lambda tensor, *_a, **_w: tensor
    torch.Tensor.is_pinned = lambda *_a, **_w: False


def _plain_loaders():
    """Batches are made in this process: a forked worker cannot be followed, and shapes are the same."""
    loader = torch.utils.data.DataLoader
    signature = inspect.signature(loader.__init__)
    plain = {"num_workers": 0, "pin_memory": False, "timeout": 0, "multiprocessing_context": None,
             "prefetch_factor": None, "persistent_workers": False}  # fmt: skip

    @replaces(loader, "__init__")
    def made(make, self, *args, **words):
        bound = signature.bind(self, *args, **words)
        for name, value in plain.items():
            if name in bound.arguments:
                bound.arguments[name] = value
        make(*bound.args, **bound.kwargs)


def _no_large_initialisation():
    @replaces(torch.nn.init, "uniform_", "normal_", "trunc_normal_", "xavier_uniform_", "xavier_normal_",
              "kaiming_uniform_", "kaiming_normal_", "orthogonal_", "sparse_")  # fmt: skip
    def skip(function, tensor, *args, **words):
        return tensor if tensor.numel() > _LARGE or tensor.is_cuda else function(tensor, *args, **words)


def _no_compiling():
    def note():
        report.flags.add("compile")
        report.warn("torch.compile was left out: the figures are for eager mode, compiled models need less")

    def compile(model=None, **_words):
        note()
        if isinstance(model, torch.nn.Module):
            model.__dict__["_orig_mod"] = model  # not by setattr: it is no part of itself
        return model if model is not None else lambda function: function

    torch.compile = compile
    torch.nn.Module.compile = lambda *_args, **_words: note()


def _refuse_extensions(module):
    """A CUDA extension of the script cannot run without a GPU, and its memory is unknown."""

    def refuse(name=None, *_args, **_words):
        report.refuse("unsupported", f"the script builds a CUDA extension ({name}), whose memory is unknown")

    module.load = module.load_inline = refuse


def _profile_cpu_only(module):
    """Profiles the CPU only. With CUDA the profiler fails, with a stack trace, at each operator: seconds for each
    step."""

    @replaces(module._KinetoProfile, "__init__")
    def made(make, self, **words):
        make(self, **{**words, "activities": [module.ProfilerActivity.CPU]})
