"""Ranks that do not do the same, or communication that overlaps with computing."""

from __future__ import annotations

from ..cause import Cause, Remedy
from ..clue import about, both, con, denied, either, flag, onset, pro, value
from ..signs import BAD_GRADIENT, FP8, HIDDEN_NAN

CAUSE = Cause(
    name="distributed-desync",
    title="ranks fell out of step, or communication overlapped with computation",
    what="""Gradients reduced while they are still being written (overlap_comm, overlapped all-gather), a rank that
skips a batch or a backward pass while the others wait, replicas that drift apart: single-GPU runs are right,
several GPUs or nodes are not. Often the loss is finite and the gradient norm is not.""",
    share=5.0,
    clues=(
        pro("names", flag("only-multi-gpu"), "only with several GPUs or nodes"),
        pro("names", flag("replica-weights-differ"), "replicas hold different weights"),
        pro("points", about("overlap"), "the report mentions overlapped communication"),
        pro("names", about("rank-skips"), "the report mentions ranks that do different things"),
        pro("suggests", either(flag("several-nodes"), about("distributed")), "training is distributed"),
        pro(
            "points",
            both(HIDDEN_NAN, either(about("deepspeed"), flag("several-nodes"))),
            "a hidden NaN under DeepSpeed or on several nodes",
        ),
        pro(
            "suggests",
            both(BAD_GRADIENT, either(about("distributed"), flag("several-nodes", "several-gpus"))),
            "NaN gradients in a distributed run",
        ),
        pro(
            "hints",
            both(HIDDEN_NAN, either(about("distributed"), flag("several-gpus", "several-nodes"))),
            "a hidden NaN: a third of such runs were communication",
        ),
        pro("hints", both(FP8, about("distributed")), "8-bit scales travel between ranks"),
        pro(
            "suggests", both(onset("silent"), either(about("distributed"), flag("no-loss-symptom"))), "no step shows it"
        ),
        pro("points", flag("collective-timeout"), "a collective timed out: a rank did not take part"),
        pro("proves", value("lint", "NP401", "NP402", "NP404"), "the code branches on one rank"),
        pro("names", flag("overlap-comm"), "communication overlaps with computation"),
        pro("names", flag("bypasses-ddp"), "gradients are not synchronized"),
        con("names", denied("only-multi-gpu"), "it is NaN on a single GPU too"),
        con("names", flag("single-gpu"), "a single GPU"),
        con(
            "hints",
            flag(
                "loss-scale-collapse", "loss-explodes-before-nan", "recovers", "irregular-spikes", "spike-then-plateau"
            ),
            "growth or spikes have other reasons",
        ),
        con("hints", onset("before-training", "after-resume", "at-lr-peak"), "another sign"),
    ),
    remedies=(
        Remedy(
            does="turn the overlap off for a hundred steps; then try a larger bucket or a newer version",
            when=either(about("deepspeed", "overlap"), flag("overlap-comm")),
        ),
        Remedy(
            does="run a hundred steps on one GPU; if that is fine, turn overlap off and let all ranks decide together "
            "about skipping a batch"
        ),
    ),
    verify="A hash of the parameters is equal on all ranks after a hundred steps, and the run is finite with "
    "overlap off.",
)
