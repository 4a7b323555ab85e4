"""No training at all: the script ends by itself."""

import torch
from torch import nn

model = nn.Sequential(nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 10)).cuda().eval()
with torch.inference_mode():
    for _ in range(4):
        print(model(torch.randn(256, 1024).cuda()).argmax(1).cpu()[:3].tolist(), flush=True)
