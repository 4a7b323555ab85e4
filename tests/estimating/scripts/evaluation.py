"""Evaluates after each epoch with a batch that is sixteen times as large."""

import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

data = TensorDataset(torch.randn(2048, 256), torch.randint(0, 10, (2048,)))
training = DataLoader(data, batch_size=64, shuffle=True, drop_last=True)
validation = DataLoader(data, batch_size=1024) if "--without" not in sys.argv else None
model = nn.Sequential(nn.Linear(256, 4096), nn.ReLU(), nn.Linear(4096, 10)).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def evaluate():
    model.eval()
    right = 0
    if "--broken" in sys.argv:
        raise RuntimeError("evaluation is broken")
    with torch.no_grad():
        for inputs, labels in validation:
            right += (model(inputs.cuda()).argmax(1) == labels.cuda()).sum().item()
    print("right", right, flush=True)


for epoch in range(1000):
    model.train()
    for inputs, labels in training:
        loss = nn.functional.cross_entropy(model(inputs.cuda()), labels.cuda())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    if validation is not None:
        evaluate()
