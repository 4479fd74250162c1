"""The nine recommendations of MM-LDLM's post-mortem, each tried alone."""

from __future__ import annotations

from ..claims import Claim

CLAIMS = (
    Claim(
        advice="halve the learning rate",
        before="lr 5e-3",
        after="2.5e-3",
        why="the mixing matrices still multiply, only more slowly: bound them (doubly stochastic), keep the rate",
        overrides=("optimizer.lr=2.5e-3",),
    ),
    Claim(
        advice="clip at 0.5",
        before="grad_clip_norm 1.0",
        after="0.5",
        why="Adam divides the scale of the gradients out again; and it is the weights that grow, not the gradients",
        overrides=("training.grad_clip_norm=0.5",),
    ),
    Claim(
        advice="warm up for longer",
        before="warmup_steps 10",
        after="20",
        why="the streams grow during the warm-up too; nothing in it stops them afterwards",
        overrides=("optimizer.warmup_steps=20",),
    ),
    Claim(
        advice="weigh the latent loss less",
        before="latent_weight 1.0",
        after="0.1",
        why="in l2t there is no latent loss to weigh: the key is read, and multiplies nothing",
        overrides=("loss.latent_weight=0.1",),
    ),
    Claim(
        advice="accumulate two batches",
        before="accumulate_batches 1",
        after="2",
        why="no code reads the key: nanproof harden calls it dead",
        overrides=("training.accumulate_batches=2",),
    ),
    Claim(
        advice="normalize the latents to length 1",
        before="as they come, deviation 25",
        after="F.normalize",
        why="the first LayerNorm took the scale out anyway, and what a latent says by its length is lost: standardise",
        overrides=("advice=[normalize_latents]",),
    ),
    Claim(
        advice="add an eps to the masked mean",
        before="/ mask.sum()",
        after="/ (mask.sum().clamp(min=1) + 1e-8)",
        why="the clamp guards against an empty mask, which never came; the eps after it is rounded away",
        overrides=("advice=[eps_in_masked_mean]",),
    ),
    Claim(
        advice="clamp the loss",
        before="loss",
        after="loss.clamp(0, 100)",
        why="the loss was near ln 4 until it was NaN, and NaN clamped is NaN: there was never anything to clamp",
        overrides=("advice=[clamp_loss]",),
    ),
    Claim(
        advice="skip batches that are not finite",
        before="zero the gradients, step anyway",
        after="continue",
        why="the weights are bad, not the batch: every later batch is skipped too; go back to an older state, or stop",
        overrides=("advice=[skip_nonfinite]",),
    ),
)
