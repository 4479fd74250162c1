"""Hugging Face Trainer, and what is built on it, such as TRL's SFTTrainer: one callback.

trainer = Trainer(model, args, train_dataset=data, callbacks=[GuardCallback(run_dir="runs/a")])
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import logging
import math
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from ..errors import UsageError
from ..guard import Policy
from ..guard.external import ExternalLoop, attach
from .deepspeed import EngineGuard, guard_engine
from .object_patches import ObjectPatches

try:
    from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
    from transformers.trainer_callback import ExportableState

    from .accelerate import attach_accelerator
except ImportError as error:
    raise UsageError("transformers is not installed", hint="pip install 'nanproof[hf]'") from error

log = logging.getLogger("nanproof")


class GuardCallback(TrainerCallback, ExportableState):  # type: ignore[misc]
    """Guards what a Trainer trains. Options are those of `Guard`; the Trainer itself does accumulation and clipping.

    A skipped step still counts in the Trainer's ``global_step``; the guard's log tells steps from updates. The
    guard's memory travels in the checkpoint's trainer_state.json.
    """

    def __init__(self, **options: Any) -> None:
        policy = options.get("policy")
        self._options = {**options, "policy": Policy(**policy)} if isinstance(policy, dict) else options
        self._make: Callable[..., ExternalLoop] = attach
        self.loop: ExternalLoop | None = None
        self._engine: EngineGuard | None = None
        self.memory: dict[str, Any] | None = None

    @classmethod
    def made_by(cls, make: Callable[..., ExternalLoop]) -> GuardCallback:
        """A callback whose guard is made by somebody else: `nanproof run` has options and a folder for it."""
        callback = cls()
        callback._make = make
        return callback

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        trainer = _calling_trainer(self)
        if self.loop is not None:
            self.loop.close()
        if getattr(trainer, "is_deepspeed_enabled", False):
            given = {k: v for k, v in self._options.items() if k in ("run_dir", "policy", "records")}
            self._engine = guard_engine(trainer.model_wrapped, **given)
            return
        self.loop = loop = attach_accelerator(
            trainer.accelerator,
            trainer.model_wrapped,
            trainer.optimizer,
            scheduler=trainer.lr_scheduler,
            divided=True,
            make=self._make,
            **self._options,
        )
        memory = _memory(state)
        if memory is not None and state.global_step > 0:
            loop.load_state_dict(memory)
        patches = ObjectPatches()
        for name in ("_save_checkpoint", "save_model"):
            patches.put(trainer, name, lambda original: _save(original, loop, trainer))
        rewards = getattr(trainer, "reward_funcs", None)
        if isinstance(rewards, list):  # TRL's online trainers
            trainer.reward_funcs = [_named_rewards(one, trainer) for one in rewards]
            loop.on_close(lambda: setattr(trainer, "reward_funcs", rewards))
        loop.on_close(patches.undo)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        if control.should_save and self.loop is not None:
            target = Path(args.output_dir or "", f"checkpoint-{state.global_step}")
            control.should_save = not self.loop.blocks_save(target)

    on_epoch_end = on_step_end

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        for guard in (self.loop, self._engine):
            if guard is not None:
                guard.close()

    def state(self) -> dict[str, Any]:
        """What the Trainer writes into a checkpoint."""
        policy = self._options.get("policy")
        plain = {"policy": dataclasses.asdict(policy)} if isinstance(policy, Policy) else {}
        options = {k: str(v) if isinstance(v, Path) else v for k, v in self._options.items()}
        memory = self.loop.state_dict() if self.loop is not None else None
        return {"args": {**options, **plain}, "attributes": {"memory": memory}}


def _calling_trainer(callback: GuardCallback) -> Any:
    """The Trainer that runs this callback; it does not hand itself over."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        found = frame.f_locals.get("self")
        if isinstance(found, Trainer) and callback in found.callback_handler.callbacks:
            return found
        frame = frame.f_back
    raise UsageError("no Trainer runs this callback", hint="pass it as Trainer(callbacks=[GuardCallback()])")


def _memory(state: TrainerState) -> dict[str, Any] | None:
    """The guard's memory in a checkpoint's state, whether or not the Trainer restores its callbacks."""
    everyone: Any = state.stateful_callbacks or {}
    saved = everyone.get(GuardCallback.__name__) or {}
    mine = saved[0] if isinstance(saved, list) else saved
    memory: dict[str, Any] | None = mine.get("attributes", {}).get("memory")
    return memory


def _named_rewards(reward: Any, trainer: Any) -> Any:
    """Say which reward is NaN or infinite: TRL leaves it out of the update, so no gradient ever shows it."""
    if isinstance(reward, torch.nn.Module) or not inspect.isfunction(reward) or inspect.iscoroutinefunction(reward):
        return reward

    @functools.wraps(reward)
    def named(*args: Any, **kwargs: Any) -> Any:
        values = reward(*args, **kwargs)
        bad = [(i, v) for i, v in enumerate(values) if isinstance(v, float) and not math.isfinite(v)]
        if bad:
            log.warning(
                "nanproof: step %d: reward function %s returned %s for completion %d of %d (%d not finite)",
                trainer.state.global_step + 1,
                reward.__name__,
                bad[0][1],
                bad[0][0],
                len(values),
                len(bad),
            )
        return values

    return named


def _save(original: Callable[..., Any], loop: ExternalLoop, trainer: Any) -> Callable[..., Any]:
    def save(*args: Any, **kwargs: Any) -> Any:
        where = args[0] if args and isinstance(args[0], str) else trainer.args.output_dir
        return None if loop.blocks_save(where) else original(*args, **kwargs)

    return save
