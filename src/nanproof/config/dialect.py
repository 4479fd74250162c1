"""Which tool a config is written for, told by its keys.

>>> dialect_of(["compute_environment", "distributed_type", "mixed_precision"])
'accelerate'
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

Dialect = Literal["accelerate", "deepspeed", "transformers", "lightning", "hydra", "plain"]

_ACCELERATE = {"compute_environment", "distributed_type", "main_training_function", "num_machines", "downcast_bf16"}
_DEEPSPEED = {"zero_optimization", "train_micro_batch_size_per_gpu", "zero_allow_untested_optimizer"}
_DEEPSPEED_PARTS = {
    "fp16.enabled",
    "bf16.enabled",
    "fp16.loss_scale",
    "fp16.loss_scale_window",
    "fp16.initial_scale_power",
    "fp16.hysteresis",
}
SECTIONS = (
    "fp16",
    "bf16",
    "optimizer",
    "scheduler",
    "zero_",
    "gradient_",
    "train_",
    "steps_per_print",
    "wall_clock_breakdown",
    "amp",
    "activation_checkpointing",
    "communication_",
    "prescale_gradients",
    "sparse_",
    "data_types",
    "flops_profiler",
)
"""How the keys begin that DeepSpeed reads from its file."""
_TRANSFORMERS = {
    "per_device_train_batch_size",
    "num_train_epochs",
    "lr_scheduler_type",
    "max_grad_norm",
    "output_dir",
    "gradient_accumulation_steps",
    "warmup_ratio",
    "logging_steps",
    "save_strategy",
    "adam_epsilon",
}


def dialect_of(keys: Iterable[str]) -> Dialect:
    """The tool that reads a config with these keys; ``plain`` when only the project's own code would know."""
    all_keys = set(keys)
    tops = {k.partition(".")[0] for k in all_keys}
    names = {k.rpartition(".")[2] for k in all_keys}
    if len(tops & _ACCELERATE) >= 2:
        return "accelerate"
    if tops & _DEEPSPEED or all_keys & _DEEPSPEED_PARTS:
        return "deepspeed"
    if "per_device_train_batch_size" in tops or len(tops & _TRANSFORMERS) >= 4:
        return "transformers"
    if "trainer" in tops and names & {"class_path", "init_args"}:
        return "lightning"
    if names & {"_target_", "_component_"} or "hydra" in tops:
        return "hydra"
    return "plain"
