"""A mean over nothing."""

from __future__ import annotations

from ..cause import Cause, Remedy
from ..clue import about, both, con, denied, either, flag, onset, pro, value
from ..signs import BROKEN, GROWTH, IN_SOME_BATCHES

CAUSE = Cause(
    name="empty-target-mean",
    title="a loss averages over nothing: no label, box or token counts",
    what="""The mean over no element is 0/0. Batches whose labels are all ignore_index, images without a box,
masked-language batches in which no token was chosen, answers that truncation cut away: the loss is NaN there, or
exactly 0 with a gradient of 0 where the library guards it. When a chat template does not match its markers, every
label is masked and nothing is learned.""",
    share=6.0,
    replayed=("empty-reduction",),
    clues=(
        pro("names", about("ignored-labels"), "the report mentions labels that are all ignored"),
        pro("names", about("no-targets"), "the report mentions empty targets", unless=about("new-parameters")),
        pro("points", about("template"), "the report mentions a template or its markers"),
        pro(
            "names",
            flag("loss-zero-grad-zero"),
            "loss and gradient are both exactly 0",
            unless=flag("loss-zero-is-normal-in-grpo"),
        ),
        pro(
            "suggests",
            flag("loss-zero"),
            "the logged loss is exactly 0",
            unless=either(flag("grad-nan", "loss-zero-is-normal-in-grpo"), about("rlhf")),
        ),
        pro(
            "suggests",
            either(onset("data-dependent", "intermittent"), flag("intermittent-nan")),
            "it comes with certain batches",
        ),
        pro("suggests", flag("one-component-nan"), "one loss component is NaN first"),
        pro("hints", flag("some-losses-zero"), "some loss terms are exactly 0"),
        pro("hints", flag("keeps-training"), "training goes on afterwards"),
        pro("hints", flag("eval-only-nan"), "an evaluation batch without targets gives NaN"),
        pro("hints", both(flag("no-learning"), about("pre-trained", "template", "adapter")), "nothing is learned"),
        pro("hints", about("detection", "segmentation"), "images without targets are common here"),
        pro("points", both(flag("divides-by-count"), BROKEN), "the code divides by a count that can be 0"),
        pro("suggests", both(flag("divides-by-count"), flag("one-component-nan")), "and one term is NaN first"),
        pro("points", both(flag("empty-tensor"), BROKEN), "a tensor without elements was printed"),
        pro("names", both(flag("empty-split"), either(BROKEN, flag("eval-only-nan"))), "a split of the data is empty"),
        pro(
            "suggests",
            both(flag("ignores-labels"), either(flag("one-component-nan"), IN_SOME_BATCHES)),
            "the code takes a mean over labels that are not ignored, and one term or some batches are NaN",
        ),
        pro("points", both(flag("response-template"), BROKEN), "labels depend on a template that may be missing"),
        pro("points", both(flag("labels-truncated"), BROKEN), "truncation can leave only labels that are ignored"),
        pro("names", both(flag("data-empty"), BROKEN), "a scan of the data found empty texts or files"),
        pro("proves", flag("labels-all-masked"), "the log says that all labels are masked"),
        pro(
            "points",
            value("lint", "NP201", "NP202"),
            "the code divides by a count that can be 0",
            unless=flag("divides-by-count"),
        ),
        con("names", GROWTH, "0 / 0 comes at once: nothing grows before it"),
        con("hints", denied("one-component-nan"), "all loss terms break together"),
        con("names", denied("labels-all-masked"), "every batch has a label that counts"),
        con(
            "suggests",
            flag("fp32-fine", "only-multi-gpu", "only-one-gpu-family", "nan-weights"),
            "labels do not care for hardware or precision",
        ),
        con("points", flag("device-assert"), "a mean over nothing raises no assertion"),
        con("hints", flag("loss-zero-grad-nan"), "a hidden NaN, not a true 0"),
        con("hints", onset("late", "random-late"), "it would have come earlier", unless=IN_SOME_BATCHES),
    ),
    remedies=(
        Remedy(
            does="make the response markers match the chat template, raise the cutoff length, and count labels other "
            "than -100 in one batch before training",
            when=either(
                about("template", "ignored-labels"),
                flag("labels-all-masked", "loss-zero-grad-zero", "response-template", "labels-truncated"),
            ),
        ),
        Remedy(
            does="use nanproof.ops.masked_mean or masked_cross_entropy (0 for an empty batch), or drop such batches"
        ),
    ),
    verify="A batch without targets gives loss 0 and finite gradients; a normal batch gives the same loss as before.",
)
