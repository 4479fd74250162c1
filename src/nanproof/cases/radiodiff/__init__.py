"""RadioDiff in miniature: latent diffusion that draws radio maps, and the float16 that nobody had asked for.

accelerate's config file says bf16. The trainer's own ``amp: true`` opens a second autocast inside accelerate's, float16
by default and without a loss scaler, and the inner one wins. Attention scores without 1/√d then grow past 65504.
"""

from __future__ import annotations

from ..catalogue import Case, Change, Requirement

_TRAIN = "python -m nanproof.cases.radiodiff.train"
_TESTS = "pytest tests/cases/test_radiodiff.py"

CASE = Case(
    name="radiodiff",
    title="latent diffusion for radio maps; attention scores too large for a float16 that nobody had asked for",
    within=40,
    cause="amp-misuse",
    mechanism="range-overflow",
    step="nanproof.cases.radiodiff.train:make_step",
    code=("model.py", "diffusion.py", "train.py"),
    changes=(
        Change(
            before="amp: true opens float16's autocast inside of accelerate's bf16",
            after="amp: false; accelerate's bf16 is the only one",
            why="the innermost autocast wins, and bf16 reaches 3.4e38 where float16 ends at 65504",
        ),
        Change(
            before="scores are q·k",
            after="scores are q·k/√d of normalized q and k, times a learned gain of at most 10",
            why="the softmax may become sharp by its gain, but no longer by weights that drift",
        ),
        Change(
            before="latents of deviation 0.1 under noise of deviation 1 (scale_factor 0.3)",
            after="latents of deviation 1 (scale_factor 3)",
            why="the schedule and the linear guess are made for data as large as the noise",
        ),
        Change(
            before="lr 3e-2 from the second step on",
            after="lr 3e-3 after 50 steps of warm-up",
            why="Adam's first steps are as long as the learning rate, whatever the gradients",
        ),
        Change(
            before="60 steps of 8 maps",
            after="250 steps of 16 maps",
            why="time to reach the target; none of it is needed to stay finite",
        ),
    ),
    requirements=(
        Requirement(
            number="B1",
            wish="NaN checks at three levels: inputs, predictions, loss components; exploding loss weights",
            shown_by=f"nanproof run -m nanproof.cases.radiodiff.train ; {_TESTS}::test_three_levels_are_told_apart",
        ),
        Requirement(
            number="B2",
            wish="detection at once with the step's number, recovery, a log",
            shown_by="nanproof run --run-dir runs/guard -m nanproof.cases.radiodiff.train ; nanproof watch runs/guard",
        ),
        Requirement(
            number="B3",
            wish="a config with other rates and another clip, and a resume from a named milestone",
            shown_by=f"{_TRAIN} --config-name advised ; "
            f"{_TRAIN} --out runs/b --resume runs/a/checkpoints/step_000005.pt optimizer.lr=6e-3 optimizer.min_lr=6e-4",
        ),
        Requirement(
            number="B4",
            wish="a report on precision: the trainer's flags against accelerate's, with a verdict",
            shown_by="nanproof diagnose runs/radiodiff-original-0",
        ),
        Requirement(
            number="B5",
            wish="a protocol before a resume: config, code, resources, data",
            shown_by="nanproof diagnose runs/a --before-resume runs/a/checkpoints/step_000005.pt",
        ),
        Requirement(
            number="B6",
            wish="monitoring, validation, unit tests for numerical stability, documented requirements",
            shown_by=f"nanproof watch runs/a ; nanproof report runs/a ; {_TESTS}::test_scores_stay_in_range",
        ),
    ),
)
