"""What the record says: input, prediction, loss component, gradient, parameter; taps and watches."""

from __future__ import annotations

import json
import math
import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from nanproof import Guard, Incident, Policy, tap
from nanproof.errors import UsageError
from support.runs import guarded, make_batches, seed_everything

NAN = float("nan")


def make(model: nn.Module | None = None, **options: Any) -> tuple[nn.Module, Guard]:
    seed_everything()
    model = model or nn.Linear(8, 4)
    return model, guarded(model, torch.optim.SGD(model.parameters(), lr=0.01), policy=Policy(rerun=False), **options)


def test_a_bad_input_is_named_before_what_it_caused() -> None:
    model, guard = make()
    x = make_batches(1)[0].x.clone()
    x[1, 3] = NAN
    verdict = guard.step(lambda: model(x).square().mean(), batch={"x": x, "mask": torch.ones(2)})
    assert (verdict.kind, verdict.level) == ("nonfinite", "input")


def test_a_deliberate_inf_in_the_batch_is_no_incident() -> None:
    """Additive attention masks are full of it."""
    model, guard = make()
    batch = make_batches(1)[0]
    mask = torch.tensor([0.0, 0.0, -math.inf, 0.0])
    verdict = guard.step(
        lambda: nn.functional.cross_entropy((model(batch.x) + mask), torch.zeros(6, dtype=torch.long)),
        batch={"x": batch.x, "mask": mask},
    )
    assert verdict.ok


def test_a_bad_prediction_is_named_before_the_loss() -> None:
    model, guard = make()
    x = make_batches(1)[0].x

    def closure() -> tuple[Tensor, Tensor]:
        out = model(x) * NAN
        return out.mean(), out

    assert guard.step(closure).level == "prediction"


def test_each_loss_component_is_judged_and_named() -> None:
    model, guard = make(loss_weights={"text": 1.0, "latent": 0.1})
    x = make_batches(1)[0].x
    good = guard.step(lambda: {"text": model(x).mean(), "latent": model(x).square().mean()})
    assert good.ok
    reading = guard._context.run.recorder.recent[-1]
    assert reading.loss == pytest.approx(reading.components["text"] + 0.1 * reading.components["latent"], rel=1e-5)
    verdict = guard.step(lambda: {"text": model(x).mean(), "latent": model(x).mean() * NAN})
    assert (verdict.level, verdict.names) == ("loss", ("latent",))


def test_a_component_of_weight_zero_does_no_harm() -> None:
    model, guard = make(loss_weights={"latent": 0.0})
    x = make_batches(1)[0].x
    assert guard.step(lambda: {"text": model(x).mean(), "latent": model(x).mean() * 2}).ok


def test_the_bad_parameter_is_named_with_its_counts() -> None:
    model, guard = make(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4)))
    x = make_batches(1)[0].x
    model[1].weight.register_hook(lambda g: torch.where(torch.arange(8) == 2, math.inf, g))
    verdict = guard.step(lambda: model(x).square().mean())
    assert (verdict.level, verdict.names) == ("gradient", ("1.weight",))
    assert math.isinf(verdict.value or 0)


class Tapped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(8, 4)
        self.alpha = nn.Parameter(torch.tensor(0.01))
        self.gain = 1.0

    def forward(self, x: Tensor) -> Tensor:
        h = tap("pooled", self.lin(x))
        h = tap("read_out", h * self.gain, alpha=self.alpha)
        return tap("final", h * self.alpha, gates=torch.tensor([1.0, 3.0]))


def test_taps_are_listed_in_order_with_the_first_bad_one_marked(tmp_path: Any, caplog: Any) -> None:
    model = Tapped()
    seed_everything()
    guard = Guard(model, torch.optim.SGD(model.parameters(), lr=0.01), run_dir=tmp_path)  # reruns included
    x = make_batches(1)[0].x
    assert guard.step(lambda: model(x).square().mean()).ok
    model.gain = math.inf
    guard.step(lambda: model(x).square().mean())
    folder = next((tmp_path / "incidents").iterdir())
    incident = Incident.from_json(json.loads((folder / "incident.json").read_text()))
    assert [t.name for t in incident.taps] == ["pooled", "read_out", "final"]
    assert [t.bad > 0 for t in incident.taps] == [False, True, True]
    read_out, final = incident.taps[1], incident.taps[2]
    assert read_out.shape == (6, 4)
    assert read_out.posinf + read_out.neginf == 24
    assert read_out.extra["alpha"] == pytest.approx(0.01, rel=0.05)
    assert final.extra == {"gates.min": 1.0, "gates.max": 3.0}
    assert incident.taps[0].finite_max is not None
    assert "first bad tap: read_out" in caplog.text


def test_a_tap_outside_a_guard_does_nothing() -> None:
    x = torch.ones(2, requires_grad=True)
    assert tap("x", x) is x


def test_a_tap_does_not_break_a_compiled_graph() -> None:
    model = Tapped()
    _, guard = make(model)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    x = make_batches(1)[0].x
    assert guard.step(lambda: compiled(x).square().mean()).ok


def test_a_compiled_model_is_guarded_without_closure_too() -> None:
    """Hooks of the compiled module run outside the graph: buffers go back to before the bad forward pass."""
    seed_everything()
    model = torch.compile(nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4)), backend="aot_eager")
    guard = Guard(model, torch.optim.SGD(model.parameters(), lr=0.01))
    x = make_batches(1)[0].x
    guard.backward(model(x).square().mean())
    assert guard.step().ok
    before = {k: v.clone() for k, v in model.state_dict().items()}
    guard.backward(model(x * NAN).square().mean())
    assert not guard.step().ok
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())


def test_watches_read_activations_and_gates_on_their_cadence() -> None:
    model = Tapped()
    _, guard = make(model, modules=["lin"], params=["*alpha*"], every=3)
    x = make_batches(1)[0].x
    for _ in range(27):
        guard.step(lambda: model(x).square().mean())
    seen = [r.watched for r in guard._context.run.recorder.recent]
    assert all("absmax/lin" in w for w in seen[:20]), "the first steps are all read"
    assert ["absmax/lin" in w for w in seen[20:]] == [False, True, False, False, True, False, False]
    assert {"absmax/lin", "param/alpha"} <= set(seen[0])
    assert seen[0]["param/alpha"] == pytest.approx(0.01)
    assert seen[0]["absmax/lin"] > 0


def test_a_watch_that_matches_nothing_is_an_error() -> None:
    with pytest.raises(UsageError, match=r"no modules match 'blocks\.\*'"):
        make(modules=["blocks.*"])
    with pytest.raises(UsageError, match=r"no parameters match '\*gate\*'"):
        make(params=["*gate*"])


class Growing(nn.Module):
    """A residual stream that grows with every step, in float16, as in the first system's post-mortem."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(8, 4)
        self.stream = nn.Identity()
        self.gain = 1.0

    def forward(self, x: Tensor) -> Tensor:
        self.gain *= 1.4
        h = self.stream((self.lin(x).half() * self.gain).clamp(-6e4, 6e4))
        return h.float() / self.gain


def test_an_output_that_nears_its_maximum_warns_before_anything_breaks(caplog: Any) -> None:
    model = Growing()
    _, guard = make(model, modules=["stream"], every=1)
    x = make_batches(1)[0].x
    verdicts = [guard.step(lambda: model(x).square().mean()) for _ in range(30)]
    assert all(v.ok for v in verdicts), "a warning vetoes nothing"
    assert guard.tally.warnings["forecast"] >= 1
    rates = re.findall(r"the largest output of stream grows ([\d.]+) × per step and reaches 65,504", caplog.text)
    assert rates
    assert [float(r) for r in rates] == pytest.approx([1.4] * len(rates), abs=0.1)


def test_gradients_near_their_maximum_warn_too(caplog: Any) -> None:
    seed_everything()
    model = nn.Linear(4, 1, bias=False).half()
    guard = Guard(model, torch.optim.SGD(model.parameters(), lr=0.0), policy=Policy(spikes="observe"))
    x = torch.ones(1, 4).half()
    for i in range(30):
        guard.step(lambda i=i: (model(x) * 1.4**i).sum())
    assert "the gradient norm grows 1.4 × per step and reaches 65,504" in caplog.text
    assert guard.tally.updates == 30


def test_a_dead_model_is_called_dead_once(caplog: Any) -> None:
    """Loss at chance and a vanishing norm: the old success criterion "norm below one" would have passed it."""
    model, guard = make(chance=math.log(4))
    x, y = make_batches(1)[0].x, make_batches(1)[0].y
    verdicts = [guard.step(lambda: nn.functional.cross_entropy(model(x) * 1e-4, y)).kind for _ in range(450)]
    assert verdicts.count("dead") == 1
    assert guard.tally.updates == 450
    healthy_model, healthy = make(chance=math.log(4))
    kinds = {healthy.step(lambda: nn.functional.cross_entropy(healthy_model(x), y)).kind for _ in range(450)}
    assert kinds == {"ok"}


def test_an_output_with_loss_and_logits_is_understood() -> None:
    class Output:
        def __init__(self, loss: Tensor, logits: Tensor) -> None:
            self.loss, self.logits = loss, logits

    model, guard = make()
    x = make_batches(1)[0].x
    assert guard.step(lambda: Output(model(x).mean(), model(x))).ok
    bad = guard.step(lambda: Output(model(x).mean() * NAN, model(x) * NAN))
    assert bad.level == "prediction"


@pytest.mark.parametrize(
    ("closure", "words"),
    [
        (lambda m, x: 3.0, "the step returned float, not a loss"),
        (lambda m, x: m(x), r"the loss has shape \(6, 4\)\. Next: reduce it to one number"),
        (lambda m, x: m(x).mean().detach(), "the loss does not depend on any parameter"),
        (lambda m, x: {"a": 1.0}, "the step returned dict, not a loss"),
    ],
)
def test_a_step_that_returns_no_loss_is_a_clear_error(closure: Any, words: str) -> None:
    model, guard = make()
    with pytest.raises(UsageError, match=words):
        guard.step(lambda: closure(model, make_batches(1)[0].x))


def test_loss_weights_that_name_no_component_are_an_error() -> None:
    model, guard = make(loss_weights={"latnet": 0.1})
    with pytest.raises(UsageError, match=r"loss_weights names 'latnet'.*use \['latent'\]"):
        guard.step(lambda: {"latent": model(make_batches(1)[0].x).mean()})
