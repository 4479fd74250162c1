"""The model that is fine-tuned: a tiny Llama, pre-trained on the spot by the first run in a folder.

Large language models have a few activations a thousand times larger than the rest, often in the hidden layer of an MLP.
A model of this size grows none, so it gets them by a change that leaves its function as it is, bit for bit in bfloat16
and float32: the up projection of one layer times 2¹⁶, the down projection divided by it. Powers of two only move the
exponent.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import torch

from ... import files
from ..settings import Settings
from .task import collate, draw_question, encode

MASSIVE = 2.0**16


def find_base(beside: Path, tokenizer: Any, cfg: Settings) -> Path:
    """The base model in a folder beside the runs: pre-trained by the first of them, loaded by all."""
    steps, massive = cfg.model.pretrain_steps, cfg.model.massive_activations
    folder = beside / f"lora-sft-base-{steps}{'' if massive else '-plain'}"
    if not folder.exists():
        print(f"pre-training the base model, {steps} steps, into {folder}", flush=True)
        model = pretrain(tokenizer, steps)
        if massive:
            make_massive(model)
        with files.atomic_folder(folder) as new:
            model.save_pretrained(new)
    return folder


def make_model(tokenizer: Any) -> Any:
    """A Llama of 80 thousand weights, not trained yet."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=64,
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )
    return LlamaForCausalLM(config)


def pretrain(tokenizer: Any, steps: int) -> Any:
    """A Llama that converts units, in several shapes but never the one asked for later; the same for every run."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = make_model(tokenizer)
        source = random.Random(0)
        optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 5e-3, total_steps=steps)
        for _ in range(steps):
            questions = [draw_question(source) for _ in range(32)]
            batch = collate(tokenizer, [encode(tokenizer, q, source.choice(q.shapes)) for q in questions])
            loss = model(**batch).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
    return model


@torch.no_grad()
def make_massive(model: Any) -> None:
    """The same function, with activations that only a wide range holds."""
    mlp = model.model.layers[0].mlp
    mlp.up_proj.weight.mul_(MASSIVE)
    mlp.down_proj.weight.div_(MASSIVE)
