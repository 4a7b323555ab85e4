"""A small transformer: mixed precision of either kind, recomputation, accumulation, compiling."""

import argparse
import contextlib

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

parser = argparse.ArgumentParser()
parser.add_argument("--amp", choices=("fp16", "bf16", "old"))
parser.add_argument("--pure", action="store_true", help="all of it in bfloat16")
parser.add_argument("--checkpoint", action="store_true")
parser.add_argument("--accumulate", type=int, default=1)
parser.add_argument("--compile", action="store_true")
parser.add_argument("--parallel", action="store_true", help="nn.DataParallel")
parser.add_argument("--optimizer", default="AdamW")
options = parser.parse_args()


class Net(nn.Module):
    def __init__(self, width=256, depth=4, words=1000):
        super().__init__()
        self.embed = nn.Embedding(words, width)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, 4 * width, batch_first=True, norm_first=True) for _ in range(depth)
        )
        self.head = nn.Linear(width, words)

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if options.checkpoint else block(x)
        return self.head(x)


torch.backends.cuda.matmul.allow_tf32 = True
torch.set_float32_matmul_precision("high")
model = Net().cuda()
if options.pure:
    model = model.to(torch.bfloat16)
if options.parallel:
    model = nn.DataParallel(model)
    print(isinstance(model, nn.DataParallel), model.module.head)
if options.compile:
    model = torch.compile(model, mode="max-autotune")
    print(type(model._orig_mod).__name__)
    model.compile()


def loss_of(logits, tokens):
    return nn.functional.cross_entropy(logits.flatten(0, 1).float(), tokens.flatten())


if options.compile:
    loss_of = torch.compile(torch.compile(dynamic=False)(loss_of))
optimizer = getattr(torch.optim, options.optimizer)(model.parameters(), lr=1e-4)
scaler = torch.amp.GradScaler("cuda", enabled=options.amp == "fp16")
if options.amp == "old":
    from torch.cuda.amp import GradScaler, autocast

    scaler, context = GradScaler(), autocast
elif options.amp:
    dtype = torch.float16 if options.amp == "fp16" else torch.bfloat16

    def context():
        return torch.autocast("cuda", dtype=dtype)
else:
    context = contextlib.nullcontext

tokens = torch.randint(0, 1000, (16, 128))


def closure():
    optimizer.zero_grad()
    loss = loss_of(model(tokens.cuda()), tokens.cuda())
    loss.backward()
    return loss


for step in range(100):
    if options.optimizer == "LBFGS":
        optimizer.step(closure)
        continue
    for _ in range(options.accumulate):
        with context():
            loss = loss_of(model(tokens.cuda()), tokens.cuda()) / options.accumulate
        scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)
    print(step, loss.item(), scaler.get_scale(), flush=True)
