"""Nothing is wrong."""

from __future__ import annotations

from ..cause import Cause, Remedy
from ..clue import HINTS, NAMES, POINTS, PROVES, SUGGESTS, about, both, con, denied, flag, onset, pro
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
        pro(NAMES, flag("recovers"), "it recovers by itself"),
        pro(PROVES, flag("run-healthy"), "the log shows a healthy run"),
        pro(POINTS, flag("slow-recovery"), "it recovers slowly"),
        pro(SUGGESTS, both(flag("recovers"), flag("grad-norm-leads")), "and the gradient norm led the spike"),
        pro(SUGGESTS, flag("grad-norm-leads"), "the gradient norm rises some steps before the loss"),
        pro(NAMES, flag("loss-scale-halving-at-start"), "a dynamic scale searches its level from above"),
        pro(NAMES, flag("loss-scale-halving-sparse"), "a dynamic scale tests its ceiling now and then"),
        pro(NAMES + SUGGESTS, flag("loss-zero-is-normal-in-grpo"), "a loss of 0.0 is normal in GRPO"),
        pro(POINTS, both(flag("loss-zero"), about("rlhf")), "policy losses are 0 when the policy equals its reference"),
        pro(SUGGESTS, flag("grad-inf-early"), "infinite norms while a scale is being found"),
        pro(
            SUGGESTS,
            both(flag("grad-nan", "grad-nan-loss-finite"), flag("keeps-training", "recovers", "loss-finite"), FP16),
            "a scaler skips such steps",
        ),
        pro(
            NAMES + POINTS,
            both(flag("grad-nan-skipped"), FP16),
            "the scaler of fp16 leaves such steps out, and the loss goes on falling",
        ),
        pro(SUGGESTS, flag("grad-nan-skipped"), "steps with a bad gradient norm were left out"),
        pro(SUGGESTS, flag("loss-finite"), "the loss is finite"),
        pro(SUGGESTS, flag("keeps-training"), "training goes on afterwards"),
        pro(HINTS, flag("no-loss-symptom", "val-flat"), "loss or validation show nothing"),
        pro(HINTS, onset("any"), "at any time"),
        con(NAMES, denied("recovers"), "it does not come back"),
        con(
            NAMES,
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
            POINTS,
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
    remedies=(Remedy(does="nothing to repair: let it run, and look again if spikes stop recovering"),),
    verify="Loss and gradient norm are back in their old band within some hundred steps.",
)
