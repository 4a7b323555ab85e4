"""What a trial need not do: worker processes for data, first values of large weights, compiling."""

import functools
import inspect

from . import deferred_patches, report

_LARGE = 1 << 16  # elements; small tensors are given their values, which cost nothing and may be looked at


def install(torch):
    _plain_loaders(torch)
    _no_large_initialisation(torch)
    _no_compiling(torch)
    _no_dynamo(torch)
    torch._C._jit_override_can_fuse_on_gpu(False)  # TorchScript would compile kernels
    _no_extensions()
    torch.Tensor.pin_memory = lambda tensor, *_a, **_w: tensor
    torch.Tensor.is_pinned = lambda *_a, **_w: False


def _plain_loaders(torch):
    """Batches are made in this process: a forked worker cannot be followed, and shapes are the same."""
    loader = torch.utils.data.DataLoader
    make = loader.__init__
    signature = inspect.signature(make)
    plain = {"num_workers": 0, "pin_memory": False, "timeout": 0, "multiprocessing_context": None,
             "prefetch_factor": None, "persistent_workers": False}  # fmt: skip

    @functools.wraps(make)  # some libraries make a loader anew by looking at the names here
    def __init__(self, *args, **words):
        bound = signature.bind(self, *args, **words)
        for name, value in plain.items():
            if name in bound.arguments:
                bound.arguments[name] = value
        make(*bound.args, **bound.kwargs)

    loader.__init__ = __init__


def _no_large_initialisation(torch):
    init = torch.nn.init
    for name in ("uniform_", "normal_", "trunc_normal_", "xavier_uniform_", "xavier_normal_", "kaiming_uniform_",
                 "kaiming_normal_", "orthogonal_", "sparse_"):  # fmt: skip
        function = getattr(init, name)

        def skip(tensor, *args, _function=function, **words):
            return tensor if tensor.numel() > _LARGE or tensor.is_cuda else _function(tensor, *args, **words)

        setattr(init, name, skip)


def _no_compiling(torch):
    def note():
        report.flags.add("compile")
        report.warn("torch.compile was left out: the figures are those of the plain model, the compiled one takes less")

    def compile(model=None, **_words):
        note()
        if isinstance(model, torch.nn.Module):
            model.__dict__["_orig_mod"] = model  # not by setattr: it is no part of itself
        return model if model is not None else lambda function: function

    torch.compile = compile
    torch.nn.Module.compile = lambda *_args, **_words: note()


def _no_dynamo(torch):
    """Torch wraps some functions so that its compiler leaves them alone, and imports the compiler for that: seconds."""
    from torch.utils import checkpoint

    for holder in (torch.optim.Optimizer, checkpoint):
        for value in list(vars(holder).values()):
            inner = getattr(value, "__wrapped__", None)
            made_by = getattr(getattr(value, "__code__", None), "co_filename", "")
            if inner is not None and made_by.endswith("_compile.py"):
                inner.__dynamo_disable = inner


def _no_extensions():
    """An extension of the user's own cannot run without a GPU, and nobody knows what it takes."""

    def refuse(name=None, *_args, **_words):
        report.refuse("unsupported", f"the script builds a CUDA extension of its own ({name}), whose memory is unknown")

    def change(module):
        module.load = module.load_inline = refuse

    deferred_patches.when_imported("torch.utils.cpp_extension", change)
