"""Precision islands: one module in float32 inside a half-precision model."""

from __future__ import annotations

import copy
import io
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from nanproof import islands
from nanproof.errors import UsageError
from support.hot import BatchNormBlock, Block, Caster, NestedAutocast, Net


def run(model: nn.Module, x: Tensor, *, autocast: bool = False) -> tuple[Tensor, list[Tensor]]:
    """The output, and the gradients of all parameters."""
    for p in model.parameters():
        p.grad = None
    with torch.autocast("cpu", torch.float16, enabled=autocast):
        out = model(x)
    out.float().pow(2).mean().backward()
    return out, [p.grad for p in model.parameters() if p.grad is not None]


def finite(*tensors: Tensor) -> bool:
    return all(bool(torch.isfinite(t).all()) for t in tensors)


def make(block: type[nn.Module] = Block, **options: Any) -> tuple[Net, Net, Tensor]:
    """A model that overflows float16 in its second block, the same in float32, and an input."""
    torch.manual_seed(0)
    model = Net(block, **options)
    return model, copy.deepcopy(model), torch.randn(4, 8)


def close_to(found: list[Tensor], wanted: list[Tensor]) -> bool:
    """Whether gradients agree within float16's rounding."""
    return all(
        (a.float() - b.float()).norm() <= 0.02 * b.float().norm() + 1e-4 for a, b in zip(found, wanted, strict=True)
    )


@pytest.mark.parametrize("weights", ["float16 weights", "autocast"])
def test_an_island_heals_forward_and_backward(weights: str) -> None:
    model, reference, x = make()
    out, grads = run(reference, x)
    autocast = weights == "autocast"
    given = x if autocast else x.half()
    model = model if autocast else model.half()
    assert not finite(run(model, given, autocast=autocast)[0])
    dtypes = {n: p.dtype for n, p in model.named_parameters()}

    islands.open(model, "blocks.1")

    found, gradients = run(model, given, autocast=autocast)
    assert finite(found, *gradients)
    assert (found.float() - out).abs().max() < 0.02 * out.abs().max()
    assert close_to(gradients, grads)
    assert {n: p.dtype for n, p in model.named_parameters()} == dtypes
    assert [g.dtype for g in gradients] == list(dtypes.values())

    islands.close(model)
    assert not finite(run(model, given, autocast=autocast)[0])


@pytest.mark.parametrize("block", [Caster, NestedAutocast])
def test_casts_and_autocast_inside_need_a_heavy_island(block: type[nn.Module]) -> None:
    model, _, x = make(block)
    assert not finite(run(model, x)[0])
    islands.open(model, "blocks.1")
    assert not finite(run(model, x)[0])
    islands.open_one(model, "blocks.1", heavy=True)
    out, gradients = run(model, x)
    assert finite(out, *gradients)
    assert out.dtype is torch.float32


def test_without_autocast_the_result_has_the_dtype_that_came_in() -> None:
    model, _, x = make()
    model.half()
    islands.open(model, "blocks.1")
    seen: list[torch.dtype] = []
    model.blocks[1].register_forward_hook(lambda _, __, out: seen.append(out.dtype))
    model(x.half())
    with torch.autocast("cpu", torch.float16):
        model(x.half())
    assert seen == [torch.float16, torch.float32]


def test_running_statistics_are_kept() -> None:
    model, reference, x = make(BatchNormBlock)
    run(reference, x)
    model.half()
    islands.open(model, "blocks.1")
    out, _ = run(model, x.half())
    assert finite(out)
    norm, wanted = model.blocks[1].norm, reference.blocks[1].norm
    assert norm.running_mean.dtype is torch.float16
    assert torch.allclose(norm.running_mean.float(), wanted.running_mean, rtol=1e-2, atol=1e-3)
    assert int(norm.num_batches_tracked) == 1


def test_an_island_around_float32_is_exact() -> None:
    model, _, x = make(gain=1.0)
    before, gradients = run(model, x)
    islands.open(model, "blocks.1")
    after, now = run(model, x)
    assert torch.equal(before, after)
    assert all(map(torch.equal, gradients, now))


def test_a_larger_island_takes_smaller_ones_over() -> None:
    model, _, x = make()
    model.half()
    islands.open(model, "blocks.1.up", "blocks.0")
    islands.open(model, "blocks.1")
    assert [i.path for i in islands.list(model)] == ["blocks.0", "blocks.1"]
    islands.open(model, "")
    found = islands.list(model)
    assert [(i.path, i.dtype, i.share) for i in found] == [("", "float32", 1.0)]
    assert finite(run(model, x.half())[0])


def test_an_island_inside_of_an_open_one_does_not_narrow() -> None:
    model, _, x = make()
    model.half()
    islands.open(model, "blocks.1")
    islands.open(model, "blocks.1.up")  # its own result would overflow float16
    wide: list[torch.dtype] = []
    model.blocks[1].up.register_forward_hook(lambda _, __, out: wide.append(out.dtype))
    model(x.half())
    assert wide == [torch.float32]


def test_a_copy_owns_its_island() -> None:
    model, _, x = make()
    model.half()
    islands.open(model, "blocks.1")
    copied = copy.deepcopy(model)
    islands.close(model)
    assert not islands.list(model)
    assert [i.path for i in islands.list(copied)] == ["blocks.1"]
    out, gradients = run(copied, x.half())
    assert finite(out, *gradients)
    assert copied.blocks[1].forward.module is copied.blocks[1]


def test_a_saved_model_keeps_its_island() -> None:
    model, _, x = make()
    keys = list(model.half().state_dict())
    islands.open(model, "blocks.1")
    assert list(model.state_dict()) == keys
    memory = io.BytesIO()
    torch.save(model, memory)
    memory.seek(0)
    loaded = torch.load(memory, weights_only=False)
    assert [i.path for i in islands.list(loaded)] == ["blocks.1"]
    assert torch.equal(loaded(x.half()), model(x.half()))
    fresh, _, _ = make()
    fresh.half().load_state_dict(model.state_dict())
    islands.open(fresh, "blocks.1")
    assert torch.equal(fresh(x.half()), model(x.half()))


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("weights", ["float16 weights", "autocast"])
@pytest.mark.parametrize("path", ["blocks.1", "blocks.1.up", ""])
def test_activation_checkpointing(reentrant: bool, weights: str, path: str) -> None:
    """The recomputation in the backward pass is as wide as the forward pass was, inside of the island and around it."""
    model, reference, x = make(gain=1.0 if path.endswith("up") else 1e5)
    model.reentrant = reentrant
    autocast = weights == "autocast"
    given = x if autocast else x.half()
    model = model if autocast else model.half()
    islands.open(model, path)
    x0 = given.clone().requires_grad_()
    out, gradients = run(model, x0, autocast=autocast)
    assert finite(out, *gradients)
    _, wanted = run(reference, x)
    assert len(gradients) == len(wanted)
    assert close_to(gradients, wanted)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
@pytest.mark.parametrize("weights", ["float16 weights", "autocast"])
def test_compiled_models_go_around_an_island(weights: str) -> None:
    model, _, x = make()
    autocast = weights == "autocast"
    given = x if autocast else x.half()
    model = model if autocast else model.half()
    compiled: Any = torch.compile(model, backend="aot_eager")
    assert not finite(run(compiled, given, autocast=autocast)[0])
    islands.open(compiled, "blocks.1")
    out, gradients = run(compiled, given, autocast=autocast)
    assert finite(out, *gradients)
    eager, wanted = run(model, given, autocast=autocast)
    assert (out.float() - eager.float()).abs().max() < 0.02 * eager.float().abs().max()
    assert close_to(gradients, wanted)
    islands.close(compiled)
    assert not finite(run(compiled, given, autocast=autocast)[0])


def test_writes_into_existing_memory_keep_its_dtype() -> None:
    """A key-value cache of fixed size, as generation uses it."""

    class Cached(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.key = nn.Linear(8, 8)

        def forward(self, x: Tensor, cache: Tensor) -> Tensor:
            cache.index_copy_(0, torch.tensor([1]), self.key(x))
            cache[2:3] = self.key(x)
            return cache.sum(0, keepdim=True)

    torch.manual_seed(0)
    model = Cached().half()
    islands.open(model, "")
    cache = torch.zeros(3, 8, dtype=torch.float16)
    with torch.no_grad():
        out = model(torch.ones(1, 8).half(), cache)
    assert out.dtype is torch.float16
    assert cache.dtype is torch.float16
    assert torch.equal(cache[1], cache[2])


def test_errors_name_the_next_step() -> None:
    model, _, _ = make()
    with pytest.raises(UsageError, match=r"no module 'block\.1'.*did you mean 'blocks\.1'"):
        islands.open(model, "block.1")
    with pytest.raises(UsageError, match=r"cannot compute in torch\.int32.*torch\.float32"):
        islands.open(model, "blocks.1", dtype=torch.int32)
    with pytest.raises(UsageError, match=r"no island of kind 'eps'.*float32, eager, math-attention"):
        islands.open(model, "blocks.1", kind="eps")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=r"train\.py:3 is a line.*name its module"):
        islands.open(model, "train.py:3", kind="eager")


# --- lines -------------------------------------------------------------------------------------------------------


def loss_of(prediction: Tensor) -> Tensor:
    total = (prediction * 1e4).pow(2).mean()  # overflows here
    return total * 1e-8


LINE = f"{Path(__file__)}:{loss_of.__code__.co_firstlineno + 1}"


def test_one_line_can_be_an_island() -> None:
    model = nn.Linear(8, 8).half()
    x = torch.ones(2, 8).half()
    assert not finite(loss_of(model(x)))
    islands.open(model, LINE)
    try:
        loss = loss_of(model(x))
        loss.backward()
        assert finite(loss, model.weight.grad)
        assert [i.path for i in islands.list(model)] == [LINE]
    finally:
        islands.close(model, LINE)
    assert not islands.list(model)
    assert not finite(loss_of(model(x)))


def test_lines_and_blocks_of_other_modes_do_not_get_in_each_others_way() -> None:
    model = nn.Linear(8, 8).half()
    with torch.device("meta"):
        islands.open(model, LINE)
        assert torch.ones(2).device.type == "meta"
    try:
        assert torch.ones(2).device.type == "cpu"
        with torch.device("meta"):
            assert torch.ones(2).device.type == "meta"
        torch.set_default_device("meta")
        assert torch.ones(2).device.type == "meta"
        torch.set_default_device(None)
        assert torch.ones(2).device.type == "cpu"
        assert finite(loss_of(model(torch.ones(2, 8).half())))
        with torch.device("meta"):
            islands.close(model, LINE)
            assert torch.ones(2).device.type == "meta"
    finally:
        islands.close(model, LINE)
    assert torch.ones(2).device.type == "cpu"
