"""Shapes for batch normalisation across processes: torch has kernels for cards only, none that give shapes alone."""

_kept = []


def install(torch):
    library = torch.library.Library("aten", "IMPL")
    _kept.append(library)

    def channels(input):
        dtype = torch.float64 if input.dtype == torch.float64 else torch.float32
        return torch.empty((input.shape[1],), dtype=dtype, device="meta")

    def stats(input, eps):
        return channels(input), channels(input)

    def gathered(input, *_rest):
        return channels(input), channels(input)

    def elements(input, *_rest):
        return torch.empty_like(input)

    def reduced(grad, input, mean, invstd, weight, input_g, weight_g, bias_g):
        like = weight if weight is not None else mean
        nothing = torch.empty((0,), dtype=like.dtype, device="meta")
        return (
            channels(input) if input_g else nothing,
            channels(input) if input_g else nothing,
            torch.empty_like(like) if weight_g else nothing,
            torch.empty_like(like) if bias_g else nothing,
        )

    def input_grad(grad, input, *_rest):
        return torch.empty_like(input)

    for name, kernel in (
        ("batch_norm_stats", stats),
        ("batch_norm_gather_stats", gathered),
        ("batch_norm_gather_stats_with_counts", gathered),
        ("batch_norm_elemt", elements),
        ("batch_norm_backward_reduce", reduced),
        ("batch_norm_backward_elemt", input_grad),
    ):
        if not torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", "Meta"):
            library.impl(name, kernel, "Meta")
