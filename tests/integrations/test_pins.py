"""What is used of other libraries beyond their public interfaces. A release that moves one of these fails here."""

from __future__ import annotations

import inspect
import warnings

import pytest
import torch
from torch.amp.grad_scaler import OptState
from torch.optim import Optimizer, lr_scheduler
from torch.utils.data import DataLoader

from nanproof.guard.data import DataSource
from nanproof.integrations.object_patches import ObjectPatches

pytestmark = pytest.mark.slow


def test_accelerate_says_that_a_step_was_skipped_by_its_overflow_flag() -> None:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    p = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([p], lr=1.0)
    prepared, schedule = accelerator.prepare(optimizer, lr_scheduler.ExponentialLR(optimizer, 0.5))
    assert prepared.optimizer is optimizer
    prepared._is_overflow = True
    assert prepared.step_was_skipped
    assert accelerator.optimizer_step_was_skipped
    schedule.step()
    assert schedule.get_last_lr() == [1.0]
    prepared.step()
    prepared._is_overflow = False
    schedule.step()
    assert schedule.get_last_lr() == [0.5]


def test_the_trainer_asks_accelerate_before_it_moves_the_schedule_and_saves_in_one_place() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from transformers import Trainer
    epoch = inspect.getsource(Trainer._run_epoch)
    order = ["_clip_grad_norm(", "self.optimizer.step()", "optimizer_step_was_skipped", "lr_scheduler.step()"]
    assert [epoch.index(words) for words in order] == sorted(epoch.index(words) for words in order)
    assert "self.accelerator.backward(" in inspect.getsource(Trainer.training_step)
    assert "self._save_checkpoint(" in inspect.getsource(Trainer._maybe_log_save_evaluate)
    assert {"model", "trial"} <= set(inspect.signature(Trainer._save_checkpoint).parameters)


def test_lightning_asks_callbacks_after_backward_and_before_clipping() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from lightning.pytorch.callbacks import ModelCheckpoint
        from lightning.pytorch.plugins import MixedPrecision, Precision
    after = inspect.getsource(Precision._after_closure)
    assert after.index("on_before_optimizer_step") < after.index("_clip_gradients")
    assert "trainer.save_checkpoint(" in inspect.getsource(ModelCheckpoint._save_checkpoint)
    assert "trainer.strategy.remove_checkpoint(" in inspect.getsource(ModelCheckpoint._remove_checkpoint)
    scaled = inspect.getsource(MixedPrecision.pre_backward)
    assert scaled.index("scaler.scale(") < scaled.index("super().pre_backward(")


def test_gradscaler_keeps_its_stage_per_optimizer() -> None:
    p = torch.nn.Parameter(torch.zeros(1))
    optimizer, scaler = torch.optim.SGD([p], lr=1.0), torch.amp.GradScaler("cpu")
    scaler.scale(p.sum()).backward()
    assert scaler._per_optimizer_states.get(id(optimizer)) is None
    scaler.unscale_(optimizer)
    assert scaler._per_optimizer_states[id(optimizer)]["stage"] is OptState.UNSCALED
    scaler.step(optimizer)
    scaler.update(8.0)
    assert scaler._per_optimizer_states.get(id(optimizer)) is None
    assert float(scaler._scale) == 8.0
    assert int(scaler._growth_tracker) == 0


def test_torch_hooks_the_steps_of_a_class_and_schedules_look_for_their_mark() -> None:
    class Mine(Optimizer):
        def __init__(self, params: object) -> None:
            super().__init__(params, {"lr": 1.0})  # type: ignore[arg-type]

        def step(self, closure: object = None) -> None:  # type: ignore[override]
            return None

    optimizer = Mine([torch.zeros(1, requires_grad=True)])
    assert Mine.step.hooked  # type: ignore[attr-defined]
    lr_scheduler.ExponentialLR(optimizer, 0.5)
    assert hasattr(optimizer.step, "_wrapped_by_lr_sched")


def test_a_loader_draws_the_indices_of_each_batch_in_order() -> None:
    from torch.utils.data.dataloader import _BaseDataLoaderIter

    drawn = []
    original = _BaseDataLoaderIter._next_index

    def next_index(iterator: _BaseDataLoaderIter) -> object:
        drawn.append(original(iterator))
        return drawn[-1]

    _BaseDataLoaderIter._next_index = next_index  # type: ignore[method-assign,assignment]
    try:
        list(DataLoader(range(6), batch_size=4))  # type: ignore[arg-type]
    finally:
        _BaseDataLoaderIter._next_index = original  # type: ignore[method-assign]
    assert drawn == [[0, 1, 2, 3], [4, 5]]
    workers = inspect.getsource(torch.utils.data.dataloader._MultiProcessingDataLoaderIter)
    assert "self._in_order" in workers


@pytest.mark.parametrize("workers", [0, 1])
def test_a_prepared_loader_is_watched_through_its_iterators(workers: int) -> None:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    data = [torch.tensor(float(i)) for i in range(6)]
    loader = accelerator.prepare(DataLoader(data, batch_size=4, num_workers=workers))  # type: ignore[arg-type]
    assert accelerator._dataloaders[-1] is loader
    patches, source = ObjectPatches(), DataSource()
    patches.watch_loader(loader.base_dataloader, source)
    batches = list(loader)
    assert [d.batch.tolist() for d in source.recent] == [b.tolist() for b in batches] == [[0, 1, 2, 3], [4, 5]]
    known = ["DataLoader batch 0 (dataset indices 0–3)", "DataLoader batch 1 (dataset indices 4–5)"]
    assert [d.about for d in source.recent] == (known if workers == 0 else [k.partition(" (")[0] for k in known])
    patches.undo()
    list(loader)
    assert len(source.recent) == 2


def test_backward_of_a_tensor_goes_through_the_one_function() -> None:
    assert "torch.autograd.backward(" in inspect.getsource(torch.Tensor.backward)
