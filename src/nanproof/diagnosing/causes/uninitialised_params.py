"""Parameters that nothing initializes."""

from __future__ import annotations

from ..cause import Cause, Remedy
from ..clue import about, both, con, denied, either, flag, onset, pro
from ..signs import AT_ONCE, BROKEN, FROM_THE_START

CAUSE = Cause(
    name="uninitialised-params",
    title="parameters are uninitialized memory",
    what="""``torch.empty``, a layer that is missing from the checkpoint under fast or meta-device loading, resized
embeddings: the values are whatever memory held, often 0, sometimes 1e30 or NaN. So it differs from start to start,
and a scan of the fresh model shows it.""",
    share=3.5,
    clues=(
        pro("names", about("new-parameters"), "the report mentions new or uninitialized parameters"),
        pro("names", onset("random-at-start"), "it is there at the start of some runs only"),
        pro("points", both(flag("nan-weights"), onset("before-training", "step1")), "weights are bad before training"),
        pro("suggests", flag("seed-dependent"), "it depends on the seed"),
        pro(4.0, both(flag("raw-parameters"), BROKEN), "parameters are never initialized"),
        pro("names", both(flag("raw-parameters"), FROM_THE_START), "and it is NaN from the first row on"),
        pro(
            "suggests",
            both(flag("warning-in-log"), either(flag("nan-weights"), AT_ONCE)),
            "a warning while loading",
            unless=about("template", "ignored-labels"),
        ),
        pro("points", flag("newly-initialised"), "the log names newly initialized weights"),
        pro("hints", flag("huge-finite-loss"), "a huge but finite loss"),
        pro("hints", flag("loss-above-uniform", "loss-high-then-nan"), "the first loss is above chance level"),
        pro("hints", both(AT_ONCE, about("adapter")), "adapters are new parameters"),
        pro(
            "hints", flag("warning-in-log"), "a warning in the log: loading warns of weights that were not in the file"
        ),
        con("suggests", flag("loss-first-step-finite"), "the first loss is finite"),
        con("points", denied("newly-initialised"), "no weights are newly initialized"),
        con(
            "points",
            onset("mid", "late", "random-late", "intermittent", "data-dependent"),
            "it would be there from the start",
        ),
        con(
            "suggests", flag("recovers", "lr-discontinuity", "only-with-padding", "only-one-gpu-family"), "another sign"
        ),
    ),
    remedies=(
        Remedy(
            does="initialize them (nn.init, or _init_weights for every module of yours), and check that a fresh model "
            "has only finite parameters"
        ),
    ),
    verify="All parameters are finite in five fresh starts.",
)
