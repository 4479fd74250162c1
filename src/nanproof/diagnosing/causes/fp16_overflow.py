"""A value left the range of fp16."""

from __future__ import annotations

from ..cause import Cause, Remedy
from ..clue import about, both, con, either, flag, onset, pro, value
from ..signs import AT_ONCE, BACK_TO_NORMAL, BAD_GRADIENT, FP8, FP16, HIDDEN_NAN, ONE_STEP, WIDE

CAUSE = Cause(
    name="fp16-overflow",
    title="an activation or gradient overflowed fp16",
    what="""fp16 ends at 65,504. Attention scores, residual streams, the squares inside a norm, or the logits of a
larger or longer-trained model pass that limit; the Inf becomes NaN in the next softmax, norm or subtraction. The
same step is finite in bf16 or fp32, whose range ends at 3.4e38. Models that were born in bf16 (T5, Gemma, many
newer LLMs, the SDXL VAE) overflow in fp16 although nothing is wrong with them.""",
    share=9.0,
    replayed=("range-overflow",),
    clues=(
        pro("points", FP16, "training runs in fp16", unless=flag("run-healthy")),
        pro(
            "hints",
            both(FP16, flag("loss-nan", "late-nan", "loss-zero-grad-nan", "loss-zero", "loss-turned-zero")),
            "the loss turns NaN during fp16 training",
        ),
        pro("suggests", both(FP16, about("bf16-born")), "a model born in bf16 runs in fp16"),
        pro("suggests", flag("fp32-fine"), "the same is fine in fp32"),
        pro("names", flag("bf16-fine"), "the same is fine in bf16, which has the range of fp32"),
        pro("suggests", both(FP16, flag("only-larger-model")), "only the larger model leaves the range"),
        pro(
            "points",
            about("overflow"),
            "an overflow or infinite activations are reported",
            unless=either(about("minimum-scale"), flag("loss-scale-collapse"), BACK_TO_NORMAL),
        ),
        pro(
            "suggests",
            both(FP16, flag("loss-jump-before", "grad-inf-early")),
            "a leap just before NaN in fp16",
            unless=BACK_TO_NORMAL,
        ),
        pro(
            "suggests",
            flag("activation-near-fp16-max"),
            "activations were near the end of fp16's range",
            unless=WIDE,
        ),
        pro("suggests", both(FP16, flag("activation-near-fp16-max")), "fp16 is what it computed in"),
        pro("suggests", both(FP16, flag("nan-in-preprocessing")), "an encoder run in fp16 gives NaN"),
        pro(
            "points",
            both(either(FP16, about("half-validation")), flag("eval-only-nan")),
            "evaluation runs in half precision, training does not show it",
        ),
        pro(
            "hints",
            both(value("gpu", "volta", "turing", "pascal"), about("bf16-born")),
            "a GPU without bf16 and a model that wants it",
        ),
        pro(
            "suggests",
            both(flag("eval-only-nan"), about("detection")),
            "detector trainers validate in half precision even when they train in another",
        ),
        pro("hints", both(FP16, either(HIDDEN_NAN, BAD_GRADIENT)), "NaN gradients in fp16"),
        con("names", WIDE, "bf16 and fp32 do not end at 65,504", unless=FP16),
        con("points", flag("loss-finite"), "an overflow would show as NaN or Inf"),
        con("suggests", FP8, "this is fp8, whose scales are another matter", unless=FP16),
        con("points", flag("fp32-also-nan"), "it is NaN in fp32 too"),
        con("suggests", BACK_TO_NORMAL, "it recovers, as it does when a scaler skips a step"),
        con("hints", both(ONE_STEP, value("weights", "fp16")), "the first forward pass was finite"),
        con(
            "suggests",
            flag("loss-scale-collapse"),
            "the loss scale had already collapsed",
            unless=flag("scale-fell-after-nan"),
        ),
        con(
            "suggests",
            either(flag("only-with-padding", "intermittent-nan"), onset("data-dependent")),
            "it comes with certain batches",
        ),
        con("hints", flag("loss-explodes-before-nan", "grad-norm-drift"), "it grew before it overflowed"),
        con("hints", both(AT_ONCE, flag("cpu-fine")), "a kernel is likelier when it is wrong at once"),
    ),
    remedies=(
        Remedy(
            does="keep fp16 with a GradScaler and run attention and norms in fp32 (this GPU has no bf16), or train in "
            "fp32",
            when=flag("no-bf16"),
        ),
        Remedy(does="train in bf16 instead of fp16"),
    ),
    verify="Replay the bad step in bf16 or fp32: the loss must be finite and the largest activation must"
    " stay below the dtype's maximum.",
)
