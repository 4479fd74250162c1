"""One vocabulary over all dialects: ``lr`` is lr, whether it is called learning_rate, base_lr or optimizer.params.lr.

>>> from .overrides import unfold
>>> from .value import Layers
>>> layers = Layers()
>>> config = {"per_device_train_batch_size": 8, "learning_rate": "5e-5", "trainer": {"gradient_clip_val": 1}}
>>> for value in unfold("", config, path="c.yaml", line=1, text="", origin="yaml"):
...     layers.put(value)
>>> meaning = Meaning.of(layers.settings())
>>> meaning.number("lr"), meaning.number("clip_norm"), meaning.number("warmup_steps")
(5e-05, 1.0, None)
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from .value import Origin, Settings, Value

# concept: the names it goes by, best first; a name with a dot must be the end of the dotted key
VOCABULARY: dict[str, tuple[str, ...]] = {
    "lr": (
        "learning_rate",
        "lr",
        "base_lr",
        "max_lr",
        "peak_lr",
        "lr0",
        "init_lr",
        "initial_lr",
        "lr_init",
        "blr",
        "base_learning_rate",
        "peak_learning_rate",
        "max_learning_rate",
        "lrate",
        "train_lr",
        "opt_lr",
        "lr_base",
    ),
    "min_lr": (
        "min_lr",
        "lr_min",
        "minimum_lr",
        "eta_min",
        "final_lr",
        "end_lr",
        "lr_end",
        "min_learning_rate",
        "warmup_min_lr_ratio",
    ),
    "warmup_steps": (
        "warmup_steps",
        "num_warmup_steps",
        "warmup_iters",
        "lr_warmup_steps",
        "warmup_num_steps",
        "warmup_updates",
        "warm_up_steps",
        "warmup_step",
        "n_warmup_steps",
        "warmup_iterations",
        "warmup_iter",
        "lr_warmup_iters",
        "num_warmup_iters",
        "warmup",
        "warm_up",
    ),
    "warmup_epochs": ("warmup_epochs", "warm_up_epochs", "num_warmup_epochs", "warmup_epoch", "lr_warmup_epochs"),
    "warmup_ratio": ("warmup_ratio", "warmup_fraction", "warmup_proportion", "lr_warmup_ratio", "pct_start"),
    "max_steps": (
        "max_steps",
        "total_steps",
        "num_training_steps",
        "max_train_steps",
        "train_num_steps",
        "num_train_steps",
        "train_steps",
        "training_steps",
        "max_iters",
        "max_iter",
        "train_iters",
        "total_iters",
        "max_updates",
        "max_update",
        "num_steps",
        "total_num_steps",
    ),
    "epochs": ("num_train_epochs", "max_epochs", "num_epochs", "epochs", "n_epochs", "train_epochs", "max_epoch"),
    "clip_norm": (
        "max_grad_norm",
        "gradient_clip_val",
        "gradient_clipping",
        "grad_clip_norm",
        "clip_grad_norm",
        "grad_norm_clip",
        "gradient_clip_norm",
        "gradient_clip",
        "grad_clip",
        "clip_grad",
        "clip_gradient",
        "clip_gradients",
        "clip_norm",
        "clip_max_norm",
        "max_norm_grad",
        "grad_clip_val",
        "grad_clip_max_norm",
        "grad_norm_max",
        "max_grad",
        "clip_grad_norm_.max_norm",
        "grad_clip.max_norm",
        "clip_value",
    ),
    "batch_size": (
        "per_device_train_batch_size",
        "train_micro_batch_size_per_gpu",
        "micro_batch_size",
        "train_batch_size",
        "batch_size",
        "batch_size_per_gpu",
        "samples_per_gpu",
        "per_gpu_train_batch_size",
        "bs",
    ),
    "accumulation": (
        "gradient_accumulation_steps",
        "accumulate_grad_batches",
        "grad_accum_steps",
        "accumulation_steps",
        "gradient_accumulate_every",
        "grad_accumulation_steps",
        "grad_accumulation",
        "grad_accum",
        "accum_iter",
        "accum_steps",
        "accum_grad",
        "accumulate_steps",
        "accumulate_batches",
        "gradient_accumulation",
        "accumulation",
        "update_freq",
    ),
    "optimizer": (
        "optimizer.type",
        "optimizer.name",
        "optimizer._target_",
        "optimizer.class_path",
        "optim.name",
        "optim.type",
        "optim._target_",
        "optimizer_type",
        "optimizer_name",
        "opt.name",
        "optim.optimizer",
        "optimizer",
        "optim",
        "opt_type",
        "opt",
    ),
    "betas": ("betas", "adam_betas"),
    "beta1": ("beta1", "adam_beta1"),
    "beta2": ("beta2", "adam_beta2"),
    "eps": (
        "adam_epsilon",
        "adam_eps",
        "optimizer.eps",
        "optim.eps",
        "optimizer.params.eps",
        "optimizer.epsilon",
        "optimizer_eps",
        "optimizer.init_args.eps",
        "opt_eps",
        "optim_eps",
        "opt.eps",
        "optimizer.opt_eps",
        *(f"{name}.eps" for name in ("Adam", "AdamW", "NAdam", "RAdam", "Adamax", "FusedAdam", "AdamW8bit")),
    ),
    "weight_decay": ("weight_decay", "wd", "decay_weight"),
    "scheduler": (
        "lr_scheduler_type",
        "scheduler.type",
        "scheduler.name",
        "scheduler._target_",
        "lr_scheduler.type",
        "lr_scheduler.name",
        "lr_scheduler._target_",
        "sched.name",
        "scheduler_type",
        "lr_scheduler",
        "lr_schedule",
        "scheduler",
        "lr_decay_style",
        "sched",
    ),
    "fp16": ("fp16.enabled", "fp16", "use_fp16", "enable_fp16", "half"),
    "bf16": ("bf16.enabled", "bfloat16.enabled", "bf16", "use_bf16", "enable_bf16"),
    "amp": ("use_amp", "amp", "enable_amp", "amp_enabled", "amp.enabled", "use_mixed_precision", "with_amp"),
    "mixed_precision": ("mixed_precision", "precision", "amp_dtype", "autocast_dtype", "mixed_precision_dtype"),
    "train_dtype": ("train_dtype", "training_dtype", "compute_dtype", "ptdtype", "training.dtype", "dtype"),
    "load_dtype": ("torch_dtype", "model_dtype", "load_dtype", "weight_dtype", "weights_dtype"),
    "load_in_4bit": ("load_in_4bit", "load_in_8bit", "use_qlora"),
    "loss_scale": ("fp16.loss_scale", "static_loss_scale", "fp16.static_loss_scale", "fp16_loss_scale"),
    "initial_scale": ("fp16.initial_scale_power", "initial_scale_power", "init_scale", "initial_loss_scale"),
    "min_loss_scale": ("fp16.min_loss_scale", "min_loss_scale"),
    "growth_interval": ("growth_interval", "fp16.loss_scale_window", "loss_scale_window"),
    "norm_eps": (
        "rms_norm_eps",
        "layer_norm_eps",
        "norm_eps",
        "layer_norm_epsilon",
        "layernorm_epsilon",
        "rmsnorm_eps",
        "layernorm_eps",
        "ln_eps",
        "rms_eps",
    ),
    "nan_filter": ("logging_nan_inf_filter",),
    "seed": ("seed", "random_seed", "manual_seed"),
    "save_every": (
        "save_steps",
        "save_every",
        "checkpoint_every",
        "save_interval",
        "ckpt_interval",
        "save_freq",
        "save_every_n_steps",
        "checkpoint_interval",
        "checkpointing_steps",
        "every_n_train_steps",
        "save_and_sample_every",
        "save_iters",
        "ckpt_every",
        "checkpoint_freq",
        "save_checkpoint_every",
    ),
    "resume_from": (
        "resume_from_checkpoint",
        "resume_from",
        "resume",
        "resume_checkpoint",
        "resume_path",
        "resume_milestone",
        "ckpt_path",
        "init_from",
        "load_checkpoint",
    ),
    "ema": ("ema_decay", "ema_rate", "use_ema", "ema.decay", "ema"),
    "lora": ("use_peft", "use_lora", "lora_r", "lora_rank", "lora_alpha", "lora.r", "peft.r", "finetuning_type"),
}

_NAMES: dict[str, list[tuple[str, int]]] = {}
for _concept, _names in VOCABULARY.items():
    for _rank, _name in enumerate(_names):
        _NAMES.setdefault(_name.lower(), []).append((_concept, _rank))

# Sections that train something else beside the model, or describe a grid of values.
_ASIDE = re.compile(
    r"(^|[._])(disc|discriminator|critic|sweep|parameters|search_space|finetune_head|eval|evaluation|inference|"
    r"generation|sampling|wandb|logger|hydra|dataset|tokenizer|vae|teacher|optimizer_d|probe|linear_eval)([._]|$)"
)
_RANK: dict[Origin, int] = {"command-line": 0, "training-args": 1, "environment": 1, "call": 3, "argparse": 4}


def concepts_of(key: str) -> list[tuple[str, int]]:
    """What a dotted key may mean, with how plainly it says so (0 is best).

    >>> concepts_of("train.optimizer.params.lr")
    [('lr', 1)]
    """
    parts = key.lower().replace("-", "_").split(".")
    for count in (3, 2, 1):
        found = _NAMES.get(".".join(parts[-count:])) if len(parts) >= count else None
        if found:
            return found
    return []


@dataclass(frozen=True, slots=True, kw_only=True)
class Meaning:
    """The settings by concept, the one in force first."""

    found: Mapping[str, tuple[Value, ...]]

    @classmethod
    def of(cls, settings: Settings) -> Meaning:
        ranked: dict[str, list[tuple[tuple[int, ...], Value]]] = {}
        for value in settings:
            for concept, rank in concepts_of(value.key):
                if not value.known and value.origin != "call":
                    continue
                aside = bool(_ASIDE.search(value.key.lower()))
                order = (aside, not value.known, _RANK.get(value.origin, 2), value.key.count("."), rank)
                ranked.setdefault(concept, []).append((order, value))
        pairs = {c: sorted(vs, key=lambda pair: pair[0]) for c, vs in ranked.items()}
        return cls(found={c: tuple(v for _, v in vs) for c, vs in pairs.items()})

    def get(self, concept: str) -> Value | None:
        """The value in force, if it is written anywhere."""
        found = self.found.get(concept, ())
        return found[0] if found else None

    def all(self, concept: str) -> tuple[Value, ...]:
        return self.found.get(concept, ())

    def number(self, concept: str) -> float | None:
        """The number behind a concept; None when it is not set or no number."""
        value = self.get(concept)
        return value.number if value is not None and value.known else None

    def word(self, concept: str) -> str:
        """The word behind a concept in lower case; '' when it is not set."""
        value = self.get(concept)
        return str(value.value).lower() if value is not None and value.known and value.value is not None else ""


def is_on(value: Value) -> bool:
    """Whether a switch is on, as YAML, command lines and people say it."""
    return value.known and (value.value is True or str(value.value).lower() in ("true", "yes", "on", "1"))
