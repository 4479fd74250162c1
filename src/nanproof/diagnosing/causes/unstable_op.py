"""An operation used where it has no finite value."""

from __future__ import annotations

from ..cause import Cause, Remedy
from ..clue import about, both, con, denied, either, flag, number, onset, pro, value
from ..signs import AT_ONCE, BF16, BROKEN, FP16, FP32, FROM_THE_START, LARGE_RUN, TURNED_NAN

CAUSE = Cause(
    name="unstable-op",
    title="an operation is used where it has no finite value or gradient",
    what="""log 0, √0 in the backward pass, acos at ±1, exp of an unbounded number, division by a distance that can
vanish, a standard deviation that an update pushes to 0 or below: finite for most inputs, and in every precision,
until training reaches the pole.""",
    share=6.0,
    replayed=("pole", "invalid", "exp-overflow"),
    clues=(
        pro("hints", flag("grad-nan-skipped"), "single gradients are NaN", unless=FP16),
        pro("points", about("log-exp"), "the report mentions log, exp or an entropy"),
        pro(
            "points",
            about("poles"),
            "the report mentions a root, a division, an angle or a variance",
            unless=either(FP16, about("constant-input", "where")),
        ),
        pro(
            "names",
            value("mechanism", "loss-expression"),
            "in a replayed step the loss was bad, not the output",
        ),
        pro("names", about("backward-op"), "anomaly mode names the operation"),
        pro("suggests", about("variational"), "exp of a learned log-variance is the usual place here"),
        pro("names", flag("std-shrinks"), "a standard deviation shrinks towards 0"),
        pro(
            "points",
            both(about("reinforcement"), flag("hard-error")),
            "a distribution got a parameter that it is not defined for",
            unless=about("rlhf"),
        ),
        pro("suggests", about("distribution-error"), "a distribution complains of its parameters"),
        pro(
            "suggests",
            both(about("graph", "box-loss"), flag("loss-nan", "one-component-nan")),
            "distances, angles and unions can vanish here",
        ),
        pro("faint", TURNED_NAN, "the loss turned NaN", unless=either(AT_ONCE, FROM_THE_START)),
        pro("hints", flag("fp32-also-nan"), "NaN in fp32 too"),
        pro("suggests", flag("grad-nan-loss-finite-first"), "the backward pass was bad first"),
        pro(
            "hints",
            flag("grad-nan-loss-finite", "one-component-nan", "grad-explosion", "lower-lr-only-delays"),
            "a backward pass or a single term was bad first",
        ),
        pro("hints", both(FP32, onset("mid", "late", "random"), flag("loss-nan")), "fp32, and not from the start"),
        pro("hints", both(FP32, about("adversarial", "contrastive", "diffusion")), "own losses with roots and logs"),
        pro(
            "points",
            both(flag("pole-in-code"), BROKEN),
            "the code has an operation without a finite value or gradient at the edge of its domain",
            unless=either(flag("lr-negative"), value("lr-high")),
        ),
        pro("suggests", both(flag("pole-in-code"), flag("one-component-nan")), "one loss term broke first"),
        pro(
            "points",
            both(flag("std-of-batch"), BROKEN),
            "the deviation over a batch of one sample is NaN",
            unless=flag("data-constant"),
        ),
        pro(
            "proves",
            both(flag("divides-by-std"), number("batch", below=1.5)),
            "the standard deviation of a batch of one is NaN",
        ),
        pro("suggests", both(flag("divides-by-std"), flag("distribution-failed")), "the code divides by a deviation"),
        pro("suggests", flag("distribution-failed"), "a distribution was given NaN or a negative scale"),
        pro(
            "points",
            value(
                "lint",
                "NP203",
                "NP204",
                "NP205",
                "NP206",
                "NP207",
                "NP208",
                "NP209",
                "NP211",
                "NP212",
                "NP213",
                "NP218",
            ),
            "the code does this",
        ),
        pro("hints", denied("loss-explodes-before-nan"), "sudden: no growth in loss or gradient norm beforehand"),
        con("suggests", flag("nan-in-preprocessing"), "the data was NaN before"),
        con("suggests", flag("fp32-fine"), "fp32 is fine"),
        con("suggests", both(flag("raw-parameters"), FROM_THE_START), "parameters are uninitialized memory"),
        con("hints", both(BF16, LARGE_RUN), "a large run with well-used code"),
        con(
            "suggests",
            flag("only-multi-gpu", "only-one-gpu-family", "cpu-fine", "recovers", "nan-weights", "lr-discontinuity"),
            "the same code is fine elsewhere",
        ),
    ),
    remedies=(
        Remedy(
            does="use a batch size above 1, or skip the normalization for single elements",
            when=both(flag("divides-by-std"), number("batch", below=1.5)),
        ),
        Remedy(
            does="bound the parameter: log-std in [-20, 2], softplus plus a floor, never a raw std",
            when=either(flag("std-shrinks"), about("distribution-error", "variational")),
        ),
        Remedy(
            does="keep the input away from the edge: clamp with an eps before log, sqrt, acos or a division; "
            "nanproof.ops has safe_log, safe_sqrt, safe_div"
        ),
    ),
    verify="nanproof.testing.assert_stable on the function over its whole domain; the step that failed is "
    "finite when replayed.",
)
