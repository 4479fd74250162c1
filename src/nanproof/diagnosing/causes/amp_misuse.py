"""Autocast and GradScaler used in the wrong order, or one without the other."""

from __future__ import annotations

from ..cause import Cause, Remedy
from ..clue import HINTS, NAMES, POINTS, PROVES, SUGGESTS, about, both, con, denied, either, flag, pro, value
from ..signs import FP16, FP32, ONE_STEP

CAUSE = Cause(
    name="amp-misuse",
    title="autocast and GradScaler are not used as they must be",
    what="""fp16 gradients are scaled before backward and must be unscaled before they are clipped or looked at;
the scaler must step and update once per optimizer step; autocast belongs around the forward pass only. Clipping
scaled gradients shrinks them to nothing, a missing scaler lets them underflow, one scaler updated twice halves for
no reason, and a flag such as amp=True can reach an autocast whose default is fp16 with no scaler at all.""",
    share=2.0,
    clues=(
        pro(NAMES, about("scaler-misuse"), "the order or the absence of the scaler is spoken of"),
        pro(
            POINTS,
            both(FP16, flag("grad-norm-tiny")),
            "tiny gradient norms in fp16: clipped while scaled, or underflow",
        ),
        pro(HINTS, flag("grad-norm-tiny"), "tiny gradient norms"),
        pro(NAMES, flag("no-scaler"), "fp16 autocast without a GradScaler"),
        pro(HINTS, both(FP16, flag("fp32-fine")), "fp16 fails, fp32 is fine"),
        pro(HINTS, both(FP16, about("adversarial")), "several optimizers under one scaler"),
        pro(HINTS, both(FP16, flag("no-learning")), "nothing is learned in fp16"),
        pro(
            SUGGESTS,
            both(FP16, about("scaler")),
            "the scaler is spoken of",
            unless=either(
                flag("loss-scale-collapse", "loss-scale-halving-at-start", "loss-scale-halving-sparse"),
                about("minimum-scale", "unscale-error"),
            ),
        ),
        pro(PROVES, value("lint", "NP105", "NP301", "NP302", "NP303", "NP308"), "the code does so"),
        pro(NAMES, value("config-check", "NP701"), "the settings contradict each other"),
        pro(HINTS, both(FP16, ONE_STEP), "NaN after one scaled step"),
        con(HINTS, denied("no-scaler"), "there is a GradScaler"),
        con(POINTS, FP32, "fp32 needs no scaler"),
        con(SUGGESTS, value("precision", "bf16"), "bf16 needs no scaler", unless=FP16),
    ),
    remedies=(
        Remedy(
            does="give autocast dtype=torch.bfloat16, which needs no scaler, or add a GradScaler: nanproof lint "
            "--fix --select NP308",
            when=either(flag("no-scaler"), value("lint", "NP308")),
        ),
        Remedy(
            does="order: scaler.scale(loss).backward(); scaler.unscale_(optimizer); clip; scaler.step(optimizer); "
            "scaler.update(), each once per step; nanproof lint --fix --select NP3 repairs the usual places"
        ),
    ),
    verify="The logged gradient norm agrees with an fp32 run of the same batch within a factor of two.",
)
