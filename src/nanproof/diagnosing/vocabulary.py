"""The words in which a run's symptoms are told: flags, when it began, and how each reads in a sentence."""

from __future__ import annotations

from collections.abc import Mapping

FLAGS: Mapping[str, str] = {
    "activation-explosion": "activations grow by orders of magnitude",
    "activation-near-fp16-max": "activations are within a factor of 16 of fp16's maximum",
    "activation-norm-drift": "activation norms drift upwards",
    "config-change-ignored": "a change of the config had no effect",
    "constant-grad-norm": "the logged gradient norm never changes",
    "cpu-fine": "the same on CPU is fine",
    "degenerate-text": "generated text degenerates",
    "depends-on-seq-len": "it depends on the sequence length",
    "device-assert": "device-side assert",
    "diverges-as-lr-rises": "it diverges while the learning rate rises",
    "eval-only-nan": "NaN in evaluation only",
    "event-correlated": "it follows one kind of event",
    "fp32-also-nan": "NaN in fp32 too",
    "fp32-fine": "fp32 is fine",
    "grad-explosion": "gradients explode",
    "grad-inf-early": "infinite gradient norms in the first steps",
    "grad-nan": "gradients are NaN",
    "grad-nan-loss-finite": "gradients are NaN while the loss is finite",
    "grad-nan-loss-finite-first": "gradients were NaN before the loss was",
    "grad-norm-drift": "gradient norms drift upwards",
    "grad-norm-leads": "the gradient norm rises some steps before the loss",
    "grad-norm-tiny": "gradient norms are tiny",
    "grads-finite": "gradients are finite",
    "hard-error": "an exception ended it",
    "huge-finite-loss": "a huge but finite loss",
    "intermittent-nan": "NaN on isolated steps",
    "irregular-spikes": "spikes at irregular intervals",
    "keeps-training": "training goes on afterwards",
    "late-nan": "NaN late in the run",
    "level-shift": "the loss moved to another level",
    "loss-above-uniform": "the first loss is above chance level",
    "loss-explodes-before-nan": "the loss grows before it is NaN",
    "loss-finite": "the loss is finite",
    "loss-first-step-finite": "the first loss is finite",
    "loss-high-then-nan": "the loss is high from the start, then NaN",
    "loss-jump-before": "the loss leaps just before NaN",
    "loss-nan": "the loss is NaN",
    "loss-scale-collapse": "the loss scale falls to its minimum",
    "loss-scale-drop-leads-by-30-steps": "the loss scale drops some steps before the loss explodes",
    "loss-scale-halving-at-start": "the loss scale halves from its start value",
    "loss-scale-halving-sparse": "the loss scale halves now and then",
    "loss-zero": "the logged loss is 0.0",
    "loss-zero-grad-nan": "the logged loss is 0.0 with a NaN gradient norm",
    "loss-zero-grad-zero": "loss and gradient norm are both 0.0",
    "loss-zero-is-normal-in-grpo": "a loss of 0.0 in GRPO, where that is normal",
    "lower-lr-no-help": "a lower learning rate changes nothing",
    "lower-lr-only-delays": "a lower learning rate only delays it",
    "lr-discontinuity": "the learning rate jumps",
    "metric-above-bound": "a metric is beyond its bound",
    "nan-after-first-step": "NaN after exactly one optimizer step",
    "nan-at-lr-0": "NaN while the learning rate is 0",
    "nan-hidden-by-logger": "the logger hides NaN",
    "nan-in-preprocessing": "NaN in preprocessing",
    "nan-soon-after-data-change": "NaN soon after the data changed",
    "nan-weights": "weights are NaN or absurd",
    "negative-loss": "a loss below zero that cannot be",
    "no-learning": "nothing is learned",
    "no-loss-symptom": "the loss shows nothing",
    "no-recovery-no-divergence": "the loss neither recovers nor diverges",
    "not-reproducible-elsewhere": "it cannot be reproduced on other machines",
    "one-component-nan": "one loss component is NaN first",
    "only-larger-model": "only the larger model is affected",
    "only-multi-gpu": "only with several GPUs or nodes",
    "only-one-gpu-family": "only on one kind of GPU",
    "only-with-padding": "only with padding or a batch above 1",
    "recovers": "it recovers by itself",
    "replica-weights-differ": "replicas hold different weights",
    "restart-gains-100-steps": "each restart gains only some steps",
    "same-epoch-every-run": "at the same place of the data every time",
    "scale-fell-after-nan": "the loss was NaN before the loss scale fell",
    "seed-change-moves-it": "another seed moves it",
    "seed-dependent": "it depends on the seed",
    "slow-divergence": "the loss creeps upwards",
    "slow-recovery": "it recovers slowly",
    "some-losses-zero": "some loss terms are exactly 0",
    "spike-at-each-resume": "the loss jumps at each resume",
    "spike-then-plateau": "the loss leaps and stays on a plateau",
    "spikes-that-stop-recovering": "spikes stop recovering",
    "std-shrinks": "a standard deviation shrinks towards 0",
    "sudden-explosion": "the loss explodes without warning",
    "update-norm-leads": "the update norm rises before the loss",
    "val-also-nan": "validation is NaN too",
    "val-flat": "validation does not see it",
    "warning-in-log": "a warning in the log",
}

SIGNS: Mapping[str, str] = {
    "checkpoint-unreadable": "a checkpoint cannot be read",
    "collective-timeout": "a collective operation timed out",
    "ctc-term-bad": "the CTC term is bad first",
    "ctc-unguarded": "CTC loss without zero_infinity",
    "distribution-failed": "a distribution was given invalid parameters",
    "divides-by-count": "a loss is divided by a count that can be 0",
    "divides-by-std": "values are divided by their standard deviation",
    "grad-nan-skipped": "single gradient norms are NaN while the loss goes on falling",
    "half-weights": "the weights are cast to fp16",
    "bypasses-ddp": "the loss does not go through DistributedDataParallel",
    "labels-truncated": "labels are cut to a length",
    "left-padding": "sequences are padded on the left",
    "loss-infinite-first": "the loss is infinite before it is NaN",
    "loss-turned-zero": "the logged loss turned to exactly 0.0 and stayed there",
    "loss-ran-away": "the loss grew out of bounds",
    "lr-negative": "the learning rate is negative",
    "masks-with-infinity": "scores are masked with -inf before a softmax",
    "masks-attention": "a padding mask goes into attention",
    "nan-from-first-row": "NaN in every row of the log",
    "pole-in-code": "an operation at the edge of its domain",
    "preprocessing-warning": "NumPy warned of an invalid value",
    "raw-parameters": "parameters are never initialized",
    "response-template": "labels depend on a response template",
    "scales-by-itself": "samples are divided by their own range",
    "selects-after": "torch.where selects after an operation without a gradient",
    "tiny-eps": "the code adds an eps that is 0 in fp16",
    "tiny-eps-at-one": "the code takes an eps from 1 that half precision cannot tell from 1",
    "scheduler-rebuilt": "the scheduler is rebuilt on resume",
}
"""What files show beyond the flags that a description can carry."""

BREAKS = (
    "checkpoint-unreadable", "collective-timeout", "ctc-term-bad", "distribution-failed", "loss-infinite-first",
    "loss-ran-away", "lr-negative", "nan-from-first-row", "labels-out-of-range", "unscale-error",
    "kernel-not-built", "loss-turned-zero",
)  # fmt: skip
"""Signs that by themselves show that a run broke."""

ONSETS: Mapping[str, str] = {
    "after-data-change": "it began after a change of the data",
    "after-resume": "it began after a resume",
    "after-validation": "it began after a validation run",
    "any": "it happens at any time",
    "at-lr-peak": "it began at the peak of the learning rate",
    "before-training": "it was there before training",
    "data-dependent": "it depends on the data",
    "data-length-dependent": "it depends on the length of the data",
    "early": "it began early",
    "early-after-restart": "it began soon after a restart",
    "intermittent": "it comes and goes",
    "late": "it began late",
    "mid": "it began in the middle of training",
    "random": "it began at a random time",
    "random-at-start": "it is there at the start of some runs",
    "random-late": "it began at a random time, late",
    "silent": "no step shows it",
    "step1": "it is there at the first step",
    "step2": "it is there from the second step on",
}


FOUND = frozenset({
    "attention", "bad-leaf", "batch", "beta2", "bf16-fine", "checkpoint-damaged", "checkpoint-healthy",
    "checkpoint-nonfinite", "compiled", "config-check", "ctc", "ctc-lengths-infeasible", "data-absurd", "data-clean",
    "data-constant", "data-degenerate", "data-empty", "data-nonfinite", "eps", "gpu", "gpus", "init_std", "known-bug",
    "labels-all-masked", "labels-out-of-range", "lint", "located-op", "lower-lr-helps", "lr", "lr-above-config",
    "lr-continuous", "lr-high", "lr-in-checkpoint", "lr-in-force", "mechanism", "nan-before-first-update",
    "nan-filter-on", "never-resumed", "newly-initialised", "no-bf16", "no-scaler", "optimizer", "origin", "onset",
    "overlap-comm", "precision", "pure-half", "resumed", "run-healthy", "several-gpus", "several-nodes", "single-gpu",
    "tells", "unscale-error", "warmup", "weights", "xid-error", "zloss",
})  # fmt: skip
"""Facts that readers of files, ``--fact`` and ``--evidence`` produce beside the flags."""
PRODUCED = frozenset({*FLAGS, *SIGNS, *FOUND})
"""Every name that a clue may ask for; a test looks up the producer of each."""


def phrase(name: str) -> str:
    """How a flag, an onset or any other name reads.

    >>> phrase("loss-nan"), phrase("own-data")
    ('the loss is NaN', 'own data')
    """
    return FLAGS.get(name) or SIGNS.get(name) or ONSETS.get(name) or name.replace("-", " ")
