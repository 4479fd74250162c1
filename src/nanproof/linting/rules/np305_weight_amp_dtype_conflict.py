"""NP305: weights in one half-precision format, arithmetic in the other."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from ..rule import Found, Rule
from ..source import Module
from ..training import in_tests
from ..weights import keep_float32, trainer_precision, trainings

_OTHER = {"float16": "bf16", "bfloat16": "fp16"}


def check(node: ast.Module, module: Module) -> Iterator[Found]:
    if in_tests(module):
        return
    told: set[ast.AST] = set()
    for training in trainings(module):
        modes = trainer_precision(module, training)
        if modes != {_OTHER[training.dtype]} or training.cast in told:
            continue
        told.add(training.cast)
        mode = next(iter(modes))
        yield Found(
            node=training.cast,
            message=f"`{training.model}` has {training.dtype} weights, and is trained in {mode}",
            help="keep the weights in float32; the arithmetic is the trainer's business",
            edits=keep_float32(module, training.cast),
        )


RULE = Rule(
    code="NP305",
    name="weight-amp-dtype-conflict",
    what="Finds float16 weights that are trained with bfloat16 autocast or `bf16=True`, and bfloat16 weights that "
    "are trained with `fp16=True` or a GradScaler.",
    why="Each format gives what the other lacks, and the mixture has neither: float16 weights overflow at 65,504 "
    "and round 1 + 2e-4 to 1, bfloat16 arithmetic keeps 8 bits (1 + 3e-3 is 1.0). With `bf16=True` no scaler runs, "
    "so float16 weights and their optimizer are unprotected: Adam's eps 1e-8 is 0 in float16 (NP306).",
    bad="""import torch
from transformers import AutoModelForSequenceClassification, Trainer, TrainingArguments

model = AutoModelForSequenceClassification.from_pretrained("roberta-base", dtype=torch.float16)
args = TrainingArguments("out", bf16=True)
Trainer(model=model, args=args).train()
""",
    good="""import torch
from transformers import AutoModelForSequenceClassification, Trainer, TrainingArguments

model = AutoModelForSequenceClassification.from_pretrained("roberta-base", dtype=torch.float32)
args = TrainingArguments("out", bf16=True)
Trainer(model=model, args=args).train()
""",
    miss="""import torch
from transformers import AutoModelForCausalLM, Trainer

def main(name, args, data):
    model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float16)
    Trainer(model=model, args=args, train_dataset=data).train()  # args.bf16 is set elsewhere
""",
    false_alarm="The model with the other format is frozen, and only another one is trained.",
    fix="unsafe",
    fix_note="The weights stay in float32, which takes twice their memory.",
    nodes=(ast.Module,),
    words=("half", "float16", "fp16"),
    check=check,
)
