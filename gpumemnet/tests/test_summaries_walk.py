"""The outputs of printed models, worked out from one input, against what torch makes of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from carma.errors import Usage
from gpumemnet.summaries import read_text

torch = pytest.importorskip("torch")
if TYPE_CHECKING:

    class Module:
        def __call__(self, x: Any) -> Any: ...

else:
    Module = torch.nn.Module
nn = torch.nn


class Residual(Module):
    """As torchvision writes it: one ReLU for all, and a shortcut that is printed last."""

    def __init__(self, taken: int, given: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(taken, given, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(given)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(given, given, 3, 1, 1, bias=False)
        self.downsample = nn.Sequential(nn.Conv2d(taken, given, 1, stride), nn.BatchNorm2d(given))

    def forward(self, x: Any) -> Any:
        return self.conv2(self.relu(self.bn1(self.conv1(x)))) + self.downsample(x)


class Widening(Residual):
    """Its inner layers are as wide as its input, so that width alone does not tell where the shortcut begins."""

    def __init__(self) -> None:
        super().__init__(16, 16, 2)


class Projecting(Module):
    """Its first layer is as wide as its input, and nothing in its names tells where the last one begins."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(16, 16, 3, 2, 1)
        self.second = nn.Conv2d(16, 32, 1)
        self.proj = nn.Conv2d(16, 32, 1, 2)

    def forward(self, x: Any) -> Any:
        return self.second(self.first(x)) + self.proj(x)


class Fire(Module):
    def __init__(self, taken: int, squeezed: int, each: int) -> None:
        super().__init__()
        self.squeeze = nn.Conv2d(taken, squeezed, 1)
        self.act = nn.ReLU()
        self.one = nn.Conv2d(squeezed, each, 1)
        self.three = nn.Conv2d(squeezed, each, 3, padding=1)

    def forward(self, x: Any) -> Any:
        x = self.act(self.squeeze(x))
        return torch.cat([self.one(x), self.three(x)], 1)


class Growing(Module):
    """Dense: each layer takes all that the ones before it made."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            [nn.Sequential(nn.BatchNorm2d(w), nn.Conv2d(w, 8, 3, padding=1)) for w in (16, 24, 32)]
        )

    def forward(self, x: Any) -> Any:
        for layer in self.layers:
            x = torch.cat([x, layer(x)], 1)
        return x


class Branches(Module):
    def __init__(self) -> None:
        super().__init__()
        self.branch1 = nn.Sequential(nn.Conv2d(16, 16, 3, 2, 1), nn.Conv2d(16, 4, 1))
        self.branch2 = nn.Sequential(nn.Conv2d(16, 16, 1), nn.Conv2d(16, 8, 3, 2, 1))
        self.branch3 = nn.Sequential(nn.MaxPool2d(3, 2, 1), nn.Conv2d(16, 12, 1))

    def forward(self, x: Any) -> Any:
        return torch.cat([self.branch1(x), self.branch2(x), self.branch3(x)], 1)


class Squeeze(Module):
    def __init__(self) -> None:
        super().__init__()
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.fc1 = nn.Conv2d(16, 4, 1)
        self.fc2 = nn.Conv2d(4, 16, 1)
        self.gate = nn.Sigmoid()

    def forward(self, x: Any) -> Any:
        return x * self.gate(self.fc2(self.fc1(self.pool(x))))


class Pooled(Module):
    """One number a channel without a module that says so."""

    def __init__(self, body: Any, head: Any) -> None:
        super().__init__()
        self.body = body
        self.head = head

    def forward(self, x: Any) -> Any:
        return self.head(self.body(x).mean((2, 3)))


class Mlp(Module):
    """As Hugging Face prints it: the activation behind both linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(32, 64)
        self.down = nn.Linear(64, 32)
        self.act = nn.GELU()

    def forward(self, x: Any) -> Any:
        return self.down(self.act(self.up(x)))


class Attention(Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(32, 96)
        self.proj = nn.Linear(32, 32)

    def forward(self, x: Any) -> Any:
        return self.proj(self.qkv(x)[..., :32])


class Words(Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(100, 32)
        self.blocks = nn.ModuleList([nn.Sequential(nn.LayerNorm(32), Attention(), Mlp()) for _ in range(2)])
        self.pooled = nn.LSTM(32, 12, bidirectional=True, batch_first=True)
        self.head = nn.Linear(24, 100)

    def forward(self, x: Any) -> Any:
        x = self.words(x)
        for block in self.blocks:
            x = block(x)
        return self.head(self.pooled(x)[0])


STEM = nn.Conv2d(3, 16, 7, stride=2, padding=3)
MODELS = {
    "a chain": (nn.Sequential(nn.Linear(20, 30), nn.BatchNorm1d(30), nn.Dropout(), nn.Linear(30, 4)), "20"),
    "flattened": (
        nn.Sequential(STEM, nn.MaxPool2d(3, 2, ceil_mode=True), nn.Flatten(), nn.Linear(16 * 8 * 8, 10)),
        "3x32x32",
    ),
    "residual": (nn.Sequential(STEM, Residual(16, 16, 1), Residual(16, 32, 2), nn.AdaptiveMaxPool2d((2, 3))),
                 "3x32x48"),
    "as wide as its input": (nn.Sequential(STEM, Widening()), "3x32x32"),
    "a branch without a name": (nn.Sequential(STEM, Projecting()), "3x32x32"),
    "rounded up, but for a window that begins outside": (nn.MaxPool2d(2, 3, 1, ceil_mode=True), "3x16x16"),
    "branches side by side": (nn.Sequential(STEM, Fire(16, 4, 8), nn.MaxPool2d(2), Fire(16, 2, 6)), "3x32x32"),
    "growing": (Pooled(nn.Sequential(STEM, Growing(), nn.BatchNorm2d(40)), nn.Linear(40, 5)), "3x32x32"),
    "named branches": (nn.Sequential(STEM, Branches(), nn.AvgPool2d(2), nn.Conv2d(24, 4, 1)), "3x32x32"),
    "squeezed": (nn.Sequential(STEM, Squeeze(), nn.Conv2d(16, 4, 3)), "3x32x32"),
    "dropout before the head": (Pooled(STEM, nn.Sequential(nn.Dropout(), nn.Linear(16, 5))), "3x32x32"),
    "up again": (
        nn.Sequential(STEM, nn.ConvTranspose2d(16, 8, 3, 2, 1, output_padding=1), nn.Upsample(scale_factor=2),
                      nn.ZeroPad2d((1, 2, 3, 4)), nn.Conv2d(8, 8, 3, padding="same", dilation=2), nn.PixelShuffle(2)),
        "3x32x32",
    ),
    "signals": (nn.Sequential(nn.Conv1d(4, 8, 5, 2, 2), nn.GroupNorm(2, 8), nn.AvgPool1d(2), nn.GLU(1)), "4x100"),
    "volumes": (nn.Sequential(nn.Conv3d(2, 4, 3), nn.InstanceNorm3d(4), nn.MaxPool3d(2), nn.Unflatten(1, (2, 2))),
                "2x9x9x9"),
    "words": (Words(), "17"),
}  # fmt: skip


def called(model: Any, sample: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    """Of each module without children the last output; the batch is 2."""
    found: dict[str, tuple[int, ...]] = {}

    def note(name: str) -> Any:
        def hook(_module: Any, _given: Any, made: Any) -> None:
            found[name] = tuple((made[0] if isinstance(made, tuple) else made).shape)

        return hook

    for name, module in model.named_modules():
        if not list(module.children()):
            module.register_forward_hook(note(name))
    words = len(sample) == 1 and any(isinstance(module, nn.Embedding) for module in model.modules())
    given = torch.zeros((2, *sample), dtype=torch.long) if words else torch.zeros(2, *sample)
    with torch.no_grad():
        model(given)
    return found


@pytest.mark.parametrize("name", MODELS)
def test_the_outputs_are_those_of_torch(name: str) -> None:
    model, shape = MODELS[name]
    sample = tuple(int(size) for size in shape.split("x"))
    read = read_text(str(model), batch=2, sample=sample)
    assert {layer.name: layer.output for layer in read.described.layers} == called(model, sample)
    assert read.described.parameters == sum(parameter.numel() for parameter in model.parameters())
    assert read.described.input == (2, *sample)


def test_joined_branches_are_a_remark() -> None:
    model, _ = MODELS["growing"]
    assert any("joined in 3 places" in remark for remark in read_text(str(model), sample=(3, 32, 32)).remarks)


def test_as_many_channels_as_were_made_can_be_joined_and_no_more() -> None:
    first, second = "(0): Conv2d(3, 8, kernel_size=(1, 1))", "(1): Conv2d(%d, 4, kernel_size=(1, 1))"
    for channels in (11, 8):  # with the input, without
        read_text(f"Net(\n  {first}\n  {second % channels}\n)", sample=(3, 9, 9))
    with pytest.raises(Usage, match="it takes 12 channels"):
        read_text(f"Net(\n  {first}\n  {second % 12}\n)", sample=(3, 9, 9))


def test_attention_of_torch_makes_one_output() -> None:
    text = str(nn.Sequential(nn.Linear(8, 16), nn.MultiheadAttention(16, 2)))
    outputs = {layer.name: layer.output for layer in read_text(text, batch=3, sample=(5, 8)).described.layers}
    assert outputs == {"0": (3, 5, 16), "1": (3, 5, 16), "1.out_proj": ()}


@pytest.mark.parametrize(
    ("model", "sample", "told"),
    [
        (nn.Sequential(nn.Conv2d(3, 8, 3)), (1, 32, 32), "line 2 .* 1x32x32: it takes 3 channels"),
        (nn.Sequential(nn.Linear(784, 10)), (3, 28, 28), "line 2 .* 3x28x28: it takes 784 features"),
        (nn.Sequential(nn.Linear(3, 10)), (3, 28, 28), "line 2 .* 3x28x28: it takes 3 features"),
        (nn.Sequential(nn.Conv2d(1, 6, 5), nn.Linear(400, 9)), (1, 28, 28), "line 3 .* 6x24x24: it takes 400 features"),
        (nn.Sequential(nn.Conv2d(3, 8, 3)), (4, 32, 32), "line 2 .* it takes 3 channels"),
        (nn.Sequential(nn.Conv2d(3, 8, 3)), (128,), "line 2 .* it takes 3 channels"),
        (nn.Sequential(nn.Linear(3, 8)), (5,), "line 2 .* it takes 3 features"),
        (nn.Sequential(nn.Flatten(), nn.MaxPool2d(2)), (3, 8, 8), "line 3 .* channels and 2 sizes"),
        (nn.Sequential(nn.Conv2d(3, 8, 7)), (3, 4, 4), "line 2 .* makes nothing"),
        (nn.Sequential(nn.Embedding(10, 4)), (3, 8, 8), "line 2 .* number of words"),
    ],
)
def test_what_does_not_fit_is_an_error_with_its_line(model: Any, sample: tuple[int, ...], told: str) -> None:
    with pytest.raises(Usage, match=told):
        read_text(str(model), sample=sample)


@pytest.mark.parametrize(
    "module",
    [
        "MaxPool2d(kernel_size=?)",
        "MaxPool2d(kernel_size=2, stride=0)",
        "Upsample(scale_factor=None)",
        "Upsample(scale_factor=1e999)",
        "PixelShuffle(upscale_factor=0)",
        "Unflatten(dim=x)",
        "AdaptiveAvgPool2d(output_size=(1, 1, 1))",
        "GLU(dim=9)",
    ],
)
def test_what_is_printed_may_not_tell_the_output(module: str) -> None:
    with pytest.raises(Usage, match="line 2"):
        read_text(f"Net(\n  (0): {module}\n)", sample=(3, 8, 8))
