"""Tests that several causes share."""

from __future__ import annotations

from .clue import about, either, flag, number, onset, value

FP16 = value("precision", "fp16")
BF16 = value("precision", "bf16")
FP32 = either(value("precision", "fp32"), flag("fp32-also-nan"))
FP8 = value("precision", "fp8", "fp4")
WIDE = either(BF16, FP32)
FP16_WEIGHTS = value("weights", "fp16")
ADAM = either(value("optimizer", "adam", "adamw", "fused adamw"), about("adam"))

NO_UPDATE_YET = either(onset("before-training"), flag("nan-at-lr-0", "nan-before-first-update"))
AT_ONCE = either(onset("before-training", "step1"), flag("nan-at-lr-0", "nan-before-first-update"))
ONE_STEP = either(onset("step2"), flag("nan-after-first-step"))
IN_SOME_BATCHES = either(
    onset("data-dependent", "intermittent", "data-length-dependent"), flag("intermittent-nan", "same-epoch-every-run")
)
HIDDEN_NAN = flag("loss-zero-grad-nan")
TURNED_NAN = flag("loss-nan", "loss-zero-grad-nan")
BAD_GRADIENT = flag("grad-nan", "grad-nan-loss-finite", "grad-nan-loss-finite-first")
BACK_TO_NORMAL = flag("recovers", "slow-recovery", "loss-scale-halving-at-start", "loss-scale-halving-sparse")
RESUMED = either(onset("after-resume", "early-after-restart"), flag("spike-at-each-resume", "resumed"))
SPIKES = flag("irregular-spikes", "spike-then-plateau", "spikes-that-stop-recovering", "sudden-explosion", "recovers")
BROKEN = flag(
    "loss-nan",
    "late-nan",
    "loss-zero",
    "loss-turned-zero",
    "loss-zero-grad-nan",
    "loss-zero-grad-zero",
    "grad-nan",
    "grad-nan-loss-finite",
    "grad-nan-loss-finite-first",
    "hard-error",
    "loss-ran-away",
    "intermittent-nan",
    "nan-weights",
    "val-also-nan",
    "distribution-failed",
    "loss-scale-collapse",
)
GROWTH = flag("loss-explodes-before-nan", "loss-jump-before", "grad-explosion", "loss-ran-away", "slow-divergence")
FROM_THE_START = flag("nan-from-first-row", "nan-before-first-update")
SEVERAL_MACHINES = either(flag("several-nodes", "only-multi-gpu"), about("distributed"))
LARGE_RUN = either(about("large-scale", "pre-training"), number("gpus", above=31))
