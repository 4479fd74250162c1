"""Lightning with the callback: automatic and manual optimization, a scaler, checkpoints, resuming."""

from __future__ import annotations

import logging
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from nanproof import Policy
from nanproof.files import read_jsonl

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import lightning
    from lightning.pytorch.callbacks import ModelCheckpoint
    from lightning.pytorch.plugins import MixedPrecision

    from nanproof.integrations.lightning import GuardCallback

from run.launch import different, incidents, is_finite

torch.set_num_threads(1)
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # Lightning advises at length
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


def loader(drop: int = 0) -> Any:
    torch.manual_seed(0)
    x = torch.randn(128, 8)
    y = x.sum(1, keepdim=True)
    x[61, 3] = float("nan")
    rows = [i for i in range(128) if not drop or i // drop != 61 // drop]
    return DataLoader(TensorDataset(x[rows], y[rows]), batch_size=8)


class Net(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.net = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 1))

    def training_step(self, batch: Any, _: int) -> Tensor:
        x, y = batch
        return nn.functional.mse_loss(self.net(x), y)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def fit(net: Any, data: Any, *callbacks: Any, ckpt_path: str | None = None, **options: Any) -> Any:
    given = {"max_epochs": 1, "gradient_clip_val": 1.0, "enable_checkpointing": False, **options}
    trainer = lightning.Trainer(
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=list(callbacks),
        **given,
    )
    torch.manual_seed(2)
    trainer.fit(net, data, ckpt_path=ckpt_path)
    return trainer


def state(net: Any, trainer: Any) -> list[Any]:
    scaler = getattr(trainer.precision_plugin, "scaler", None)
    schedules = [c.scheduler.state_dict() for c in trainer.lr_scheduler_configs]
    optimizers = [o.state_dict() for o in trainer.optimizers]
    return [net.state_dict(), optimizers, schedules, scaler and scaler.state_dict(), torch.get_rng_state()]


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("precision", ["32", "scaler"])
def test_the_bad_step_never_happened(accumulate: int, precision: str, tmp_path: Path) -> None:
    def options() -> dict[str, Any]:
        plugin = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=256.0))
        plugin.autocast_context_manager = lambda: torch.autocast("cpu", enabled=False)  # type: ignore[method-assign]
        return {"accumulate_grad_batches": accumulate, **({"plugins": plugin} if precision == "scaler" else {})}

    never, net = Net(), Net()
    reference = state(never, fit(never, loader(drop=8 * accumulate), **options()))
    trainer = fit(net, loader(), GuardCallback(run_dir=tmp_path), **options())
    assert different(state(net, trainer), reference) == []
    (incident,) = incidents(tmp_path)
    assert (incident["verdict"]["level"], incident["action"]["kind"]) == ("input", "skip")
    assert [t["first_bad"] for t in incident["tensors"] if t["name"] == "batch 0"] == [[5, 3]]
    assert incident["location"]["why"].startswith("batch 0 was already non-finite")
    assert incident["notes"] == ["batch 7 of epoch 0"]
    losses = [line["loss"] for line in read_jsonl(tmp_path / "training_log.jsonl")]
    assert 1 < losses[0] < 20  # neither scaled nor divided
    assert losses.count("NaN") == 1


def test_bare_it_dies() -> None:
    net = Net()
    fit(net, loader())
    assert not is_finite(net.state_dict())


class Adversaries(lightning.LightningModule):
    """Manual optimization: two optimizers that take turns."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        torch.manual_seed(1)
        self.first, self.second = nn.Linear(8, 4), nn.Linear(8, 4)

    def training_step(self, batch: Any, index: int) -> None:
        one, two = self.optimizers()
        for part, optimizer, x in ((self.first, one, batch[0].nan_to_num()), (self.second, two, batch[0])):
            optimizer.zero_grad()
            self.manual_backward(part(x).square().mean())
            optimizer.step()

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(p.parameters(), lr=1e-2, momentum=0.9) for p in (self.first, self.second)]


def test_manual_optimization(tmp_path: Path) -> None:
    net = Adversaries()
    fit(net, loader(), GuardCallback(run_dir=tmp_path), gradient_clip_val=None)
    assert is_finite(net.state_dict())
    (incident,) = incidents(tmp_path)
    assert incident["step"] == 16  # the second part of batch 7; its first part was carried out
    bare = Adversaries()
    fit(bare, loader(), gradient_clip_val=None)
    assert is_finite(bare.first.state_dict())
    assert not is_finite(bare.second.state_dict())


class Poison(lightning.Callback):
    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, index: int) -> None:
        if index == 6:
            pl_module.net[1].running_mean[2] = float("nan")


def test_a_poisoned_checkpoint_is_not_written_and_the_good_one_is_kept(tmp_path: Path) -> None:
    saving = ModelCheckpoint(dirpath=tmp_path / "c", every_n_train_steps=4, save_top_k=1, filename="{step}")
    guard = GuardCallback(run_dir=tmp_path / "run")
    fit(Net(), loader(drop=8), Poison(), saving, guard, enable_checkpointing=True, max_steps=8)
    assert [p.name for p in (tmp_path / "c").iterdir()] == ["step=4.ckpt"]
    assert is_finite(torch.load(tmp_path / "c" / "step=4.ckpt", weights_only=False)["state_dict"])
    assert guard.loop is not None
    assert "buffer net.1.running_mean [16] float32: 1 NaN of 16" in guard.loop.guard.tally.blocked[0]


def test_resuming_goes_on_counting(tmp_path: Path) -> None:
    saving = ModelCheckpoint(dirpath=tmp_path / "c", every_n_train_steps=10, filename="{step}")
    policy = Policy(spike_window=8)
    first, second = GuardCallback(policy=policy), GuardCallback(run_dir=tmp_path / "run", policy=policy)
    fit(Net(), loader(), saving, first, enable_checkpointing=True, max_steps=10)
    fit(Net(), loader(), second, ckpt_path=str(tmp_path / "c" / "step=10.ckpt"), max_steps=12)
    assert second.loop is not None
    tally = second.loop.guard.tally
    assert (tally.steps, tally.updates, tally.actions["skip"]) == (12, 11, 1)


def test_a_stop_ends_training(tmp_path: Path) -> None:
    net = Net()
    with pytest.raises(SystemExit) as stop:
        fit(net, loader(), GuardCallback(policy="strict"))
    assert stop.value.code == 66
    assert is_finite(net.state_dict())


def test_the_trainer_is_left_as_it_was() -> None:
    net = Net()
    trainer = fit(net, loader(), GuardCallback(), max_steps=2)
    assert "save_checkpoint" not in vars(trainer)
    assert "remove_checkpoint" not in vars(trainer.strategy)
    assert "lr_scheduler_step" not in vars(net)
    assert not net.net._forward_hooks
