"""Lightning: one callback.

trainer = Trainer(callbacks=[GuardCallback(run_dir="runs/a")])
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.optim import Optimizer

from ..errors import UsageError
from ..guard.external import ExternalLoop, attach
from .object_patches import ObjectPatches

# the same library under two names; the one that the script uses
_OLD = "pytorch_lightning" in sys.modules and "lightning.pytorch" not in sys.modules
try:
    if TYPE_CHECKING or not _OLD:
        from lightning.pytorch import Callback
    else:
        from pytorch_lightning import Callback
except ImportError as error:
    raise UsageError("lightning is not installed", hint="pip install 'nanproof[lightning]'") from error


class GuardCallback(Callback):  # type: ignore[misc]
    """Guards what a Trainer fits, with automatic or manual optimization. Options are those of `Guard`; the Trainer
    itself does accumulation and clipping.

    The guard's memory travels in Lightning's checkpoints.
    """

    def __init__(self, **options: Any) -> None:
        self._options = options
        self._make: Callable[..., ExternalLoop] = attach
        self._memory: dict[str, Any] | None = None
        self._withheld = False
        self.loop: ExternalLoop | None = None

    @classmethod
    def made_by(cls, make: Callable[..., ExternalLoop]) -> GuardCallback:
        """A callback whose guard is made by somebody else: `nanproof run` has options and a folder for it."""
        callback = cls()
        callback._make = make
        return callback

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        model = trainer.strategy.model
        # under a strategy that wraps the module, its forward is training_step in disguise
        hooked = [*pl_module.children(), *([pl_module] if model is pl_module else [])]
        self.loop = loop = self._make(
            model,
            trainer.optimizers,
            scheduler=[c.scheduler for c in trainer.lr_scheduler_configs],
            scaler=scaler,
            divided=True,
            hook=hooked,
            **self._options,
        )
        if self._memory is not None:
            loop.load_state_dict(self._memory)
        patches = ObjectPatches()
        for optimizer in trainer.optimizers:
            patches.watch_optimizer(optimizer, loop)
        if loop.guard.training.scaler is not None:
            patches.watch_scaler(scaler, loop)
        patches.put(pl_module, "lr_scheduler_step", lambda original: _schedule(original, loop))
        patches.put(trainer, "save_checkpoint", self._save)
        patches.put(trainer.strategy, "remove_checkpoint", self._remove)
        loop.on_close(patches.undo)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if self.loop is None:
            return
        if self._make is attach:  # nanproof run watches the loader itself, and knows the samples
            self.loop.passes.data.add(batch, f"batch {batch_idx:,} of epoch {trainer.current_epoch}")
        self.loop.passes.begin(batch)

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Tensor) -> None:
        if self.loop is not None:
            self.loop.passes.before_backward(
                loss, self.loop.passes.unscaled(loss)
            )  # Lightning has multiplied it by the scale

    def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
        if self.loop is not None:
            self.loop.passes.after_backward()

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Optimizer) -> None:
        if self.loop is not None:
            self.loop.judge(optimizer)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self.teardown(trainer, pl_module, "fit")

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        if self.loop is not None:
            self.loop.close()

    def state_dict(self) -> dict[str, Any]:
        return {"memory": self.loop.state_dict() if self.loop is not None else None}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._memory = state_dict["memory"]

    def _save(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def save(filepath: Any, *args: Any, **kwargs: Any) -> None:
            assert self.loop is not None
            self._withheld = self.loop.blocks_save(filepath)
            if not self._withheld:
                original(filepath, *args, **kwargs)

        return save

    def _remove(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def remove(filepath: Any) -> None:
            if not self._withheld:  # what would have replaced it was not written
                original(filepath)

        return remove


def _schedule(original: Callable[..., Any], loop: ExternalLoop) -> Callable[..., Any]:
    def lr_scheduler_step(scheduler: Any, metric: Any) -> None:
        owner = getattr(scheduler, "optimizer", None)
        if loop.advances(scheduler, owner if loop.owns(owner) else None):
            original(scheduler, metric)

    return lr_scheduler_step
