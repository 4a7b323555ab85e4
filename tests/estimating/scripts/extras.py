"""Parts of torch that scripts touch in passing."""

import torch
import torch._dynamo
import torch.compiler
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import ProfilerActivity, profile, record_function, schedule

try:
    import wandb
except ImportError:
    wandb = None
try:
    from torch.utils.tensorboard import SummaryWriter
except ImportError:
    SummaryWriter = None

torch._dynamo.config.suppress_errors = True


@torch.compiler.disable
def report(loss):
    print(loss.item(), torch.cuda.memory_allocated() > 0, torch.cuda.get_device_name(0), flush=True)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.mix = nn.Linear(64, 192)

    def forward(self, x):
        q, k, v = self.mix(x).chunk(3, -1)
        with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]):
            return nn.functional.scaled_dot_product_attention(q[:, None], k[:, None], v[:, None], is_causal=True)


model = Attention().cuda()
optimizer = torch.optim.AdamW(model.parameters(), fused=True)
side = torch.cuda.Stream()
begun, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
with profile(
    activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], schedule=schedule(wait=1, warmup=1, active=1)
) as p:
    for step in range(10):
        begun.record()
        torch.cuda.nvtx.range_push("step")
        with torch.cuda.stream(side), record_function("data"):
            batch = torch.randn(8, 64, 64).pin_memory().cuda(non_blocking=True)
        torch.cuda.current_stream().wait_stream(side)
        batch.record_stream(torch.cuda.current_stream())
        with torch.backends.cuda.sdp_kernel(enable_flash=True, enable_math=True, enable_mem_efficient=True):
            loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        torch.cuda.nvtx.range_pop()
        ended.record()
        torch.cuda.synchronize()
        begun.elapsed_time(ended)
        report(loss)
        p.step()
