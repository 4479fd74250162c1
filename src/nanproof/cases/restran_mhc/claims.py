"""The seven recommendations of ResTran's post-mortem, each tried alone."""

from __future__ import annotations

import torch

from ..claims import Claim, Judgement, Runs, judge_by_fate
from ..settings import load
from .evaluate import evaluate, settle_statistics
from .setup import make_model
from .train import FOLDER


def _start_fresh(runs: Runs) -> Judgement:
    """What is in the checkpoint that was given up: its parameters, with BatchNorm's statistics collected again."""
    last = sorted((runs.folder("original") / "checkpoints").glob("step_*.pt"))[-1]
    state = torch.load(last, weights_only=True)
    found = state["model"]
    bad = [name for name, value in found.items() if not value.isfinite().all()]
    assert all("running_" in name for name in bad), bad
    model = make_model(load(FOLDER / "configs", "original"))
    model.load_state_dict(found)
    settle_statistics(model)
    score = evaluate(model)
    again = runs.result("advised")
    fate = f"dies again, at step {again.first_bad_step}" if again.outcome == "died" else f"ends {again.outcome}"
    told = (
        f"{len(bad)} of {len(found)} tensors were bad, all of them BatchNorm statistics; with these collected again "
        f"the checkpoint reads {score.value:.2f} of the plates; a fresh run {fate}"
    )
    if again.value >= score.value:
        return Judgement(verdict="helped", measured=told)
    return Judgement(verdict="harmful", measured=told)


def _lower_rate_on_resume(runs: Runs) -> Judgement:
    """The rate in force after a resume, against the one that the config asks for."""
    result = runs.result("resumed")
    asked = load(FOLDER / "configs", "resumed").optimizer.lr
    told = f"lr {result.lr:.3g} in force, {asked:.3g} in the config"
    if result.lr <= asked:
        return Judgement(verdict="helped", measured=told)
    return Judgement(verdict="inert", measured=f"{told}; {result.outcome} at step {result.first_bad_step}")


def _two_streams(runs: Runs) -> Judgement:
    return judge_by_fate(runs, "safe")


CLAIMS = (
    Claim(
        advice="the checkpoint is corrupted: start afresh",
        before="the last checkpoint",
        after="step 0",
        why="the parameters were finite; nanproof scan --repair heals it, and a fresh run dies of the same",
        measure=_start_fresh,
    ),
    Claim(
        advice="clamp the gates' logits",
        before="phi(norm(pooled))",
        after=".clamp(-5, 5)",
        why="it bounds how far the gates go, not what four sigmoids at 0.5 do: the map doubles per block; softmax",
        overrides=("advice=[clamp_gate_logits]",),
    ),
    Claim(
        advice="clamp and eps in Sinkhorn",
        before="exp(x), / x.sum()",
        after="exp(x.clamp(-10, 10)), / (x.sum() + 1e-8), where(isfinite)",
        why="its matrix was finite at every step, and only its diagonal was used: mix with bij,bjchw->bichw",
        overrides=("advice=[clamp_sinkhorn]",),
    ),
    Claim(
        advice="a larger eps in RMSNorm",
        before="eps 1e-20",
        after="1e-8",
        why="it normalizes maps of thousands; both are nothing beside them",
        overrides=("model.rms_eps=1e-8",),
    ),
    Claim(
        advice="clip at 1.0",
        before="grad_clip_norm 5.0",
        after="1.0",
        why="gradients were small when it died: it is the forward pass that leaves the range",
        overrides=("training.grad_clip_norm=1.0",),
    ),
    Claim(
        advice="lower the learning rate and resume",
        before="lr 5e-2",
        after="1e-2, from step 20",
        why="the checkpoint's OneCycleLR brings the old rate back: take its place in the schedule, not its rate",
        measure=_lower_rate_on_resume,
    ),
    Claim(
        advice="two streams, and a lower learning rate",
        before="n 4, lr 5e-2",
        after="n 2, lr 1.5e-2",
        why="two sigmoids sum to 1 where four sum to 2; with a convex read-out four streams may stay",
        measure=_two_streams,
    ),
)
