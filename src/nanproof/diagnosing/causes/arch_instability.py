"""The model itself amplifies: depth, initialization, logits that grow."""

from __future__ import annotations

from ..cause import Cause, Exclusion, Remedy
from ..clue import about, both, con, denied, either, flag, number, onset, pro, value
from ..signs import AT_ONCE, BACK_TO_NORMAL, FP16, IN_SOME_BATCHES, LARGE_RUN

CAUSE = Cause(
    name="arch-instability",
    title="the model amplifies: initialization, depth, or logits that grow without bound",
    what="""Attention logits, residual streams or embedding gradients grow slowly until something overflows; the
loss leaps and stays on a plateau, or spikes stop recovering. Another seed moves it, a lower rate delays it, larger
models show it first. Cures change the model: smaller initialization, qk-norm, z-loss, a convex mixing of streams,
less gradient into the embedding.""",
    share=5.0,
    clues=(
        pro("names", flag("spikes-that-stop-recovering"), "spikes stop recovering"),
        pro("points", flag("spike-then-plateau", "no-recovery-no-divergence"), "the loss leaps and stays on a plateau"),
        pro("points", flag("lower-lr-only-delays"), "a lower learning rate only delays it", unless=about("ctc")),
        pro("suggests", flag("seed-change-moves-it"), "another seed moves it"),
        pro("suggests", flag("seed-dependent"), "it depends on the seed", unless=AT_ONCE),
        pro("suggests", flag("only-larger-model"), "only the larger model is affected"),
        pro(
            "points",
            about("growing-activations"),
            "the report mentions growing activations, logits or norms",
            unless=flag("activation-norm-drift"),
        ),
        pro("points", value("mechanism", "growth-overflow"), "in a replayed step values had outgrown even float32"),
        pro("points", about("initialization"), "the report mentions depth, width or initialization"),
        pro("suggests", flag("activation-norm-drift"), "activation norms drift upwards"),
        pro("names", flag("activation-explosion"), "activations grow by orders of magnitude", unless=FP16),
        pro(
            "hints",
            flag("grad-norm-drift", "grad-explosion", "loss-explodes-before-nan", "slow-divergence", "late-nan"),
            "growth before it broke",
        ),
        pro("suggests", flag("sudden-explosion"), "the loss explodes without warning"),
        pro(
            "points",
            flag("loss-scale-drop-leads-by-30-steps"),
            "the loss scale drops some steps before the loss explodes",
        ),
        pro("hints", about("embedding"), "the report mentions the embedding"),
        pro("hints", both(LARGE_RUN, onset("late", "mid", "at-lr-peak")), "a large run, not at its start"),
        pro(
            "suggests",
            either(number("init_std", above=0.0199), value("zloss")),
            "initialization or z-loss is part of the report",
        ),
        pro("hints", onset("at-lr-peak"), "it began at the peak of the learning rate"),
        pro("hints", about("experts"), "routers amplify"),
        con("suggests", denied("loss-explodes-before-nan"), "nothing grew before"),
        con("points", AT_ONCE, "growth needs steps"),
        con("suggests", either(IN_SOME_BATCHES, BACK_TO_NORMAL), "it comes with certain batches, or recovers"),
        con(
            "suggests",
            flag("cpu-fine", "only-multi-gpu", "only-one-gpu-family", "lr-discontinuity", "spike-at-each-resume"),
            "the same model is fine elsewhere",
        ),
        con("hints", flag("fp32-fine"), "fp32 is fine"),
    ),
    excluded=(Exclusion(when=flag("nan-before-first-update"), says="it was NaN before any update"),),
    remedies=(
        Remedy(
            does="find the layer whose activations grow, then stabilize it: qk-norm, z-loss, smaller initialization, "
            "scaled residuals, embedding gradient × 0.1"
        ),
    ),
    verify="The largest activation per layer levels off within some thousand steps, with three seeds.",
)
