"""Two networks, two optimizers; the critic may step several times for each step of the generator."""

import sys

import torch
from torch import nn

critics = int(sys.argv[1]) if len(sys.argv) > 1 else 1
maker = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 784), nn.Tanh()).cuda()
critic = nn.Sequential(nn.Linear(784, 512), nn.LeakyReLU(0.2), nn.Linear(512, 1)).cuda()
make_step = torch.optim.Adam(maker.parameters(), 2e-4, betas=(0.5, 0.999))
critic_step = torch.optim.Adam(critic.parameters(), 2e-4, betas=(0.5, 0.999))
judge = nn.BCEWithLogitsLoss()
for round in range(100):
    for _ in range(critics):
        real = torch.rand(128, 784, device="cuda")
        made = maker(torch.randn(128, 64, device="cuda"))
        yes, no = torch.ones(128, 1, device="cuda"), torch.zeros(128, 1, device="cuda")
        loss = judge(critic(real), yes) + judge(critic(made.detach()), no)
        critic_step.zero_grad()
        loss.backward()
        critic_step.step()
    loss = judge(critic(maker(torch.randn(128, 64, device="cuda"))), yes)
    make_step.zero_grad()
    loss.backward()
    make_step.step()
    print(round, float(loss), flush=True)
