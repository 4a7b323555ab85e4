"""GPT-2 medium of transformers, from its configuration, fp32 with TF32 matrix products."""

import argparse
import time

import torch
from torch.utils.data import DataLoader, Dataset
from transformers import GPT2Config, GPT2LMHeadModel


class RandomTokens(Dataset):
    def __init__(self, texts, length, words):
        self.texts = torch.randint(0, words, (texts, length))

    def __len__(self):
        return len(self.texts)

    def __getitem__(self, index):
        return self.texts[index]


def batches(loader):
    while True:
        yield from loader


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--tiny", action="store_true")
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    torch.set_float32_matmul_precision("high")
    if args.tiny:
        batch, length, texts = 2, 16, 8
        config = GPT2Config(n_embd=16, n_layer=1, n_head=2, n_positions=16, vocab_size=100)
    else:
        batch, length, texts = args.batch, args.length, 1000
        config = GPT2Config(n_embd=1024, n_layer=24, n_head=16)

    loader = DataLoader(RandomTokens(texts, length, config.vocab_size), batch_size=batch, shuffle=True, drop_last=True)
    model = GPT2LMHeadModel(config).to(args.device)
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, weight_decay=0.1)

    start, every = time.time(), max(1, args.steps // 20)
    for step, tokens in zip(range(1, args.steps + 1), batches(loader)):
        tokens = tokens.to(args.device)
        loss = model(input_ids=tokens, labels=tokens).loss
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % every == 0 or step == args.steps:
            print(f"step {step}  loss {loss.item():.4f}  {time.time() - start:.2f} s", flush=True)


if __name__ == "__main__":
    main()
