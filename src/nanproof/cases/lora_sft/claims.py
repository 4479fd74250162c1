"""The seven recommendations of the fine-tuning's post-mortem, each tried alone."""

from __future__ import annotations

from ..claims import Claim, Judgement, Runs


def _infer_in_half(runs: Runs) -> Judgement:
    """The healthy adapters of the float32 run, on the base model loaded in float16, and in bfloat16 for comparison."""
    import torch
    from peft import PeftModel
    from transformers import LlamaForCausalLM
    from transformers.utils.logging import disable_progress_bar

    from ..settings import load
    from . import base, task, train

    disable_progress_bar()
    run, trained = runs.folder("advised"), runs.result("advised")
    tokenizer = task.make_tokenizer()
    weights = base.find_base(run.parent, tokenizer, load(train.FOLDER / "configs", "advised"))
    right: dict[torch.dtype, float] = {}
    for dtype in (torch.float16, torch.bfloat16):
        model = LlamaForCausalLM.from_pretrained(weights, dtype=dtype)
        tuned = PeftModel.from_pretrained(model, str(run / "checkpoints" / f"checkpoint-{trained.steps}"))
        _, right[dtype] = train.ask(tuned, tokenizer, torch.device("cpu"))
    measured = f"accuracy {trained.value:.2f} in float32, {right[torch.bfloat16]:.2f} in bfloat16, "
    measured += f"{right[torch.float16]:.2f} in float16"
    lost = right[torch.float16] < trained.value / 2
    return Judgement(verdict="harmful" if lost else "inert", measured=measured)


CLAIMS = (
    Claim(
        advice="load the weights in float32",
        before="load_dtype float16",
        after="float32",
        why="autocast still computes in float16, where the activations do not fit",
        overrides=("model.load_dtype=float32",),
    ),
    Claim(
        advice="switch fp16 off",
        before="fp16: true",
        after="fp16: false",
        why="the weights are still float16, and so is what they compute; without the scaler even the adapters are lost",
        overrides=("training.fp16=false",),
    ),
    Claim(
        advice="both: float32 throughout",
        before="float16, fp16: true",
        after="float32, fp16: false",
        why="heals, at twice the memory of bfloat16 and at float32's speed; bf16 heals too",
        overrides=("model.load_dtype=float32", "training.fp16=false"),
    ),
    Claim(
        advice="a lower learning rate",
        before="lr 5e-3",
        after="1e-3",
        why="the forward pass was NaN before any update",
        overrides=("optimizer.lr=1e-3",),
    ),
    Claim(
        advice="clip more strongly",
        before="grad_clip_norm 1.0",
        after="0.3",
        why="a NaN norm clips nothing, and there are no finite gradients to clip",
        overrides=("training.grad_clip_norm=0.3",),
    ),
    Claim(
        advice="a longer warm-up",
        before="warmup_steps 5",
        after="30",
        why="every step is left out, so the schedule never leaves its first rate, which is 0",
        overrides=("optimizer.warmup_steps=30",),
    ),
    Claim(
        advice="half precision for inference",
        before="float32",
        after="float16",
        why="the same activations overflow there, without any training: bfloat16 is the half that fits",
        measure=_infer_in_half,
    ),
)
