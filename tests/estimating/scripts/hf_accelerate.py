"""An accelerate script: the optimizer is made before the model moves."""

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

accelerator = Accelerator(mixed_precision="bf16", gradient_accumulation_steps=2)
set_seed(1)
model = nn.Sequential(nn.Linear(256, 2048), nn.GELU(), nn.Linear(2048, 10))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
loader = DataLoader(TensorDataset(torch.randn(1024, 256), torch.randint(0, 10, (1024,))), batch_size=32, shuffle=True)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100)
model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
accelerator.print("on", accelerator.device, "of", accelerator.num_processes)
for epoch in range(3):
    model.train()
    for inputs, labels in loader:
        with accelerator.accumulate(model):
            loss = nn.functional.cross_entropy(model(inputs), labels)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        accelerator.print(accelerator.gather(loss.detach()).mean().item())
    accelerator.wait_for_everyone()
    accelerator.save_state("out")
