"""BERT of transformers, from its configuration: masked language modelling in bf16."""

import argparse
import time

import torch
from transformers import BertConfig, BertForMaskedLM


def masked(tokens, mask_token, words):
    """15 % of the tokens are to be guessed; of these 80 % are masked and 10 % are replaced."""
    labels = tokens.clone()
    chosen = torch.rand(tokens.shape) < 0.15
    labels[~chosen] = -100
    dice = torch.rand(tokens.shape)
    inputs = torch.where(chosen & (dice < 0.8), mask_token, tokens)
    other = torch.randint(5, words, tokens.shape)
    return torch.where(chosen & (dice > 0.9), other, inputs), labels


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--tiny", action="store_true")
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    if args.tiny:
        batch, length = 2, 16
        config = BertConfig(
            vocab_size=100, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32
        )
    else:
        batch, length = args.batch, args.length
        config = BertConfig()

    model = BertForMaskedLM(config).to(args.device)
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.01)

    start, every = time.time(), max(1, args.steps // 20)
    for step in range(1, args.steps + 1):
        tokens = torch.randint(5, config.vocab_size, (batch, length))
        inputs, labels = masked(tokens, 4, config.vocab_size)
        with torch.autocast(args.device, dtype=torch.bfloat16):
            loss = model(input_ids=inputs.to(args.device), labels=labels.to(args.device)).loss
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        if step % every == 0 or step == args.steps:
            print(f"step {step}  loss {loss.item():.4f}  {time.time() - start:.2f} s", flush=True)


if __name__ == "__main__":
    main()
