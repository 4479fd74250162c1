"""The seven recommendations of RadioDiff's post-mortem, each tried alone."""

from __future__ import annotations

import math

from ..claims import Claim, Judgement, Runs, judge_by_fate


def _resumed(runs: Runs) -> Judgement:
    """Whether the lower rate of the config came into force after the resume."""
    lower = ("training.from_milestone=5", "optimizer.lr=6e-3", "optimizer.min_lr=6e-4")
    asked = runs.result("original", *lower)
    kept = runs.result("original", "training.from_milestone=5")
    if asked.first_bad_step == kept.first_bad_step and math.isclose(asked.lr, kept.lr):
        measured = f"the milestone brings the old rate back: lr {asked.lr:.0e} in force; dead at {asked.first_bad_step}"
        return Judgement(verdict="inert", measured=measured)
    return judge_by_fate(runs, "original", *lower)


def _left_alone(runs: Runs) -> Judgement:
    """What leaving the precision alone cost: the original with accelerate's bf16 in force."""
    old, new = runs.result("original"), runs.result("original", "training.amp=false")
    if new.first_bad_step is None:
        measured = f"dead at step {old.first_bad_step}; with amp: false all {new.steps} steps are finite"
        return Judgement(verdict="harmful", measured=measured)
    return Judgement(verdict="inert", measured=f"with amp: false it dies too, at step {new.first_bad_step}")


CLAIMS = (
    Claim(
        advice="replace NaN in the predictions",
        before="prediction",
        after="nan_to_num(prediction).clamp(±1e6)",
        why="the gradient behind it is NaN all the same, and reaches every parameter: leave the step out, and ask why",
        overrides=("advice=[replace_bad_predictions]",),
    ),
    Claim(
        advice="clamp the weights of the loss",
        before="2·exp(1 − t), exp(√t)",
        after="clamp(max=100)",
        why="for t in 0 … 1 they are at most 5.4: there was never anything to clamp",
        overrides=("advice=[clamp_weights]",),
    ),
    Claim(
        advice="replace a NaN loss",
        before="loss",
        after="nan_to_num(loss)",
        why="a loss of 0 whose gradient is NaN: the log looks perfect, the weights are gone",
        overrides=("advice=[replace_bad_loss]",),
    ),
    Claim(
        advice="a fifth of the learning rate",
        before="lr 3e-2, min_lr 3e-3",
        after="lr 6e-3, min_lr 6e-4",
        why="scores stay below 65504 for longer, and nothing is learned: bound the scores, and scale the latents",
        overrides=(
            "optimizer.lr=6e-3",
            "optimizer.min_lr=6e-4",
        ),
    ),
    Claim(
        advice="clip at 0.5",
        before="grad_clip_norm 1.0",
        after="0.5",
        why="Adam divides the scale of the gradients out again, and it is the scores that overflow, not the gradients",
        overrides=("training.grad_clip_norm=0.5",),
    ),
    Claim(
        advice="resume from a milestone with the lower rate",
        before="step 0",
        after="step 5, lr 6e-3",
        why="optimizer and scheduler come back with it, and with them the old rate: load the weights alone",
        measure=_resumed,
    ),
    Claim(
        advice="leave the precision alone, it is aligned",
        before="amp: true, fp16: false, bf16",
        after="the same",
        why="amp: true reaches an autocast whose default is float16, inside of accelerate's bf16: measure, do not read",
        measure=_left_alone,
    ),
)
