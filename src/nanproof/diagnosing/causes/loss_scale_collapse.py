"""The dynamic loss scale fell until nothing could be learned."""

from __future__ import annotations

from ..cause import Cause, Remedy
from ..clue import about, con, denied, flag, onset, pro
from ..signs import BACK_TO_NORMAL, WIDE

CAUSE = Cause(
    name="loss-scale-collapse",
    title="the loss scale fell to its minimum: every step overflows and is skipped",
    what="""A GradScaler halves its scale whenever a gradient is Inf or NaN. Halving now and then is ordinary. When
almost every step overflows the scale sinks to its minimum: the run stops ("minimum loss scale reached") or goes on
without learning, and small gradients underflow. Behind it stands growth of activations or gradients, or a NaN that
no scale can cure; restarting gains some steps and no more.""",
    share=3.0,
    clues=(
        pro(
            "names",
            flag("loss-scale-collapse"),
            "the loss scale fell to its minimum",
            unless=flag("scale-fell-after-nan"),
        ),
        pro(
            "points",
            about("minimum-scale"),
            "overflows in a row, or the minimum scale, are reported",
            unless=flag("loss-scale-halving-sparse", "loss-scale-halving-at-start", "recovers"),
        ),
        pro("suggests", flag("restart-gains-100-steps"), "restarting gains only some steps"),
        pro("hints", flag("loss-scale-drop-leads-by-30-steps"), "the scale dropped before the loss moved"),
        pro("hints", about("scaler"), "the report mentions the loss scale"),
        con("names", denied("loss-scale-collapse"), "the loss scale is steady"),
        con(
            "points",
            flag("loss-scale-halving-sparse", "loss-scale-halving-at-start"),
            "halving at the start or now and then is ordinary",
        ),
        con("suggests", flag("scale-fell-after-nan"), "the loss was NaN before: the scale fell because of it"),
        con("suggests", BACK_TO_NORMAL, "it recovers"),
        con("names", WIDE, "bf16 and fp32 train without a loss scale"),
        con("hints", onset("step1"), "a scale needs some steps to collapse"),
    ),
    remedies=(
        Remedy(
            does="go back to the last healthy checkpoint and run attention and norms in fp32 (this GPU has no bf16)",
            when=flag("no-bf16"),
        ),
        Remedy(
            does="go back to the last healthy checkpoint and train in bf16 if the GPU has it, otherwise run attention "
            "and norms in fp32"
        ),
    ),
    verify="The scale doubles again within its growth interval (2,000 steps by default) and skipped steps stay "
    "below 1 %.",
)
