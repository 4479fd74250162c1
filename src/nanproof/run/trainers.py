"""Trainers that need a callback of their own: it is added when the script makes one."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

from ..plugins import plugins
from .import_hooks import ImportHooks
from .patches import Patches
from .session import Session


def watch_trainers(hooks: ImportHooks, patches: Patches, session: Session) -> None:
    """Await the libraries that bring trainers or write checkpoints."""

    def hugging_face(module: ModuleType) -> None:
        def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
            def init(trainer: Any, *args: Any, **kwargs: Any) -> None:
                original(trainer, *args, **kwargs)
                from ..integrations.transformers import GuardCallback

                if not any(isinstance(c, GuardCallback) for c in trainer.callback_handler.callbacks):
                    trainer.add_callback(GuardCallback.made_by(session.guards.make))

            return init

        patches.put(module.Trainer, "__init__", wrap)

    def lightning(module: ModuleType) -> None:
        def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
            def init(trainer: Any, *args: Any, **kwargs: Any) -> None:
                original(trainer, *args, **kwargs)
                from ..integrations.lightning import GuardCallback

                if not any(isinstance(c, GuardCallback) for c in trainer.callbacks):
                    trainer.callbacks.append(GuardCallback.made_by(session.guards.make))

            return init

        patches.put(module.Trainer, "__init__", wrap)

    def deepspeed(module: ModuleType) -> None:
        def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
            def init(engine: Any, *args: Any, **kwargs: Any) -> None:
                original(engine, *args, **kwargs)
                session.guard_engine(engine)

            return init

        patches.put(module.DeepSpeedEngine, "__init__", wrap)

    def keras(_: ModuleType) -> None:
        session.miss("Keras", "its optimizers are not torch's, and a step of theirs cannot be vetoed")

    for watch in plugins("trainers"):
        watch(hooks, patches, session)
    hooks.await_module("transformers.trainer", hugging_face)
    hooks.await_module("lightning.pytorch.trainer.trainer", lightning)
    hooks.await_module("pytorch_lightning.trainer.trainer", lightning)
    hooks.await_module("deepspeed.runtime.engine", deepspeed)
    hooks.await_module("keras.src.backend.torch.trainer", keras)
    hooks.await_module("safetensors.torch", patches.patch_safetensors)
    hooks.await_module("transformers.modeling_utils", patches.patch_pretrained)
    hooks.await_module("torch.distributed.checkpoint.state_dict_saver", patches.patch_checkpoint)
