"""A language model fine-tuned as run_clm does it: datasets first, a collator, a schedule per step, no Trainer."""

import argparse

import datasets
import torch
from torch.utils.data import DataLoader
from transformers import GPT2Config, GPT2LMHeadModel, default_data_collator, get_scheduler

parser = argparse.ArgumentParser()
parser.add_argument("--out", required=True)
parser.add_argument("--without", type=int, default=-1, help="leave this batch out")
args = parser.parse_args()

torch.set_num_threads(1)
torch.manual_seed(0)
tokens = torch.randint(0, 64, (48, 16)).tolist()
data = datasets.Dataset.from_dict(
    {"input_ids": tokens, "labels": tokens, "weight": [1.0] * 29 + [float("inf")] + [1.0] * 18}
)
loader = DataLoader(data.with_format("torch"), batch_size=4, collate_fn=default_data_collator)
model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=16, n_embd=16, n_layer=1, n_head=2))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
schedule = get_scheduler("linear", optimizer, num_warmup_steps=2, num_training_steps=12)
model.train()
for i, batch in enumerate(loader):
    if i == args.without:
        continue
    weight = batch.pop("weight").mean()
    (model(**batch).loss * weight).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    schedule.step()
    optimizer.zero_grad()

torch.save(
    {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "schedule": schedule.state_dict()}, args.out
)
