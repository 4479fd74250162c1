"""Nothing is wrong."""

from __future__ import annotations

from ..cause import Cause, Exclusion, Remedy
from ..clue import about, both, con, denied, flag, onset, pro, value
from ..signs import FP16

CAUSE = Cause(
    name="benign",
    title="nothing is wrong: an ordinary spike, overflow or zero",
    what="""A gradient norm that leads a loss spike by a few steps and returns within tens; a loss scale that
halves from its high start, or once every some thousand steps; a GRPO loss of exactly 0 at the start, since the
policy equals its reference. None of them needs a repair.""",
    share=3.0,
    harmless=True,
    clues=(
        pro("names", flag("recovers"), "it recovers by itself"),
        pro("proves", flag("run-healthy"), "the log shows a healthy run"),
        pro("points", flag("slow-recovery"), "it recovers slowly"),
        pro("suggests", both(flag("recovers"), flag("grad-norm-leads")), "and the gradient norm led the spike"),
        pro("suggests", flag("grad-norm-leads"), "the gradient norm rises some steps before the loss"),
        pro("names", flag("loss-scale-halving-at-start"), "a dynamic scale searches its level from above"),
        pro("names", flag("loss-scale-halving-sparse"), "a dynamic scale tests its ceiling now and then"),
        pro(4.0, flag("loss-zero-is-normal-in-grpo"), "a loss of 0.0 is normal in GRPO"),
        pro(
            "points", both(flag("loss-zero"), about("rlhf")), "policy losses are 0 when the policy equals its reference"
        ),
        pro("suggests", flag("grad-inf-early"), "infinite norms while a scale is being found"),
        pro(
            "suggests",
            both(flag("grad-nan", "grad-nan-loss-finite"), flag("keeps-training", "recovers", "loss-finite"), FP16),
            "a scaler skips such steps",
        ),
        pro(
            "proves",
            both(flag("grad-nan-skipped"), FP16),
            "the scaler of fp16 leaves such steps out, and the loss goes on falling",
        ),
        pro("suggests", flag("grad-nan-skipped"), "steps with a bad gradient norm were left out"),
        pro("suggests", flag("loss-finite"), "the loss is finite"),
        pro("suggests", flag("keeps-training"), "training goes on afterwards"),
        pro("hints", flag("no-loss-symptom", "val-flat"), "loss or validation show nothing"),
        pro("hints", onset("any"), "at any time"),
        con("proves", value("lr-in-force"), "the learning rate in force is not the configured one"),
        con("names", denied("recovers"), "it does not come back"),
        con(
            "names",
            flag(
                "loss-nan",
                "loss-ran-away",
                "lr-negative",
                "late-nan",
                "nan-weights",
                "loss-scale-collapse",
                "loss-zero-grad-nan",
                "hard-error",
                "device-assert",
                "nan-after-first-step",
                "val-also-nan",
            ),
            "NaN or an error is not benign",
        ),
        con(
            "points",
            flag(
                "spikes-that-stop-recovering",
                "spike-then-plateau",
                "level-shift",
                "lr-discontinuity",
                "no-learning",
                "config-change-ignored",
                "replica-weights-differ",
                "grad-nan",
                "grad-nan-loss-finite",
                "intermittent-nan",
                "spike-at-each-resume",
                "no-recovery-no-divergence",
            ),
            "that does not go away",
        ),
    ),
    excluded=(Exclusion(when=flag("not-healthy"), says="the log shows that something is wrong"),),
    remedies=(Remedy(does="nothing to repair: let it run, and look again if spikes stop recovering"),),
    verify="Loss and gradient norm are back in their old band within some hundred steps.",
)
