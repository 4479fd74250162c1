"""Failures in code that is put together in less usual ways: loops that depend on values, generated code, plain numbers.

Some follow threads of public issue trackers.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize

from support.programs import Case, healthy, mean_of_squares, named, program

Batch = dict[str, Tensor]


def _zero_rows(model: nn.Linear, rows: slice) -> nn.Linear:
    with torch.no_grad():
        model.weight[rows], model.bias[rows] = 0, 0
    return model


@program(phase=("backward", "forward"), mechanism=("where-gradient", "invalid"), op="div")
def percentage_error_filtered_after_the_division() -> Case:
    """pytorch/pytorch#22820: the NaN entries are dropped from the loss, their gradients are not."""

    def step(model: nn.Module, batch: Batch) -> Tensor:
        out = model(batch["x"])
        error = (out - batch["y"]).abs() / (out.abs() + batch["y"].abs())  # BAD
        return error[~error.isnan()].mean()

    y = torch.rand(3, 4)
    y[:, 1] = 0
    return _zero_rows(nn.Linear(4, 4), slice(1, 2)), {"x": torch.randn(3, 4), "y": y}, step


@program(phase="forward", mechanism="range-overflow", op="exp")
def stale_token_rejected_by_a_product() -> Case:
    """OpenRLHF/OpenRLHF#1314: the filter multiplies the weight by 0, and the weight is infinite."""

    def step(model: nn.Module, batch: Batch) -> Tensor:
        new = F.log_softmax(model(batch["x"]), -1)[:, 0]
        weight = torch.exp(batch["old"] - batch["rollout"])  # BAD
        kept = weight * ((weight > 0.5) & (weight < 5.0))
        return -(kept * new).mean()

    return (
        nn.Linear(4, 3),
        {"x": torch.randn(2, 4), "old": torch.zeros(2), "rollout": torch.tensor([-1000.0, 0.0])},
        step,
    )


@program(phase=("backward", "forward"), mechanism=("where-gradient", "range-overflow"), op="exp")
def ratio_of_a_sequence_that_the_clip_chose_away() -> Case:
    """OpenRLHF/OpenRLHF#1293: the smaller term is finite, the gradient of the other is 0 · inf."""

    def step(model: nn.Module, batch: Batch) -> Tensor:
        new = model(batch["x"]).squeeze(-1)
        log_ratio = (new - batch["old"]).mean(-1)
        ratio = log_ratio.exp()  # BAD
        clipped = ratio.clamp(0.8, 1.2)
        return -torch.minimum(ratio * batch["gain"], clipped * batch["gain"]).mean()

    batch = {"x": torch.randn(2, 5, 4), "old": torch.full((2, 5), -400.0), "gain": torch.ones(2)}
    return nn.Linear(4, 1), batch, step


@program(phase="forward", mechanism=("underflow", "pole", "invalid"), op="div")
def scan_divided_by_its_own_decay() -> Case:
    """MzeroMiko/mamba-mini#6: the decay of a long sequence is 0 in float32, and the inputs are divided by it."""

    class Scan(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            decay = torch.exp(torch.cumsum(-30 * torch.sigmoid(x), 1))
            return torch.cumsum(x / decay, 1) * decay  # BAD

    return named(lift=nn.Linear(2, 3), scan=Scan()), {"x": torch.randn(2, 40, 2)}, mean_of_squares


@program(phase="forward", mechanism=("empty-reduction", "invalid"), op="div")
def onsets_of_a_clip_without_notes() -> Case:
    """york135/CTC_CE_for_AST#3: the weights of all frames are 0, and so is their sum."""

    def step(model: nn.Module, batch: Batch) -> Tensor:
        error = F.binary_cross_entropy_with_logits(model(batch["x"]).squeeze(-1), batch["on"], reduction="none")
        return torch.dot(error, batch["on"]) / torch.sum(batch["on"])  # BAD

    return nn.Linear(4, 1), {"x": torch.randn(6, 4), "on": torch.zeros(6)}, step


@program(phase="forward", mechanism="invalid", op="div")
def step_length_of_a_search_that_has_arrived() -> Case:
    """The exact step length of a quadratic is a plain number: 0 / 0 where the direction is 0."""

    def step(model: nn.Module, batch: Batch) -> Tensor:
        out = model(batch["x"])
        direction = out.detach() - out.detach()
        along, curvature = direction.flatten() @ out.detach().flatten(), direction.square().sum()
        length = (along / curvature).item()  # BAD
        while length > 1e3:
            length /= 2
        return (out - length * direction).square().mean()

    return nn.Linear(3, 3), {"x": torch.randn(2, 3)}, step


@program(phase="forward", mechanism="pole", op="div")
def step_size_of_an_integrator_without_an_error() -> Case:
    """The next step of an adaptive integrator is the tolerance by the error, which is 0 at rest."""

    def step(model: nn.Module, batch: Batch) -> Tensor:
        y, t, h = batch["x"], 0.0, 0.25
        while t < 1:
            rate = model(y)
            error = (rate - rate.detach()).abs().max()
            y, t = y + h * rate, t + h
            h = 0.9 * float((1e-3 / error).sqrt())  # BAD
        return (y + h * model(y)).square().mean()

    return nn.Linear(3, 3), {"x": torch.randn(2, 3)}, step


@program(phase="forward", mechanism="pole", op="log")
def loss_formula_from_a_configuration() -> Case:
    """The formula is a string: the line that evaluates it is the user's."""

    class Formula(nn.Module):
        def __init__(self, text: str) -> None:
            super().__init__()
            self.text = text

        def forward(self, x: Tensor) -> Tensor:
            return eval(self.text, {"torch": torch, "x": x})  # type: ignore[no-any-return]  # BAD

    return (
        named(body=nn.Linear(4, 4), loss=Formula("torch.log(torch.relu(x) * 0)")),
        {"x": torch.randn(2, 4)},
        mean_of_squares,
    )


@program(phase="forward", mechanism=("pole", "invalid"), op="div")
def layer_whose_forward_is_generated() -> Case:
    """A function is written by a template and run through exec."""
    names: dict[str, Any] = {"torch": torch}
    exec("def scaled(x, by):\n    shifted = x - x.mean()\n    return shifted / (by - by)\n", names)

    class Generated(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            kept = torch.tanh(x)
            return names["scaled"](kept, x.detach())  # type: ignore[no-any-return]  # BAD

    return named(body=nn.Linear(4, 4), layer=Generated()), {"x": torch.randn(2, 4)}, mean_of_squares


@program(phase="forward", mechanism=("invalid", "empty-reduction", "pole"), op="div")
def curriculum_weights_from_a_generator() -> Case:
    """The first of the weights is a share of what has been seen before: nothing."""

    def shares(terms: list[Tensor]) -> Iterator[Tensor]:
        seen = torch.zeros(())
        for term in terms:
            yield term.detach() * 0 / seen  # BAD
            seen = seen + term.detach()

    def step(model: nn.Module, batch: Batch) -> Tensor:
        terms = [model(x).square().mean() for x in batch["x"]]
        return torch.stack([w * t for w, t in zip(shares(terms), terms, strict=True)]).sum()

    return nn.Linear(4, 2), {"x": torch.randn(3, 2, 4)}, step


@program(phase="forward", mechanism=("invalid", "pole"), op="div")
def decorator_that_normalizes_what_a_loss_returns() -> Case:
    """The decorator divides by the largest loss of the batch; all are 0."""

    def relative(loss: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
        @functools.wraps(loss)
        def scaled(out: Tensor, target: Tensor) -> Tensor:
            values = loss(out, target)
            return values / values.detach().amax()  # BAD

        return scaled

    @relative
    def error(out: Tensor, target: Tensor) -> Tensor:
        return F.relu(out - target).sum(-1)

    def step(model: nn.Module, batch: Batch) -> Tensor:
        return error(model(batch["x"]), batch["y"]).mean()

    return nn.Linear(4, 4), {"x": torch.randn(2, 4), "y": torch.full((2, 4), 100.0)}, step


@program(phase="forward", mechanism=("invalid", "empty-reduction"), op="div", module="")
def tree_with_a_node_that_has_no_children() -> Case:
    """A recursive network averages over children; a leaf that is marked as an inner node has none."""

    class Tree(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell = nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.state([[x[0], x[1]], [], x[2]])

        def state(self, node: Any) -> Tensor:
            if isinstance(node, Tensor):
                return self.cell(node)  # type: ignore[no-any-return]
            total = torch.zeros(3)
            for child in node:
                total = total + self.state(child)
            return torch.tanh(total / torch.tensor(float(len(node))))  # BAD

    return Tree(), {"x": torch.randn(3, 3)}, mean_of_squares


@program(phase="forward", mechanism="range-overflow", op="_to_copy")
def positions_of_a_long_context_in_half_precision() -> Case:
    """Positions beyond 65,504 are infinite in float16, and have no cosine."""

    class Rotary(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            position = torch.arange(65_500, 65_500 + x.shape[1]).to(torch.float16)  # BAD
            angle = position.float()[:, None] * torch.tensor([1.0, 0.01])
            return x * angle.cos()

    return named(lift=nn.Linear(3, 2), rotary=Rotary()), {"x": torch.randn(1, 40, 3)}, mean_of_squares


@program(phase="forward", mechanism=("invalid", "pole"), op="div")
def returns_scaled_by_the_range_of_their_quantiles() -> Case:
    """An agent that has seen one return only scales by the distance of two equal quantiles."""

    def step(model: nn.Module, batch: Batch) -> Tensor:
        low, high = torch.quantile(batch["returns"], torch.tensor([0.05, 0.95]))
        value = model(batch["x"]).squeeze(-1)
        scaled = (batch["returns"] - low) / (high - low)  # BAD
        return F.mse_loss(value, scaled)

    return nn.Linear(4, 1), {"x": torch.randn(5, 4), "returns": torch.full((5,), 2.0)}, step


@program(phase="backward", mechanism=("pole", "where-gradient"), op="special_entr")
def entropy_of_experts_that_are_switched_off() -> Case:
    """The entropy of 0 is 0, its slope is infinite, and that of the square before it is 0."""

    class Gate(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.special.entr(x.square())  # BAD

    def step(model: nn.Module, batch: Batch) -> Tensor:
        out: Tensor = model(batch["x"])
        return out.sum()

    router = _zero_rows(nn.Linear(4, 3), slice(0, 1))
    return named(router=router, gate=Gate()), {"x": torch.randn(2, 4)}, step


@program(phase="forward", mechanism="pole", op="logit")
def logit_of_a_probability_that_was_clamped_to_one() -> Case:
    """The clamp lets 0 and 1 through."""

    class Calibrate(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            share = (x.abs() + 1).clamp(0, 1)
            return torch.logit(share) * 0.5  # BAD

    return named(body=nn.Linear(3, 3), calibrate=Calibrate()), {"x": torch.randn(2, 3)}, mean_of_squares


@program(phase="forward", mechanism="invalid", op="div")
def views_normalized_without_an_eps() -> Case:
    """Each view in a list of views is normalized by the library, whose eps was switched off."""

    def step(model: nn.Module, batch: Batch) -> Tensor:
        views = [F.normalize(model(x), dim=-1, eps=0.0) for x in batch["x"]]  # BAD
        return (views[0] * views[1]).sum(-1).mean()

    model = nn.Linear(4, 4, bias=False)
    x = torch.randn(2, 3, 4)
    x[1, 2] = 0
    return model, {"x": x}, step


@program(phase="forward", mechanism="invalid", op="div")
def weight_that_is_parametrized_by_its_direction() -> Case:
    """A parametrization divides each row by its length; one row starts at zero."""

    class Direction(nn.Module):
        def forward(self, v: Tensor) -> Tensor:
            return v / v.square().sum(1, keepdim=True).sqrt()  # BAD

    layer = _zero_rows(nn.Linear(4, 3), slice(1, 2))
    parametrize.register_parametrization(layer, "weight", Direction())
    return named(stem=nn.Linear(4, 4), layer=layer), {"x": torch.randn(2, 4)}, mean_of_squares


@program(phase="forward", mechanism="pole", op="reciprocal")
def precision_that_is_a_property() -> Case:
    """The property computes the precision from a variance that starts at zero."""

    class Head(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.variance = nn.Parameter(torch.zeros(3))

        @property
        def precision(self) -> Tensor:
            return self.variance.reciprocal()  # BAD

        def forward(self, x: Tensor) -> Tensor:
            return x.square() * self.precision

    return named(body=nn.Linear(4, 3), head=Head()), {"x": torch.randn(2, 4)}, mean_of_squares


@program(phase="forward", mechanism="pole", op="log")
def losses_chosen_from_a_table_of_lambdas() -> Case:
    """Each name has a function; one of them takes the logarithm of a zero."""
    losses: dict[str, Callable[[Tensor], Tensor]] = {
        "size": lambda h: h.square().mean(),
        "sparse": lambda h: h.abs().mean(),
        "volume": lambda h: F.relu(h - 100).sum(-1).log().mean(),  # BAD
    }

    def step(model: nn.Module, batch: Batch) -> Tensor:
        h = model(batch["x"])
        return torch.stack([losses[name](h) for name in ("size", "sparse", "volume")]).sum()

    return nn.Linear(4, 4), {"x": torch.randn(2, 4)}, step


@program(phase="forward", mechanism="invalid", op="div", module="")
def weights_standardized_for_a_functional_call() -> Case:
    """Every parameter is standardized before the call; a bias that starts at zero is constant."""

    def step(model: nn.Module, batch: Batch) -> Tensor:
        scaled = {n: (p - p.mean()) / (p - p.mean()).square().mean().sqrt() for n, p in model.named_parameters()}  # BAD
        out: Tensor = torch.func.functional_call(model, scaled, (batch["x"],))
        return out.square().mean()

    model = nn.Linear(4, 3)
    nn.init.zeros_(model.bias)
    return model, {"x": torch.randn(2, 4)}, step


@program(phase="forward", mechanism="pole", op="reciprocal")
def task_weighted_by_the_inverse_of_its_loss() -> Case:
    """A task that is solved has loss 0, weight inf, and 0 · inf in the sum."""

    def step(model: nn.Module, batch: Batch) -> Tensor:
        out = model(batch["x"])
        losses = [out[:, 0].square().mean(), F.relu(out[:, 1] - 100).mean()]
        weights = [1 / one.detach() for one in losses]  # BAD
        return torch.stack([w * one for w, one in zip(weights, losses, strict=True)]).sum()

    return nn.Linear(4, 2), {"x": torch.randn(3, 4)}, step


@program(phase="forward", mechanism="invalid", op="mul")
def scale_that_is_doubled_until_it_fits() -> Case:
    """A plain number is doubled until the largest output is 1: that of zeros never is, and it becomes infinite."""

    def step(model: nn.Module, batch: Batch) -> Tensor:
        h = model(batch["x"])
        scale = 1e300
        while float((h.detach() * scale).max()) < 1:
            scale *= 2
        return (h * scale).sum()  # BAD

    return _zero_rows(nn.Linear(3, 3), slice(None)), {"x": torch.randn(2, 3)}, step


@program(phase="forward", mechanism="invalid", op="div")
def root_by_newton_that_starts_where_the_slope_is_zero() -> Case:
    """A fixed number of Newton steps; one element starts on the turning point of its parabola."""

    class Root(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            guess = F.relu(x - 100)
            for _ in range(5):
                guess = guess - (guess.square() - x.detach() * 0) / (2 * guess)  # BAD
            return guess

    return named(body=nn.Linear(3, 2), root=Root()), {"x": torch.randn(2, 3)}, mean_of_squares


@program(phase=("backward", "forward"), mechanism=("where-gradient", "pole", "invalid"), op="div")
def interpolation_between_two_equal_knots() -> Case:
    """A knot that is there twice makes a bin of width zero, which a later choice leaves out."""

    def step(model: nn.Module, batch: Batch) -> Tensor:
        x, knots = model(batch["x"]), batch["knots"]
        low, high = knots[:-1], knots[1:]
        share = (x - low) / (high - low)  # BAD
        inside = (x >= low) & (x < high)
        return torch.where(inside, share, torch.zeros(())).sum(-1).square().mean()

    return nn.Linear(3, 1), {"x": torch.randn(4, 3), "knots": torch.tensor([-9.0, 0.0, 0.0, 9.0])}, step


@program(phase="forward", mechanism="invalid", op="div")
def correlation_with_a_target_that_never_changes() -> Case:
    """The correlation with a constant is 0 / 0."""

    class Correlation(nn.Module):
        def forward(self, out: Tensor, target: Tensor) -> Tensor:
            a, b = out - out.mean(), target - target.mean()
            return 1 - (a * b).sum() / (a.square().sum() * b.square().sum()).sqrt()  # BAD

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.criterion = nn.Linear(4, 1), Correlation()

        def forward(self, x: Tensor) -> Tensor:
            return self.criterion(self.body(x).squeeze(-1), torch.ones(len(x)))  # type: ignore[no-any-return]

    return Net(), {"x": torch.randn(6, 4)}, lambda model, batch: model(batch["x"])


@program(phase="forward", mechanism="empty-reduction", op="std")
def spread_in_windows_of_one_frame() -> Case:
    """A window of one frame has no standard deviation."""

    class Windows(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.width = width

        def forward(self, x: Tensor) -> Tensor:
            return x.unfold(-1, self.width, 1).std(-1)  # BAD

    return named(lift=nn.Linear(6, 6), windows=Windows(1)), {"x": torch.randn(2, 6)}, mean_of_squares


@program(phase=("forward", "outside"), mechanism=("invalid", "outside-dispatcher"), op="div")
def class_weights_with_an_infinity_of_their_own() -> Case:
    """A class without samples gets an infinite weight on purpose; normalized, it is inf / inf."""

    def step(model: nn.Module, batch: Batch) -> Tensor:
        counts = torch.bincount(batch["y"], minlength=3).tolist()
        weights = torch.tensor([1 / c if c else float("inf") for c in counts])
        weights = weights / weights.sum()  # BAD
        return F.cross_entropy(model(batch["x"]), batch["y"], weight=weights)

    return nn.Linear(4, 3), {"x": torch.randn(4, 4), "y": torch.tensor([0, 1, 1, 0])}, step


@program(phase=("leaf", "outside"), mechanism=("bad-leaf", "outside-dispatcher"), leaf="attribute tables.tables.1")
def table_in_a_list_of_a_module() -> Case:
    """A plain list of tensors, which no optimizer and no checkpoint knows."""

    class Tables(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tables = [torch.ones(3), torch.tensor([1.0, float("nan"), 1.0])]

        def forward(self, x: Tensor) -> Tensor:
            for table in self.tables:
                x = x * table  # BAD
            return x

    return named(body=nn.Linear(4, 3), tables=Tables()), {"x": torch.randn(2, 4)}, mean_of_squares


# healthy


@healthy
def percentage_error_with_a_safe_divisor() -> Case:
    """As above, with the choice made before the division."""

    def step(model: nn.Module, batch: Batch) -> Tensor:
        out = model(batch["x"])
        size = out.abs() + batch["y"].abs()
        return ((out - batch["y"]).abs() / torch.where(size > 0, size, torch.ones(()))).mean()

    return _zero_rows(nn.Linear(4, 4), slice(1, 2)), {"x": torch.randn(3, 4), "y": torch.zeros(3, 4)}, step


@healthy
def search_that_rejects_infinite_candidates() -> Case:
    """A backtracking search tries steps whose loss overflows, and takes a shorter one."""

    def step(model: nn.Module, batch: Batch) -> Tensor:
        out, length = model(batch["x"]), 1e4
        while not bool(torch.exp(out.detach().abs() * length).sum().isfinite()):
            length /= 10
        return (out * length).square().mean()

    return nn.Linear(3, 3), {"x": torch.randn(2, 3)}, step


@healthy
def logged_number_that_is_not_a_number() -> Case:
    """A statistic is NaN and only kept as a plain number."""

    def step(model: nn.Module, batch: Batch) -> Tensor:
        out = model(batch["x"])
        seen = {"spread": float(out.detach()[:1, :1].log().mean() * 0 / 0), "best": float("inf")}
        seen["best"] = min(seen["best"], float(out.detach().square().mean()))
        return out.square().mean() / (1 + seen["best"])

    return nn.Linear(3, 3), {"x": torch.randn(2, 3)}, step


@healthy
def formula_that_is_evaluated_where_it_is_finite() -> Case:
    """Generated code is no reason for an alarm."""

    def step(model: nn.Module, batch: Batch) -> Tensor:
        out: Tensor = eval("torch.log1p(h.abs()).mean()", {"torch": torch, "h": model(batch["x"])})
        return out

    return nn.Linear(3, 3), {"x": torch.randn(2, 3)}, step


@healthy
def masks_from_a_generator() -> Case:
    """Each mask of a sequence leaves more in."""

    def masks(size: int) -> Iterator[Tensor]:
        for i in range(1, size + 1):
            yield torch.where(torch.arange(size) < i, 0.0, -torch.inf)

    def step(model: nn.Module, batch: Batch) -> Tensor:
        scores = model(batch["x"])
        rows = [torch.softmax(row + mask, -1) for row, mask in zip(scores, masks(4), strict=True)]
        return torch.stack(rows).square().mean()

    return nn.Linear(3, 4), {"x": torch.randn(4, 3)}, step


@healthy
def model_that_runs_in_a_thread() -> Case:
    """The forward pass runs in a pool of one thread."""
    pool = ThreadPoolExecutor(1)

    def step(model: nn.Module, batch: Batch) -> Tensor:
        out: Tensor = pool.submit(model, batch["x"]).result()
        return out.square().mean()

    return nn.Linear(3, 3), {"x": torch.randn(2, 3)}, step


@healthy
def weight_that_is_parametrized_with_an_eps() -> Case:
    """As above, with a row of zeros that stays finite."""

    class Direction(nn.Module):
        def forward(self, v: Tensor) -> Tensor:
            return v / (v.square().sum(1, keepdim=True) + 1e-6).sqrt()

    layer = _zero_rows(nn.Linear(4, 3), slice(1, 2))
    parametrize.register_parametrization(layer, "weight", Direction())
    return named(stem=nn.Linear(4, 4), layer=layer), {"x": torch.randn(2, 4)}, mean_of_squares


@healthy
def integrator_whose_steps_are_bounded() -> Case:
    """The error is 0 and the next step would be infinite; the smaller of two numbers is taken."""

    def step(model: nn.Module, batch: Batch) -> Tensor:
        y, t, h = batch["x"], 0.0, 0.25
        while t < 1:
            rate = model(y)
            y, t = y + h * rate, t + h
            h = min(0.9 * float((1e-3 / (rate - rate).detach().abs().max()).sqrt()), 0.5)
        return y.square().mean()

    return nn.Linear(3, 3), {"x": torch.randn(2, 3)}, step
