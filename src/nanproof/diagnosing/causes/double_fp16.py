"""The weights themselves are fp16 and are trained."""

from __future__ import annotations

from ..cause import Cause, Remedy
from ..clue import about, both, con, either, flag, onset, pro, value
from ..signs import AT_ONCE, BROKEN, FP16, FP16_WEIGHTS, ONE_STEP, WIDE

CAUSE = Cause(
    name="double-fp16",
    title="the trained weights are fp16: loaded or cast to half, without an fp32 master copy",
    what="""Mixed precision keeps fp32 weights and computes in fp16. When the weights themselves are fp16 (loaded
with torch_dtype=float16, ``model.half()``, a pipeline that casts the live model) updates smaller than 1/2048 of a
weight are lost, Adam's eps rounds to 0, and the first optimizer step divides 0 by 0. GradScaler refuses such
gradients ("Attempting to unscale FP16 gradients").""",
    share=6.0,
    clues=(
        pro("points", FP16_WEIGHTS, "the trained weights are fp16"),
        pro("names", both(FP16, FP16_WEIGHTS, BROKEN), "fp16 weights are trained under fp16: no fp32 master copy"),
        pro("suggests", both(FP16_WEIGHTS, flag("half-weights"), BROKEN), "the code casts the trained model to fp16"),
        pro("names", value("config-check", "NP702"), "the settings make the trained weights fp16"),
        pro("proves", either(about("unscale-error"), flag("unscale-error")), "GradScaler refused fp16 gradients"),
        pro("points", both(ONE_STEP, either(FP16_WEIGHTS, FP16)), "finite first, NaN after one step in fp16"),
        pro("points", both(flag("hard-error"), FP16_WEIGHTS, FP16), "an exception with fp16 weights under fp16"),
        pro("points", about("half-cast"), "the model is cast to half", unless=either(FP16_WEIGHTS, flag("pure-half"))),
        pro("hints", flag("pure-half"), "pure fp16, no fp32 copy of the weights"),
        pro(
            "suggests",
            both(either(onset("after-validation"), flag("event-correlated")), either(FP16_WEIGHTS, FP16)),
            "it follows an event that can cast the live model, such as validation",
        ),
        pro(
            "hints",
            both(ONE_STEP, about("rlhf", "adapter", "contrastive", "pre-trained")),
            "a fine-tuned model that breaks in one step is often loaded in half",
        ),
        pro("hints", flag("fp32-fine"), "the same is fine in fp32"),
        con("names", value("weights", "fp32"), "the weights are fp32"),
        con("names", WIDE, "training runs in bf16 or fp32", unless=either(FP16_WEIGHTS, FP16, flag("pure-half"))),
        con("hints", flag("grads-finite"), "finite gradients point at the optimizer's division instead"),
        con(
            "suggests",
            flag("loss-jump-before", "loss-explodes-before-nan", "only-larger-model"),
            "the loss moved before it was NaN: the forward pass overflowed",
        ),
        con("hints", both(AT_ONCE, flag("loss-nan")), "the first forward pass was NaN already"),
        con("points", flag("fp32-also-nan"), "it is NaN in fp32 too"),
    ),
    remedies=(
        Remedy(
            does="load the weights in fp32 and let autocast do the rest (torch_dtype=torch.float32 with fp16=True, or "
            "model.float() before the optimizer is made); with LoRA, cast only the adapters to fp32",
            when=flag("no-bf16"),
        ),
        Remedy(does="load the weights in fp32 (torch_dtype=torch.float32, or model.float()), or train in bf16"),
    ),
    verify="After ten steps all parameters are finite, and the table of settings in force shows fp32 "
    "weights (or bf16 throughout).",
)
