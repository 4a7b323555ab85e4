"""What a healthy training finds when it looks at its numbers: they are finite. The values themselves are unknown."""

_MOST = 1 << 18  # elements whose values are carried along


def install(torch):
    for name, answer in (
        ("isfinite", True),
        ("isnan", False),
        ("isinf", False),
        ("isposinf", False),
        ("isneginf", False),
    ):
        function = _knowing(torch, getattr(torch, name), answer)
        setattr(torch, name, function)
        setattr(torch.Tensor, name, function)
    whole = torch.Tensor.all

    def all(self, *args, **words):
        found = whole(self, *args, **words)
        return _set(torch, found, True) if getattr(self, "_carma_true", False) else found

    torch.Tensor.all = all
    torch.all = lambda input, *args, **words: all(input, *args, **words)


def _knowing(torch, function, answer):
    def known(input, *args, **words):
        found = function(input, *args, **words)
        if not isinstance(found, torch.Tensor) or not found.is_cuda or torch.ops.carma.shadow(input) is not None:
            return found
        if answer:
            found._carma_true = True  # for large ones, which carry no values
        return _set(torch, found, answer)

    return known


def _set(torch, found, answer):
    if found.is_cuda and found.numel() <= _MOST:
        torch.ops.carma.remember(found, torch.full(found.shape, answer))
    return found
