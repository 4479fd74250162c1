"""A kernel, compiler, backend or library is wrong."""

from __future__ import annotations

from ..cause import Cause, Remedy
from ..clue import about, both, con, denied, either, flag, onset, pro, value
from ..signs import AT_ONCE, BAD_GRADIENT, BF16, BROKEN, FP8, FP16, GROWTH, HIDDEN_NAN, IN_SOME_BATCHES

CAUSE = Cause(
    name="framework-bug",
    title="a kernel, compiler, backend or library is wrong on this setup",
    what="""An attention kernel that was not built for this GPU, a backward pass wrong for some strides or lengths,
a compiler, an optimizer of a nightly build, a backend such as MPS, a framework that loses its step counter at a
resume. The same model is right on CPU, on another GPU, in another version, or with that component switched off.""",
    share=9.0,
    clues=(
        pro("names", flag("only-one-gpu-family"), "only on one kind of GPU"),
        pro("points", flag("cpu-fine"), "the same on CPU is fine"),
        pro("points", value("gpu", "apple", "amd", "npu", "other-cpu", "intel"), "a backend with fewer users"),
        pro("suggests", value("gpu", "blackwell"), "a GPU newer than many kernels"),
        pro(
            "points",
            either(about("attention-kernel", "attention-op"), value("attention", "sdpa", "flash", "xformers", "cudnn")),
            "a special attention kernel is in use",
        ),
        pro("suggests", about("kernel"), "a special kernel is in use"),
        pro("suggests", both(BAD_GRADIENT, about("attention-kernel")), "its backward pass gives NaN"),
        pro("points", either(about("compiled"), flag("compiled")), "the model is compiled"),
        pro("suggests", both(flag("compiled"), BROKEN), "and it broke without growth", unless=GROWTH),
        pro("suggests", both(value("gpu", "apple", "amd", "npu", "other-cpu", "intel"), BROKEN), "and it broke there"),
        pro(
            "points",
            about("versions"),
            "it depends on the version",
            unless=about("new-parameters", "ignored-labels", "no-targets"),
        ),
        pro("points", about("switched-off"), "switching a component off cures it", unless=flag("fp32-fine")),
        pro("suggests", about("other-model-fine"), "another model with the same recipe is fine"),
        pro("suggests", about("parallel-mode"), "one way of parallelism decides"),
        pro("suggests", FP8, "8-bit formats rest on young code"),
        pro("suggests", both(HIDDEN_NAN, either(BF16, AT_ONCE)), "a hidden NaN that fp16 does not explain"),
        pro("suggests", both(BAD_GRADIENT, BF16), "NaN gradients in bf16: a backward kernel"),
        pro(
            "suggests",
            either(flag("depends-on-seq-len"), onset("data-length-dependent")),
            "kernels fail at certain lengths",
        ),
        pro("suggests", flag("loss-above-uniform"), "the first loss is above chance level: a broken forward pass"),
        pro("suggests", flag("some-losses-zero"), "some loss terms are exactly 0"),
        pro("suggests", both(AT_ONCE, flag("loss-nan", "grad-nan-loss-finite", "grad-nan")), "wrong at the first step"),
        pro(
            "suggests",
            flag("spike-at-each-resume"),
            "a bump at each resume: step counter, parameter groups, data position",
        ),
        pro(
            "points",
            both(flag("spike-at-each-resume"), flag("lr-continuous")),
            "a bump at each resume although the rate goes on",
        ),
        pro(
            "hints",
            flag("event-correlated", "constant-grad-norm", "no-loss-symptom", "level-shift"),
            "it follows the program, not the data",
        ),
        pro("hints", onset("silent", "after-validation"), "it follows the program, not the data"),
        pro("hints", flag("lower-lr-only-delays", "not-reproducible-elsewhere"), "the setup decides"),
        pro("hints", both(flag("fp32-fine"), FP16), "the half-precision path is wrong"),
        pro("hints", denied("loss-explodes-before-nan"), "sudden: no growth in loss or gradient norm beforehand"),
        con("hints", either(value("attention", "eager"), denied("compiled")), "the plain path fails too"),
        con("suggests", denied("only-one-gpu-family"), "it is NaN on another kind of GPU too"),
        con("suggests", denied("cpu-fine"), "it is NaN on the CPU too"),
        con("suggests", IN_SOME_BATCHES, "it comes with certain batches", unless=about("attention-kernel", "kernel")),
        con(
            "hints",
            flag("loss-explodes-before-nan", "grad-norm-drift", "loss-scale-collapse", "recovers"),
            "it grew, which a wrong kernel does not",
        ),
        con("suggests", flag("lr-discontinuity", "config-change-ignored"), "the learning rate explains it"),
    ),
    remedies=(
        Remedy(
            does='attn_implementation="eager" (or torch.backends.cuda.enable_flash_sdp(False)) for a hundred steps; '
            "if that helps, use another version of the kernel",
            when=either(about("attention-kernel", "attention-op"), value("attention")),
        ),
        Remedy(
            does='run a hundred steps without torch.compile (backend="eager"); if that helps, use another torch '
            "version",
            when=flag("compiled"),
        ),
        Remedy(
            does="turn off one component at a time for a hundred steps: torch.compile, fused optimizer, attention "
            "kernel; then try another version, or the CPU"
        ),
    ),
    verify="The same hundred steps are finite with that one component switched off or exchanged, and bad again "
    "with it.",
)
