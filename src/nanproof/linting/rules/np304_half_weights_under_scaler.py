"""NP304: float16 weights together with a gradient scaler."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from ..rule import Found, Rule
from ..source import Module
from ..training import in_tests
from ..weights import keep_float32, trainer_precision, trainings


def check(node: ast.Module, module: Module) -> Iterator[Found]:
    if in_tests(module):
        return
    told: set[ast.AST] = set()
    for training in trainings(module):
        if training.dtype != "float16" or training.cast in told:
            continue
        modes = trainer_precision(module, training)
        if not training.trainer and module.facts.scaler_step and module.facts.scaler:
            modes.add("fp16")
        if "fp16" not in modes:
            continue
        told.add(training.cast)
        yield Found(
            node=training.cast,
            message=f"`{training.model}` has float16 weights, which its gradient scaler refuses",
            help="keep the weights in float32 and let autocast compute in float16 (or use bfloat16)",
            edits=keep_float32(module, training.cast),
        )


RULE = Rule(
    code="NP304",
    name="half-weights-under-scaler",
    what="Finds a model that is loaded or converted to float16 and then trained with a GradScaler: in a loop, by "
    '`TrainingArguments(fp16=True)`, or by an Accelerator with `mixed_precision="fp16"`.',
    why="A GradScaler divides the gradients by the scale in place, and float16 gradients would lose what scaling "
    'has saved: `scaler.step` raises "Attempting to unscale FP16 gradients." Where a library works around that, '
    "the weights themselves are too coarse: in float16 1 + 2e-4 is 1.0 (half the spacing at 1 is 4.9e-4), so most "
    "updates at lr 1e-4 vanish, and everything beyond ±65,504 is Inf. Mixed precision means float32 weights and "
    "float16 arithmetic.",
    bad="""import torch

def main(build, loader, criterion):
    model = build().cuda().half()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cuda")
    for x, y in loader:
        optimizer.zero_grad()
        loss = criterion(model(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
""",
    good="""import torch

def main(build, loader, criterion):
    model = build().cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cuda")
    for x, y in loader:
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            loss = criterion(model(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
""",
    miss="""import torch
from transformers import AutoModelForCausalLM, Trainer

def main(name, args, data):
    model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float16)
    Trainer(model=model, args=args, train_dataset=data).train()  # args.fp16 is set elsewhere
""",
    false_alarm="The weights that are trained are others than those in float16. Files that mention LoRA, "
    "quantization, apex or DeepSpeed, which keep float32 weights beside the others, are not looked at.",
    fix="unsafe",
    fix_note="The conversion is taken out (`.half()`), or `dtype=torch.float16` becomes `torch.float32`: the "
    "weights take twice the memory.",
    nodes=(ast.Module,),
    words=("half", "float16", "fp16"),
    check=check,
)
