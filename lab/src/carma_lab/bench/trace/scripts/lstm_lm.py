"""A language model with an LSTM, trained with truncated back-propagation through time."""

import argparse
import time

import torch
import torch.nn.functional as F
from torch import nn


class LanguageModel(nn.Module):
    def __init__(self, words, width, layers):
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        self.lstm = nn.LSTM(width, width, layers, dropout=0.5)
        self.dropout = nn.Dropout(0.5)
        self.decoder = nn.Linear(width, words)

    def forward(self, text, state):
        out, state = self.lstm(self.dropout(self.embedding(text)), state)
        return self.decoder(self.dropout(out)), state


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=5000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--batch", type=int, default=20)
    parser.add_argument("--bptt", type=int, default=35)
    parser.add_argument("--width", type=int, default=650)
    parser.add_argument("--tiny", action="store_true")
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    words, width, batch, length = (50, 8, 2, 400) if args.tiny else (10_000, args.width, args.batch, 40_000)

    text = torch.randint(0, words, (length, batch), device=args.device)
    model = LanguageModel(words, width, 2).to(args.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    state, place = None, 0

    start, every = time.time(), max(1, args.steps // 20)
    for step in range(1, args.steps + 1):
        if place + args.bptt + 1 >= length:
            state, place = None, 0
        inputs, targets = text[place : place + args.bptt], text[place + 1 : place + args.bptt + 1]
        place += args.bptt
        scores, state = model(inputs, state)
        state = tuple(part.detach() for part in state)
        loss = F.cross_entropy(scores.flatten(0, 1), targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.25)
        optimizer.step()
        if step % every == 0 or step == args.steps:
            print(f"step {step}  loss {loss.item():.4f}  {time.time() - start:.2f} s", flush=True)


if __name__ == "__main__":
    main()
