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
from ..guard import Guard
from ..guard.escort import Escort
from ..guard.feed import Delivered
from .shadows import Shadows

# the same library under two names; the one that the script uses
_OLD = "pytorch_lightning" in sys.modules and "lightning.pytorch" not in sys.modules
try:
    if TYPE_CHECKING or not _OLD:
        from lightning.pytorch import Callback
    else:
        from pytorch_lightning import Callback
except ImportError as error:
    raise UsageError("lightning is not installed", hint="pip install 'nanproof[lightning]'") from error


class GuardCallback(Callback):
    """Guards what a Trainer fits, with automatic or manual optimization. Options are those of `Guard`; the Trainer
    itself does accumulation and clipping.

    The guard's memory travels in Lightning's checkpoints.
    """

    def __init__(self, **options: Any) -> None:
        self._options = options
        self._make: Callable[..., Guard] = Guard
        self._memory: dict[str, Any] | None = None
        self._withheld = False
        self.escort: Escort | None = None

    @classmethod
    def made_by(cls, make: Callable[..., Guard]) -> GuardCallback:
        """A callback whose guard is made by somebody else: `nanproof run` has options and a folder for it."""
        callback = cls()
        callback._make = make
        return callback

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        model = trainer.strategy.model
        guard = self._make(
            model, trainer.optimizers, scheduler=[c.scheduler for c in trainer.lr_scheduler_configs], scaler=scaler,
            **self._options,
        )  # fmt: skip
        # under a strategy that wraps the module, its forward is training_step in disguise
        heard = [*pl_module.children(), *([pl_module] if model is pl_module else [])]
        self.escort = escort = Escort(guard, divided=True, listen_to=heard)
        if self._memory is not None:
            escort.load_state_dict(self._memory)
        shadows = Shadows()
        for optimizer in trainer.optimizers:
            shadows.watch_optimizer(optimizer, escort)
        if guard.training.scaler is not None:
            shadows.watch_scaler(scaler, escort)
        shadows.cast(pl_module, "lr_scheduler_step", lambda original: _schedule(original, escort))
        shadows.cast(trainer, "save_checkpoint", self._save)
        shadows.cast(trainer.strategy, "remove_checkpoint", self._remove)
        escort.on_close(shadows.lift)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if self.escort is None:
            return
        if self._make is Guard:  # nanproof run watches the loader itself, and knows the samples
            about = f"batch {batch_idx:,} of epoch {trainer.current_epoch}"
            self.escort.guard._post.feed.delivered = lambda: (Delivered(batch=batch, about=about),)
        self.escort.begin(batch)

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Tensor) -> None:
        if self.escort is not None:
            scale = self.escort.guard.training.scale()  # Lightning has multiplied the loss by it
            self.escort.meet(loss, loss.detach() / scale if scale is not None else None)

    def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
        if self.escort is not None:
            self.escort.passed()

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Optimizer) -> None:
        if self.escort is not None:
            self.escort.judge(optimizer)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self.teardown(trainer, pl_module, "fit")

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        if self.escort is not None:
            self.escort.close()

    def state_dict(self) -> dict[str, Any]:
        return {"memory": self.escort.state_dict() if self.escort is not None else None}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._memory = state_dict["memory"]

    def _save(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def save(filepath: Any, *args: Any, **kwargs: Any) -> None:
            assert self.escort is not None
            self._withheld = self.escort.blocks_save(filepath, agree=True)
            if not self._withheld:
                original(filepath, *args, **kwargs)

        return save

    def _remove(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def remove(filepath: Any) -> None:
            if not self._withheld:  # what would have replaced it was not written
                original(filepath)

        return remove


def _schedule(original: Callable[..., Any], escort: Escort) -> Callable[..., Any]:
    def lr_scheduler_step(scheduler: Any, metric: Any) -> None:
        owner = getattr(scheduler, "optimizer", None)
        if escort.advances(scheduler, owner if escort.owns(owner) else None):
            original(scheduler, metric)

    return lr_scheduler_step
