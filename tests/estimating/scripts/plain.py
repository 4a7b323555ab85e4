"""A plain loop: options and a configuration file, workers for data, clipping, a schedule, an average, a checkpoint."""

import argparse
import copy
import json
import pathlib

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Images(Dataset):
    def __init__(self, count):
        self.data = np.random.default_rng(0).random((count, 3, 32, 32), dtype=np.float32)

    def __len__(self):
        return len(self.data)

    def __getitem__(self, index):
        return torch.from_numpy(self.data[index]), index % 10


parser = argparse.ArgumentParser()
parser.add_argument("--config", default="config.json")
parser.add_argument("--batch-size", type=int)
parser.add_argument("--half", action="store_true")
parser.add_argument("--ema", action="store_true")
parser.add_argument("--resume")
parser.add_argument("--out", default="out")
options = parser.parse_args()
config = json.loads(pathlib.Path(options.config).read_text())
batch = options.batch_size or config["batch_size"]

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
free, total = torch.cuda.mem_get_info()
if free < 2**30:
    raise SystemExit("the card is full")
model = nn.Sequential(
    nn.Conv2d(3, config["width"], 3, padding=1), nn.BatchNorm2d(config["width"]), nn.ReLU(inplace=True),
    nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(16 * config["width"], 1024), nn.ReLU(), nn.Linear(1024, 10),
).to(device)  # fmt: skip
if options.half:
    model.half()
average = copy.deepcopy(model) if options.ema else None
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1e-2, total_steps=100)
if options.resume:
    saved = torch.load(options.resume, map_location=device)
    model.load_state_dict(saved["model"])
loader = DataLoader(Images(batch * 8), batch, shuffle=True, num_workers=2, pin_memory=True, persistent_workers=True,
                    prefetch_factor=4)  # fmt: skip
pathlib.Path(options.out).mkdir(exist_ok=True)
best = float("inf")
for epoch in range(3):
    for images, labels in loader:
        images, labels = images.to(device, non_blocking=True), labels.to(device, non_blocking=True)
        loss = nn.functional.cross_entropy(model(images.half() if options.half else images).float(), labels)
        optimizer.zero_grad()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if average is not None:
            with torch.no_grad():
                for kept, new in zip(average.parameters(), model.parameters()):
                    kept.lerp_(new, 0.01)
        if torch.isnan(loss) or not torch.isfinite(norm):
            raise SystemExit("it diverged")
        print(f"epoch {epoch} loss {loss.item():.3f} lr {schedule.get_last_lr()[0]:.5f}", flush=True)
        if loss.item() < best:
            best = loss.item()
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, f"{options.out}/best.pt")
            torch.load(f"{options.out}/best.pt", map_location="cpu")
