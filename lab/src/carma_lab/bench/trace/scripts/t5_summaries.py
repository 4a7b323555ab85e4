"""A small T5 of transformers, from its configuration, trained on made-up pairs of texts."""

import argparse
import time

import torch
from transformers import T5Config, T5ForConditionalGeneration, get_linear_schedule_with_warmup


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--tiny", action="store_true")
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    batch, source, target, width, layers, words = (
        (2, 12, 6, 16, 1, 100) if args.tiny else (args.batch, 128, 32, 256, 4, 16_000)
    )

    config = T5Config(
        vocab_size=words,
        d_model=width,
        d_kv=width // 4,
        d_ff=4 * width,
        num_layers=layers,
        num_heads=4,
        decoder_start_token_id=0,
    )
    model = T5ForConditionalGeneration(config).to(args.device)
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    schedule = get_linear_schedule_with_warmup(optimizer, min(100, args.steps), args.steps + 1)
    texts = torch.randint(2, words, (64 if args.tiny else 20_000, source + target))

    start, every = time.time(), max(1, args.steps // 20)
    for step in range(1, args.steps + 1):
        chosen = texts[torch.randint(0, len(texts), (batch,))].to(args.device)
        output = model(input_ids=chosen[:, :source], labels=chosen[:, source:].contiguous())
        loss = output.loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step % every == 0 or step == args.steps:
            print(f"step {step}  loss {loss.item():.4f}  {time.time() - start:.2f} s", flush=True)


if __name__ == "__main__":
    main()
