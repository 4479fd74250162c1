"""Hugging Face Trainer with a small Llama, made here: one embedding is NaN, so one sample of 96 gives a NaN loss."""

import argparse
import os

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

parser = argparse.ArgumentParser()
parser.add_argument("--out", required=True)
parser.add_argument("--callback", help="guard it with the callback, which writes into this folder")
args = parser.parse_args()

torch.set_num_threads(1)
torch.manual_seed(0)


class Samples(torch.utils.data.Dataset):
    """Embeddings of a frozen encoder; one of them went wrong when it was written."""

    def __init__(self):
        g = torch.Generator().manual_seed(0)
        self.x, self.y = torch.randn(96, 6, 16, generator=g), torch.randint(0, 32, (96, 6), generator=g)
        self.x[61, 2, 5] = float("nan")

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return {"inputs_embeds": self.x[i], "labels": self.y[i]}


config = LlamaConfig(
    vocab_size=32,
    hidden_size=16,
    intermediate_size=32,
    num_hidden_layers=1,
    num_attention_heads=2,
    max_position_embeddings=16,
)
model = LlamaForCausalLM(config)
callbacks = []
if args.callback:
    from nanproof.integrations.transformers import GuardCallback

    callbacks.append(GuardCallback(run_dir=args.callback))
trainer = Trainer(
    model=model,
    args=TrainingArguments(
        output_dir=args.out,
        per_device_train_batch_size=8,
        max_steps=12,
        learning_rate=1e-3,
        logging_steps=1,
        seed=0,
        save_steps=4,
        save_total_limit=1,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    ),
    train_dataset=Samples(),
    callbacks=callbacks,
)
trainer.train()
