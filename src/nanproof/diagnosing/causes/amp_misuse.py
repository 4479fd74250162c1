"""Autocast and GradScaler used in the wrong order, or one without the other."""

from __future__ import annotations

from ..cause import Cause, Remedy
from ..clue import about, both, con, denied, either, flag, pro, value
from ..signs import BROKEN, FP16, FP32, ONE_STEP

CAUSE = Cause(
    name="amp-misuse",
    title="fp16 autocast and the loss scaler are used wrongly",
    what="""fp16 gradients are scaled before backward and must be unscaled before they are clipped or looked at;
the scaler must step and update once per optimizer step; autocast belongs around the forward pass only. Clipping
scaled gradients shrinks them to nothing, a missing scaler lets them underflow, one scaler updated twice halves for
no reason, and a flag such as amp=True can reach an autocast whose default is fp16 with no scaler at all.""",
    share=2.0,
    clues=(
        pro("names", about("scaler-misuse"), "the report mentions the order or the absence of the scaler"),
        pro(
            "points",
            both(FP16, flag("grad-norm-tiny")),
            "tiny gradient norms in fp16: clipped while scaled, or underflow",
        ),
        pro("hints", flag("grad-norm-tiny"), "tiny gradient norms"),
        pro("names", flag("no-scaler"), "fp16 autocast without a GradScaler"),
        pro("hints", both(FP16, flag("fp32-fine")), "fp16 fails, fp32 is fine"),
        pro("hints", both(FP16, about("adversarial")), "several optimizers under one scaler"),
        pro("hints", both(FP16, flag("no-learning")), "nothing is learned in fp16"),
        pro(
            "suggests",
            both(FP16, about("scaler")),
            "the report mentions the scaler",
            unless=either(
                flag("loss-scale-collapse", "loss-scale-halving-at-start", "loss-scale-halving-sparse"),
                about("minimum-scale", "unscale-error"),
            ),
        ),
        pro("proves", value("lint", "NP105", "NP301", "NP302", "NP303", "NP308"), "the code does this"),
        pro(
            "points",
            both(flag("no-scaler"), value("config-check", "NP701"), BROKEN),
            "the config asks for another precision than the code runs in, without a scaler",
        ),
        pro("names", value("config-check", "NP701"), "the settings contradict each other"),
        pro("hints", both(FP16, ONE_STEP), "NaN after one scaled step"),
        con("hints", denied("no-scaler"), "there is a GradScaler"),
        con("points", FP32, "fp32 needs no scaler"),
        con("suggests", value("precision", "bf16"), "bf16 needs no scaler", unless=FP16),
    ),
    remedies=(
        Remedy(
            does="give autocast dtype=torch.bfloat16, which needs no scaler, or add a GradScaler",
            when=either(flag("no-scaler"), value("lint", "NP308")),
        ),
        Remedy(
            does="call in this order, once per step each: scaler.scale(loss).backward(), scaler.unscale_(optimizer), "
            "clip, scaler.step(optimizer), scaler.update()"
        ),
    ),
    verify="The logged gradient norm agrees with an fp32 run of the same batch within a factor of two.",
)
