"""Libraries that the guard has to know: trainers get their callback, averages and schedules are held on a skip."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from ..plugins import plugins
from .attachment import KERAS
from .import_hooks import ImportHooks
from .patches import Patches
from .session import Session

_AVERAGES = (
    ("ema_pytorch.ema_pytorch", "EMA", "update"),
    ("timm.utils.model_ema", "ModelEma", "update"),
    ("timm.utils.model_ema", "ModelEmaV2", "update"),
    ("timm.utils.model_ema", "ModelEmaV3", "update"),
    ("diffusers.training_utils", "EMAModel", "step"),
    ("torch_ema.ema", "ExponentialMovingAverage", "update"),
)
"""Averages of the weights that are not torch's: module, class, and the method that takes the weights in."""


def watch_trainers(hooks: ImportHooks, patches: Patches, session: Session) -> None:
    """Await the libraries that bring trainers, averages or schedules, or write checkpoints."""

    def add_callback(home: str, find: Callable[[Any], list[Any]]) -> Callable[[ModuleType], None]:
        def make_trainer(original: Callable[..., Any], trainer: Any, *args: Any, **kwargs: Any) -> None:
            original(trainer, *args, **kwargs)
            callback = getattr(__import__(home, fromlist=["GuardCallback"]), "GuardCallback")  # noqa: B009
            if not any(isinstance(c, callback) for c in find(trainer)):
                find(trainer).append(callback.made_by(session.guards.make))

        return lambda module: patches.put(module.Trainer, "__init__", make_trainer)

    def make_engine(original: Callable[..., Any], engine: Any, *args: Any, **kwargs: Any) -> None:
        session.guard_engine(engine, lambda: original(engine, *args, **kwargs))

    def deepspeed(module: ModuleType) -> None:
        patches.put(module.DeepSpeedEngine, "__init__", make_engine)

    def train_keras(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        session.miss(*KERAS)
        return original(*args, **kwargs)

    def averages(module: ModuleType) -> None:
        for home, kind, method in _AVERAGES:
            if home == module.__name__ and method in vars(getattr(module, kind, object)):
                patches.put(getattr(module, kind), method, patches.average)

    def timm_schedule(module: ModuleType) -> None:
        patches.put(module.Scheduler, "step", patches.schedule)
        patches.put(module.Scheduler, "step_update", patches.schedule_at)

    def safetensors(module: ModuleType) -> None:
        for name in ("save_file", "save_model"):
            patches.put(module, name, patches.save)

    def checkpoints(module: ModuleType) -> None:
        for name in ("save", "async_save"):
            patches.put(module, name, patches.save_together)
            patches.share(sys.modules[module.__package__ or ""], name, module)

    transformers = add_callback("nanproof.integrations.transformers", lambda t: t.callback_handler.callbacks)
    lightning = add_callback("nanproof.integrations.lightning", lambda t: t.callbacks)
    for name, action in {
        "transformers.trainer": transformers,
        "lightning.pytorch.trainer.trainer": lightning,
        "pytorch_lightning.trainer.trainer": lightning,
        "deepspeed.runtime.engine": deepspeed,
        "keras.src.backend.torch.trainer": lambda m: patches.put(m.TorchTrainer, "train_step", train_keras),
        **{home: averages for home, _, _ in _AVERAGES},
        "timm.scheduler.scheduler": timm_schedule,
        "safetensors.torch": safetensors,
        "transformers.modeling_utils": lambda m: patches.put(m.PreTrainedModel, "save_pretrained", patches.save),
        "torch.distributed.checkpoint.state_dict_saver": checkpoints,
    }.items():
        hooks.await_module(name, action)
    for watch in plugins("trainers"):
        watch(hooks, patches, session)
