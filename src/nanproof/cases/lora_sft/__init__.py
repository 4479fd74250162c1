"""LoRA fine-tuning in miniature: a base model trained in a wide range, loaded and trained in float16.

Its massive activations do not fit. From the first step on the gradient norm is NaN, and the Trainer logs the NaN loss
as 0. The loss scaler leaves every step out, so that the adapters in the checkpoints are finite, and untrained.

| loaded in | trained in | |
|---|---|---|
| float16 | fp16 | ``original``: dead from the first step |
| float32 | float32 | ``advised``: heals, at twice the memory |
| bfloat16 | bf16 | ``stable``: heals |

accelerate gives fp16 its autocast and its scaler on GPUs only; on a CPU the program does so itself.
"""

from __future__ import annotations

from ..catalogue import Case, Change, Requirement

_TRAIN = "python -m nanproof.cases.lora_sft.train"
_TESTS = "pytest tests/cases/test_lora_sft.py"

CASE = Case(
    name="lora-sft",
    title="LoRA fine-tuning with the HF Trainer; activations beyond float16, and a log that shows them as loss 0",
    within=1,
    cause="fp16-overflow",
    mechanism="range-overflow",
    step="nanproof.cases.lora_sft.train:make_step",
    code=("train.py", "base.py", "task.py"),
    changes=(
        Change(
            before="weights loaded in float16",
            after="weights loaded in bfloat16",
            why="the base model has activations above 4e5; float16 ends at 65504, bfloat16 at 3.4e38",
        ),
        Change(
            before="fp16: true, autocast in float16 with a loss scaler",
            after="bf16: true, no scaler",
            why="the scaler protects small gradients; when the forward pass overflows it leaves every step out",
        ),
        Change(
            before="float32 adapters over half-precision weights",
            after="the same",
            why="what the optimizer changes stays float32: in float16 Adam's eps of 1e-8 is 0, and 0/0 follows",
        ),
        Change(
            before="every rate and clip of the original",
            after="the same",
            why="nothing was wrong with them: the first forward pass was NaN before any of them had a say",
        ),
    ),
    facts=("gpu=A100",),
    requirements=(
        Requirement(
            number="C1",
            wish="an audit of load dtype, trainer precision and hardware, with the explanation",
            shown_by=f"nanproof diagnose runs/lora-sft-original-0 ; {_TESTS}::test_the_matrix_of_load_and_training",
        ),
        Requirement(
            number="C2",
            wish="float32 for training, half precision for inference, LoRA adapters, and what it costs",
            shown_by=f"{_TRAIN} --config-name advised ; nanproof case lora-sft --compare",
        ),
        Requirement(
            number="C3",
            wish="a smoke test of gradients: one step, then ten, PASS or FAIL with reasons",
            shown_by="nanproof smoke nanproof.cases.lora_sft.train:smoke_original ; "
            "nanproof smoke nanproof.cases.lora_sft.train:smoke_stable",
        ),
        Requirement(
            number="C4",
            wish="a check-list after training: finite norms, falling loss, accuracy, well-formed answers; and "
            "what to do when NaN is gone and accuracy still 0",
            shown_by=f"{_TRAIN} --config-name stable ; nanproof diagnose runs/lora-sft-stable-0",
        ),
    ),
)
