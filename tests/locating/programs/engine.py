"""What bends the way of a value: custom functions, hooks, checkpointing, double backward, compilation, numpy."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from support.programs import Case, mean_of_squares, named, program

Batch = dict[str, Tensor]


class RoundUp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.ceil()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        slope = F.relu(x)
        return grad * slope / slope  # BAD


@program(phase="backward", mechanism="invalid", op="div", uses=(RoundUp,))
def custom_backward() -> Case:
    class Quantize(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = RoundUp.apply(x)
            return out / 8

    return named(fc=nn.Linear(4, 4), quantize=Quantize()), {"x": torch.randn(3, 4)}, mean_of_squares


def soften(grad: Tensor, temperature: Tensor) -> Tensor:
    return grad * torch.exp(1 / temperature)  # BAD


class Harden(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, temperature: Tensor) -> Tensor:
        ctx.save_for_backward(temperature)
        return (x > 0).float()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (temperature,) = ctx.saved_tensors
        return soften(grad, temperature), None


@program(phase="backward", mechanism="range-overflow", op="exp", uses=(soften,))
def helper_of_a_custom_backward() -> Case:
    class Gate(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("temperature", torch.tensor(0.01))

        def forward(self, x: Tensor) -> Tensor:
            gate: Tensor = Harden.apply(x, self.temperature)
            return gate * x

    return named(fc=nn.Linear(4, 4), gate=Gate()), {"x": torch.randn(3, 4)}, mean_of_squares


class LogOfCounts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        counts = torch.round(x.abs())
        ctx.save_for_backward(x)
        return torch.log(counts)  # BAD

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return grad / (x.abs() + 1)


@program(phase="forward", mechanism="pole", op="log", uses=(LogOfCounts,))
def custom_forward() -> Case:
    class Counts(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = LogOfCounts.apply(x)
            return out

    return named(fc=nn.Linear(4, 4), counts=Counts()), {"x": torch.randn(3, 4)}, mean_of_squares


class NumpySlope(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.abs()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        size = np.maximum(x.numpy(), 0)
        with np.errstate(all="ignore"):
            return torch.from_numpy(grad.numpy() * x.numpy() / size)  # BAD


@program(phase="outside", mechanism="outside-dispatcher", op="NumpySlope", uses=(NumpySlope,), module="solver")
def numpy_in_a_custom_backward() -> Case:
    class Solver(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return NumpySlope.apply(x) * 0.5  # BAD

    return named(fc=nn.Linear(4, 4), solver=Solver()), {"x": torch.randn(3, 4)}, mean_of_squares


@program(phase="outside", mechanism="outside-dispatcher", op="from_numpy")
def numpy_in_forward() -> Case:
    class Pitch(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            strength = x.detach().numpy().clip(min=0)
            with np.errstate(all="ignore"):
                return x * torch.from_numpy(np.log(strength))  # BAD

    return named(fc=nn.Linear(4, 4), pitch=Pitch()), {"x": torch.randn(3, 4)}, mean_of_squares


@program(phase=("outside", "forward"), mechanism=("outside-dispatcher", "pole", "invalid", "range-overflow"), op="mul")
def weight_from_a_numpy_number() -> Case:
    def step(model: nn.Module, batch: Batch) -> Tensor:
        loss = F.mse_loss(model(batch["x"]), batch["y"])
        with np.errstate(all="ignore"):
            return loss * float(np.float32(1) / np.float32(batch["y"].std().item()))  # BAD

    return nn.Linear(4, 1), {"x": torch.randn(3, 4), "y": torch.ones(3, 1)}, step


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def body(self, x: Tensor) -> Tensor:
        h = self.fc(x)
        kept = h * (h > 0)
        root = torch.sqrt(kept)  # BAD
        return x + root

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = checkpoint(self.body, x, use_reentrant=True)
        return out


@program(phase="backward", mechanism="pole", op="sqrt", uses=(Residual,))
def checkpoint_reentrant_backward() -> Case:
    return named(stem=nn.Linear(3, 4), block=Residual()), {"x": torch.randn(5, 3)}, mean_of_squares


@program(phase="backward", mechanism="where-gradient", op="div")
def checkpoint_backward() -> Case:
    class Ratio(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            under = x * (x > 0)
            ratio = torch.tanh(x) / under  # BAD
            return torch.where(under > 0, ratio, x)

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.ratio = Ratio()

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = checkpoint(self.ratio, x, use_reentrant=False)
            return out

    return named(stem=nn.Linear(3, 4), block=Block()), {"x": torch.randn(5, 3)}, mean_of_squares


@program(phase="forward", mechanism="range-overflow", op="exp")
def checkpoint_forward() -> Case:
    class Mixer(nn.Module):
        def mix(self, x: Tensor) -> Tensor:
            odds = x.exp()  # BAD
            return odds / odds.sum(-1, keepdim=True)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = checkpoint(self.mix, x, use_reentrant=False)
            return out

    return named(stem=nn.Linear(3, 4), mixer=Mixer()), {"x": torch.randn(5, 3) * 500}, mean_of_squares


@program(phase="forward", mechanism="pole", op="log")
def checkpoint_reentrant_forward() -> Case:
    class Logs(nn.Module):
        def logs(self, x: Tensor) -> Tensor:
            return torch.log(F.relu(x))  # BAD

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = checkpoint(self.logs, x, use_reentrant=True)
            return out

    return named(stem=nn.Linear(3, 4), logs=Logs()), {"x": torch.randn(5, 3)}, mean_of_squares


@program(phase="backward", mechanism="invalid", op="div")
def tensor_hook_that_normalizes() -> Case:
    def normalize(grad: Tensor) -> Tensor:
        length = grad.norm(dim=-1, keepdim=True)
        return grad / length  # BAD

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem = nn.Linear(3, 4)
            self.head = nn.Linear(4, 2)

        def forward(self, x: Tensor, keep: Tensor) -> Tensor:
            h = torch.tanh(self.stem(x))
            h.register_hook(normalize)
            return self.head(h) * keep

    def step(model: nn.Module, batch: Batch) -> Tensor:
        return model(batch["x"], batch["keep"]).pow(2).mean()

    return Net(), {"x": torch.randn(3, 3), "keep": torch.tensor([[1.0], [0.0], [1.0]])}, step


@program(phase="backward", mechanism="invalid", op="div")
def module_hook_that_balances() -> Case:
    def balance(_: nn.Module, _inputs: Any, outputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return tuple(g / g.abs().amax(0) for g in outputs)  # BAD

    body = nn.Linear(4, 4)
    body.register_full_backward_hook(lambda m, gin, gout: balance(m, gout, gin))
    model = named(stem=nn.Linear(3, 4), body=body, act=nn.ReLU(), head=nn.Linear(4, 1))
    with torch.no_grad():
        body.weight[:, 2] = 0  # nothing flows back to the third unit
    return model, {"x": torch.randn(5, 3)}, mean_of_squares


@program(phase="forward", mechanism="invalid", op="div", module="body")
def forward_hook_that_standardises() -> Case:
    def standardise(_: nn.Module, _inputs: Any, out: Tensor) -> Tensor:
        return (out - out.mean(0)) / out.std(0)  # BAD

    body = nn.Linear(4, 4)
    with torch.no_grad():
        body.weight[1] = 0
        body.bias[1] = 0.5
    body.register_forward_hook(standardise)
    return named(stem=nn.Linear(3, 4), body=body, head=nn.Linear(4, 1)), {"x": torch.randn(5, 3)}, mean_of_squares


@program(phase="backward", mechanism="invalid", op="div_")
def gradient_hook_after_accumulation() -> Case:
    def unit(p: Tensor) -> None:
        assert p.grad is not None
        p.grad.div_(p.grad.norm())  # BAD

    model = named(stem=nn.Linear(3, 4), unused=nn.Linear(4, 4), head=nn.Linear(4, 1))
    nn.init.zeros_(model.head.weight)
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(unit)
    return model, {"x": torch.randn(5, 3)}, mean_of_squares


@program(phase=("forward", "backward"), mechanism="range-overflow", op="_to_copy")
def activations_packed_in_half() -> Case:
    def pack(t: Tensor) -> Tensor:
        return t.half()  # BAD

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Linear(3, 4)
            self.down = nn.Linear(4, 1)

        def forward(self, x: Tensor) -> Tensor:
            h = self.up(x)
            with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t.float()):
                return self.down(h) * 1e-5

    return Net(), {"x": torch.randn(4, 3) * 1e6}, mean_of_squares


@program(phase="backward", mechanism="pole", op="sqrt")
def gradient_penalty_of_a_flat_critic() -> Case:
    def penalty(critic: nn.Module, x: Tensor) -> Tensor:
        x = x.requires_grad_()
        (slope,) = torch.autograd.grad(critic(x).sum(), x, create_graph=True)
        length = slope.pow(2).sum(-1).sqrt()  # BAD
        return (length - 1).pow(2).mean()

    def step(model: nn.Module, batch: Batch) -> Tensor:
        return model(batch["x"]).mean() + 10 * penalty(model, batch["x"].detach().clone())

    critic = named(stem=nn.Linear(3, 8), act=nn.ReLU(), head=nn.Linear(8, 1))
    nn.init.zeros_(critic.head.weight)
    return critic, {"x": torch.randn(4, 3)}, step


@program(phase="backward", mechanism="pole", op="pow")
def second_derivative_of_a_power() -> Case:
    class Energy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.k = nn.Parameter(torch.tensor(2.0))

        def forward(self, position: Tensor) -> Tensor:
            stretch = position * self.k
            return (stretch**1.5).sum()  # BAD

    def step(model: nn.Module, batch: Batch) -> Tensor:
        position = batch["x"].clone().requires_grad_()
        (force,) = torch.autograd.grad(model(position), position, create_graph=True)  # BAD
        return (force - batch["force"]).pow(2).mean()

    return Energy(), {"x": torch.tensor([1.0, 0.0, 2.0]), "force": torch.ones(3)}, step


@program(phase="forward", mechanism="invalid", op="div")
def inner_update_of_a_dead_unit() -> Case:
    def step(model: nn.Module, batch: Batch) -> Tensor:
        weight = model.weight
        inner = F.mse_loss(F.linear(batch["x"], weight), batch["y"])
        (grad,) = torch.autograd.grad(inner, weight, create_graph=True)
        second = grad.detach().square()
        fast = weight - 0.1 * grad / second.sqrt()  # BAD
        return F.mse_loss(F.linear(batch["x"], fast), batch["y"])

    x = torch.randn(4, 3)
    x[:, 1] = 0  # its weight gets no gradient
    return nn.Linear(3, 1, bias=False), {"x": x, "y": torch.randn(4, 1)}, step


@program(phase="forward", mechanism=("underflow", "pole", "invalid"), op="div")
def fp16_second_moment_underflows() -> Case:
    class Adam(nn.Module):
        """A learnt optimizer: the update of one step, from given gradients."""

        def __init__(self) -> None:
            super().__init__()
            self.rate = nn.Parameter(torch.tensor(0.1))

        def forward(self, grad: Tensor) -> Tensor:
            first = 0.1 * grad
            second = (0.001 * grad * grad).to(torch.float16)
            return self.rate * first / (second.sqrt() + 1e-8)  # BAD

    return named(adam=Adam()), {"x": torch.tensor([1e-1, 1e-3, 2e-4]).half()}, mean_of_squares


@program(phase="forward", mechanism="pole", op="log")
def compiled_forward() -> Case:
    class Tail(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            left = F.relu(x)
            logs = torch.log(left)  # BAD
            return logs * 0.5

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(3, 4)
            self.tail = torch.compile(Tail(), backend="eager")

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.tail(self.fc(x))
            return out

    return Net(), {"x": torch.randn(4, 3)}, mean_of_squares


@program(phase="backward", mechanism="where-gradient", op="log")
def compiled_backward() -> Case:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.ones(3))

        def forward(self, x: Tensor) -> Tensor:
            y = x * self.w
            z = torch.log(y)  # BAD
            return torch.where(y > 0, z, y)

    model: Any = torch.compile(Net(), backend="aot_eager")
    return model, {"x": torch.tensor([[0.5, 0.0, 2.0]])}, mean_of_squares


@program(phase="backward", mechanism="pole", op="sqrt")
def per_sample_distance_by_vmap() -> Case:
    def distance(a: Tensor, b: Tensor) -> Tensor:
        return (a - b).square().sum().sqrt()  # BAD

    def step(model: nn.Module, batch: Batch) -> Tensor:
        z = model(batch["x"])
        anchor = model(batch["anchor"])
        return torch.vmap(distance)(z, anchor).mean()

    x = torch.randn(3, 4)
    anchor = torch.randn(3, 4)
    anchor[1] = x[1]
    return nn.Linear(4, 2), {"x": x, "anchor": anchor}, step
