"""Hugging Face Trainer, the model made by its configuration; further words go to TrainingArguments (`name=value`)."""

import ast
import sys

import torch
from torch.utils.data import Dataset
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainingArguments,
)


class Tokens(Dataset):
    def __init__(self, count, length, classes):
        self.tokens = torch.randint(0, 1000, (count, length))
        self.classes = classes

    def __len__(self):
        return len(self.tokens)

    def __getitem__(self, index):
        item = {"input_ids": self.tokens[index], "attention_mask": torch.ones_like(self.tokens[index])}
        return {**item, "labels": torch.tensor(index % 2) if self.classes else self.tokens[index].clone()}


if sys.argv[1] == "gpt2":
    config = GPT2Config(vocab_size=1000, n_positions=128, n_embd=128, n_layer=3, n_head=4)
    config.use_cache = False
    model = GPT2LMHeadModel(config)
else:
    model = BertForSequenceClassification(
        BertConfig(vocab_size=1000, hidden_size=128, num_hidden_layers=3, num_attention_heads=4, intermediate_size=512)
    )
words = dict(word.split("=") for word in sys.argv[2:])
words = {name: ast.literal_eval(value) if value[0] in "0123456789TF" else value for name, value in words.items()}
arguments = TrainingArguments("out", **{"num_train_epochs": 3, "logging_steps": 1, "report_to": [], **words})
data = Tokens(256, 128, sys.argv[1] == "bert")
trainer = Trainer(model=model, args=arguments, train_dataset=data, eval_dataset=Tokens(64, 128, sys.argv[1] == "bert"))
trainer.train()
trainer.save_model()
print(trainer.evaluate())
