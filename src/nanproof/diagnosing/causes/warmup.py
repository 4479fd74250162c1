"""The learning rate reaches its height too soon."""

from __future__ import annotations

from ..cause import Cause, Exclusion, Remedy
from ..clue import about, both, con, denied, either, flag, number, onset, pro, value
from ..signs import IN_SOME_BATCHES, NO_UPDATE_YET, RESUMED

CAUSE = Cause(
    name="warmup",
    title="the learning rate rises too fast",
    what="""In the first steps Adam's moments rest on a handful of batches and activations have not settled. A full
or a linearly scaled rate then does what a later one would not. A longer ramp cures it at the same peak rate.""",
    share=2.0,
    clues=(
        pro("names", about("warm-up"), "the report mentions the warm-up", unless=NO_UPDATE_YET),
        pro("suggests", flag("diverges-as-lr-rises"), "it diverges while the learning rate rises"),
        pro("suggests", both(flag("diverges-as-lr-rises"), onset("early", "at-lr-peak")), "it diverges on the ramp"),
        pro("points", both(number("warmup", below=1.0), onset("early", "step2", "at-lr-peak")), "there is no warm-up"),
        pro("hints", number("warmup", below=1.0), "there is no warm-up"),
        pro(
            "points",
            both(value("warmup"), number("lr", above=0.0499), onset("early", "at-lr-peak")),
            "a short ramp to a very high rate",
        ),
        pro("suggests", both(about("large-batch"), onset("early", "at-lr-peak")), "a rate scaled up for a large batch"),
        pro("suggests", both(number("batch", above=511.0), onset("early", "at-lr-peak")), "a large batch, early"),
        pro("suggests", onset("at-lr-peak"), "it began when the ramp ended"),
        pro("hints", both(onset("early"), flag("loss-explodes-before-nan", "grad-explosion")), "early growth"),
        pro("suggests", both(about("several-rates"), onset("early")), "several rates were tried, early"),
        pro("suggests", value("config-check", "NP706"), "the config has no warm-up"),
        con("suggests", denied("loss-explodes-before-nan"), "nothing grew before"),
        con("points", onset("late", "random-late", "mid"), "a warm-up is over by then"),
        con("points", onset("step1"), "at the first step the rate has done nothing yet"),
        con("suggests", either(IN_SOME_BATCHES, RESUMED), "it comes with certain batches or resumes"),
        con("points", flag("lower-lr-no-help", "lower-lr-only-delays"), "the rate is not what decides"),
    ),
    excluded=(Exclusion(when=NO_UPDATE_YET, says="it was NaN before any update, or at a rate of 0"),),
    remedies=(Remedy(does="keep the peak rate and lengthen the warm-up"),),
    verify="The loss falls through the whole ramp and the gradient norm has no peak at its end.",
)
