"""Early warnings in a guarded run: each signal against a plain computation, and a warning never changes the run."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from nanproof import Guard, Policy, diagnose
from nanproof.diagnosing.text import as_text
from nanproof.errors import GuardStop, UsageError
from nanproof.guard.attention import COMPILES, Logits
from nanproof.guard.foresight import Outputs
from nanproof.guard.options import Watch
from nanproof.guard.precursors import SAMPLE, Part, Precursors
from support.ranks import on_ranks
from support.runs import seed_everything


def small() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 1))


def climb(guard: Guard, model: nn.Module, steps: int) -> None:
    """A learning rate that doubles every forty steps: it ends badly, and slowly."""
    draw = torch.Generator().manual_seed(1)
    for step in range(steps):
        for group in guard.training.optimizers[0].param_groups:
            group["lr"] = 0.01 * 2 ** (step / 40)
        x = torch.randn(16, 4, generator=draw)
        guard.step(lambda x=x: (model(x)[:, 0] - x.sin().sum(1)).square().mean() + 0 * torch.rand(()))


def dying(run_dir: Path | None = None, steps: int = 185, **options: Any) -> tuple[nn.Module, Guard]:
    seed_everything()
    model = small()
    guard = Guard(model, torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9), run_dir=run_dir, **options)
    climb(guard, model, steps)
    return model, guard


# --- signals ----------------------------------------------------------------------------------------------------------


def read(part: Part | None) -> Mapping[str, float]:
    assert part is not None
    return part.now()


@pytest.mark.parametrize("kind", ["adamw", "sgd", "rmsprop"])
def test_each_signal_is_what_a_plain_computation_gives(kind: str) -> None:
    seed_everything()
    model = nn.Sequential(nn.Conv2d(2, 3, 2).to(memory_format=torch.channels_last), nn.Flatten(), nn.Linear(12, 3))
    make = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD, "rmsprop": torch.optim.RMSprop}[kind]
    optimizer = make(model.parameters(), lr=0.01)
    precursors = Precursors(list(model.named_parameters()), [optimizer])
    before: dict[str, Tensor] = {}
    for update in range(5):
        found = read(precursors.sample(update))
        ready = update > (kind != "sgd")  # the first update makes the second moments: a new start
        for name, p in model.named_parameters() if ready else ():
            if p.dim() < 2:
                assert not any(k.endswith(f"/{name}") for k in found), "biases are left out"
                continue
            change = (p - before[name]).norm() / before[name].norm()
            assert found[f"update_ratio/{name}"] == pytest.approx(change.item(), rel=1e-4)
            if kind != "sgd":
                assert p.grad is not None
                state = optimizer.state[p]
                v = state["exp_avg_sq"] / (1 - 0.999**update) if kind == "adamw" else state["square_avg"]
                assert found[f"g2_over_v/{name}"] == pytest.approx((p.grad**2 / v).mean().item(), rel=2e-3)
        if ready:
            still = torch.cat([(p == before[n]).flatten() for n, p in model.named_parameters() if p.dim() > 1])
            assert found["unmoved"] == pytest.approx(still.float().mean().item())
        assert any(k.startswith("g2_over_v/") for k in found) == (kind != "sgd" and ready)
        before = {n: p.detach().clone() for n, p in model.named_parameters()}
        optimizer.zero_grad()
        model(torch.randn(5, 2, 3, 3)).square().sum().backward()
        optimizer.step()


@pytest.mark.parametrize("kind", ["plain", "half", "mixed"])
def test_gradient_norms_of_matrices_are_those_of_a_plain_computation(kind: str, tmp_path: Path) -> None:
    seed_everything()
    model: Any = nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 3))
    model = model.bfloat16() if kind == "half" else model
    model[2] = model[2].double() if kind == "mixed" else model[2]
    x = torch.randn(5, 6, dtype=model[0].weight.dtype)
    watch = Watch(params=["*"])

    def loss() -> Tensor:
        return model[2](model[1](model[0](x)).to(model[2].weight.dtype)).square().sum()

    named = dict(model.named_parameters())
    norms = {
        n: g.float().norm().item() for n, g in zip(named, torch.autograd.grad(loss(), named.values()), strict=True)
    }
    with Guard(model, torch.optim.SGD(model.parameters(), lr=1e-3), run_dir=tmp_path, watch=watch) as guard:
        guard.step(loss)
    line = json.loads((tmp_path / "training_log.jsonl").read_text().splitlines()[0])
    matrices = {f"grad_norm/{n}": norms[n] for n in norms if named[n].dim() > 1}
    assert {k: v for k, v in line.items() if k.startswith("grad_norm/")} == pytest.approx(matrices, rel=1e-2)
    assert line["grad_norm"] == pytest.approx(math.hypot(*norms.values()), rel=1e-2)


def test_a_large_matrix_is_sampled_evenly() -> None:
    w = nn.Parameter(torch.arange(10.0 * SAMPLE).reshape(10, SAMPLE))
    precursors = Precursors([("w", w)], [])
    read(precursors.sample(0))
    with torch.no_grad():
        w.view(-1)[1::10] += 1.0  # between the samples: not seen
        w.view(-1)[::10] *= 2.0
    assert read(precursors.sample(1))["update_ratio/w"] == pytest.approx(1.0)


def test_a_matrix_of_one_element_that_crosses_zero_is_not_at_risk() -> None:
    tiny, w = nn.Parameter(torch.ones(1, 1)), nn.Parameter(torch.ones(4, 4))
    precursors = Precursors([("tiny", tiny), ("w", w)], [])
    read(precursors.sample(0))
    assert set(read(precursors.sample(1))) == {"update_ratio/w", "unmoved"}


def test_the_share_of_elements_that_do_not_move() -> None:
    w = nn.Parameter(torch.ones(8, 8))
    precursors = Precursors([("w", w)], [])
    read(precursors.sample(0))
    with torch.no_grad():
        w[:2] += 1
    assert read(precursors.sample(1))["unmoved"] == 0.75


class Mixed(nn.Module):
    """One output in float16 that is large, others in float32 that are larger."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.narrow, self.tiny = nn.Linear(4, 4), nn.Identity(), nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.tiny(self.narrow((self.wide(x * 1e6) / 1e3).half()).float() * 1e-6)


def test_the_outputs_that_could_overflow_first_are_chosen(tmp_path: Path) -> None:
    seed_everything()
    model = Mixed()
    watch = Watch(automatic=1)
    with Guard(model, torch.optim.SGD(model.parameters(), lr=1e-9), run_dir=tmp_path, watch=watch) as guard:
        for _ in range(3):
            guard.step(lambda: model(torch.ones(2, 4)).mean())
    lines = [json.loads(line) for line in (tmp_path / "training_log.jsonl").read_text().splitlines()]
    assert [[k for k in line if k.startswith("absmax/")] for line in lines] == [["absmax/narrow"]] * 3
    plain = model.narrow((model.wide(torch.ones(2, 4) * 1e6) / 1e3).half()).abs().max().item()
    assert lines[-1]["absmax/narrow"] == pytest.approx(plain, rel=1e-3)
    assert not any(m._forward_hooks for m in model.modules()), "closed: no hook is left"


def test_a_module_called_twice_counts_with_all_of_its_outputs() -> None:
    model = nn.ModuleDict({"same": nn.Identity()})
    outputs = Outputs(model, ["same"], 0)
    outputs.listen(None)
    for value in (3.0, -7.0, 2.0):
        model["same"](torch.tensor([value]))
    assert [value.item() for value in outputs.seen["same"]] == [-7.0, 3.0]


class Eager(nn.Module):
    """Attention written out, under a mask, called twice."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(width, width) for _ in range(3))
        self.broken = False

    def scores(self, x: Tensor) -> Tensor:
        mask = torch.ones(x.shape[-2], x.shape[-2], dtype=torch.bool).triu(1)
        return (self.q(x) @ self.k(x).transpose(-1, -2) * 9.0).masked_fill(mask, -math.inf)

    def forward(self, x: Tensor) -> Tensor:
        if self.broken:
            raise ValueError("no batch")
        return torch.softmax(self.scores(x), -1) @ self.v(x)


class Fused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        q = self.q(x).unsqueeze(1)
        return nn.functional.scaled_dot_product_attention(q, q, q)[:, 0]


@pytest.mark.skipif(not COMPILES, reason="this torch compiles nothing under a mode")
@pytest.mark.parametrize("half", [False, True])
def test_the_largest_attention_logit_is_what_a_plain_computation_gives(half: bool) -> None:
    seed_everything()
    model = nn.Sequential(Eager(), Fused(), nn.Linear(8, 8))
    logits = Logits(model, [], 8)
    x = torch.randn(3, 5, 8)
    logits.listen(None)
    with torch.autocast("cpu", torch.float16, enabled=half):
        model(x).sum().backward()
        plain = model[0].scores(x).amax().item()
    logits.listen(())
    assert set(logits.seen) == {"0"}, "fused attention keeps its logits to itself"
    assert logits.seen["0"].item() == pytest.approx(plain, rel=1e-6)
    assert logits.limits["0"] == (65504.0 if half else torch.finfo(torch.float32).max)
    logits.choose({"0": plain})
    assert logits.names == ["0"]
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


@pytest.mark.skipif(
    not hasattr(TorchDispatchMode, "supports_higher_order_operators"),
    reason="this torch refuses operators that call functions under any mode",
)
def test_a_branch_inside_of_watched_attention_runs_as_ever() -> None:
    """An operator that calls functions (torch.cond, an eager flex_attention) is no operation that a mode may refuse."""

    class Branching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.child = nn.Identity()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.no_grad(), torch.compiler.set_stance("force_eager"):
                scores: torch.Tensor = torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,))
            return scores.softmax(-1)

    model = nn.ModuleDict({"attn": Branching()})
    logits = Logits(model, ["attn"], 0)
    logits.listen(None)
    out = model["attn"](torch.ones(2, 3, 4))
    logits.listen(())
    assert set(logits.seen) == {"attn"}
    assert torch.equal(out, torch.ones(2, 3, 4).sin().softmax(-1))


def test_multi_head_attention_that_returns_its_weights_is_eager() -> None:
    seed_everything()
    attention = nn.MultiheadAttention(8, 2, batch_first=True)
    model = nn.ModuleDict({"attn": attention})
    logits = Logits(model, ["attn"], 0)
    x = torch.randn(3, 5, 8)
    logits.listen(None)
    attention(x, x, x)
    assert attention.in_proj_weight is not None
    q, k, _ = (x @ attention.in_proj_weight.T).unflatten(-1, (3, 2, 4)).movedim(-3, 0).transpose(-2, -3)
    assert logits.seen["attn"].item() == pytest.approx((q @ k.transpose(-1, -2) / 2).amax().item(), rel=1e-5)


def test_a_pass_that_fails_leaves_no_mode_behind() -> None:
    model = nn.Sequential(nn.Sequential(Eager()))
    logits = Logits(model, ["0.0"], 8)
    logits.listen(None)
    model[0][0].broken = True
    with pytest.raises(ValueError, match="no batch"):
        model(torch.randn(3, 5, 8))
    assert torch.utils._python_dispatch._get_current_dispatch_mode() is None
    model[0][0].broken = False
    model(torch.randn(3, 5, 8))
    assert set(logits.seen) == {"0.0"}


@pytest.mark.skipif(not COMPILES, reason="this torch compiles nothing under a mode")
def test_attention_in_a_guarded_run_is_logged_and_forecast(tmp_path: Path) -> None:
    """Query weights that grow by a factor per step: the logits grow with them."""
    seed_everything()
    model = nn.Sequential(Eager(), nn.Linear(8, 1))
    with torch.no_grad():
        model[0].k.weight.copy_(model[0].q.weight)
    guard = Guard(model, torch.optim.SGD(model.parameters(), lr=1e-9), run_dir=tmp_path)
    for step in range(75):
        with torch.no_grad():
            model[0].q.weight.mul_(1.0 if step < 30 else 1.15)
        with torch.autocast("cpu", torch.float16):
            guard.step(lambda: model(torch.ones(2, 5, 8) + torch.arange(8)).square().mean())
    guard.close()
    lines = [json.loads(line) for line in (tmp_path / "training_log.jsonl").read_text().splitlines()]
    read = [line["step"] for line in lines if "logits/0" in line]
    assert read[:22] == [*range(1, 22), 31]
    assert read[22:32] == [*range(41, 51)], "at every step once a reading is beyond its history"
    warned = [line for line in lines if line.get("event") == "warning"]
    died = min(line["step"] for line in lines if "loss" in line and line["verdict"] != "ok")
    assert died - warned[0]["step"] >= 10
    (trend,) = [t for t in warned[0]["trends"] if t["name"] == "logits/0"]
    assert trend["limit"] == 65504.0
    assert warned[0]["reason"].startswith("the largest attention logit of module 0 grows 1.")


class Partly(Eager):
    """Eager attention with a function inside that may only run compiled."""

    def __init__(self) -> None:
        super().__init__()
        self._twice = torch.compile(lambda x: x.sin() * 2, backend="eager", fullgraph=True)

    def forward(self, x: Tensor) -> Tensor:
        return self._twice(super().forward(x))


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # torch.compile looks at it itself
@pytest.mark.parametrize("kind", ["whole", "function"])
def test_compiled_code_stays_compiled(kind: str) -> None:
    """Hooks that come and go would have it compiled again."""
    seed_everything()
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model: Any = nn.Sequential(Partly() if kind == "function" else Eager(), nn.Linear(8, 1))
    if kind == "whole":
        model.compile(backend="eager")
    guard = Guard(model, torch.optim.SGD(model.parameters(), lr=1e-3))
    graphs = []
    for _ in range(25):
        assert guard.step(lambda: model(torch.randn(2, 5, 8)).square().mean()).ok
        graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    guard.close()
    assert graphs == [graphs[0]] * 25
    assert graphs[0] >= 1
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()


def test_every_micro_batch_of_a_step_counts(tmp_path: Path) -> None:
    """The largest of all of them, and the update after a step that was read."""
    seed_everything()
    model = nn.Sequential(nn.Linear(1, 16, bias=False), nn.Linear(16, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    before = math.nan
    with Guard(model, optimizer, run_dir=tmp_path, accumulate=2) as guard:
        for step in range(32):
            before = model[0].weight.abs().max().item() if step == 30 else before
            for value in (5.0, 1.0):
                guard.step(lambda v=value: model(torch.full((2, 1), v)).square().mean())
    lines = [json.loads(line) for line in (tmp_path / "training_log.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "loss" in line]
    assert steps[30]["absmax/0"] == pytest.approx(5.0 * before, rel=1e-5), "not that of the last micro-batch"
    assert [i for i, line in enumerate(steps) if "absmax/0" in line] == [*range(20), 20, 30]
    assert [i for i, line in enumerate(steps) if "update_ratio" in line] == [*range(1, 20), 20, 21, 31]


# --- the run ----------------------------------------------------------------------------------------------------------


def test_a_warning_comes_first_and_is_recorded(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "nanproof"):
        _, guard = dying(tmp_path)
        guard.close()
    lines = [json.loads(line) for line in (tmp_path / "training_log.jsonl").read_text().splitlines()]
    events = [line for line in lines if line.get("event") == "warning"]
    assert events
    assert {t["name"].partition("/")[0] for e in events for t in e["trends"]} >= {"update_ratio"}
    risks = [line["risk"] for line in lines if "loss" in line]
    assert len(risks) == 185
    assert all(0 <= r <= 1 for r in risks)
    assert caplog.text.count("early warning") == sum(e["severity"] == "warning" for e in events)
    assert guard.tally.warnings["forecast"] == len(events)
    assert "forecast" in guard.summary()


def test_a_warning_never_changes_the_run() -> None:
    """Bit for bit the same weights, moments and random states, warned or not."""
    states = []
    for automatic, how in ((8, "snapshot"), (8, "nothing"), (0, "nothing")):
        model, guard = dying(policy=Policy(on_warning=how), watch=Watch(automatic=automatic))  # type: ignore[arg-type]
        assert bool(guard.tally.warnings) == bool(automatic) or not automatic
        moments = [s["momentum_buffer"] for s in guard.training.optimizers[0].state.values()]
        states.append([*(p.detach().clone() for p in model.parameters()), *moments, torch.get_rng_state()])
        guard.close()
    for other in states[1:]:
        assert all(torch.equal(a, b) for a, b in zip(states[0], other, strict=True))


class Ops(TorchDispatchMode):
    """Counts operations, and reads of device values by the host."""

    def __init__(self) -> None:
        super().__init__()
        self.count = self.reads = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        self.reads += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


def test_a_step_that_is_read_adds_few_operations_and_no_host_read() -> None:
    """However many matrices: one for each of 4 outputs, 2 to send them with the rest, 1 to send samples of weights."""
    counts = []
    for automatic in (8, 0):
        seed_everything()
        model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(12)))
        guard = Guard(model, torch.optim.AdamW(model.parameters()), watch=Watch(automatic=automatic))
        ops = []
        for step in range(34):
            with Ops() as seen:
                guard.step(lambda model=model: model(torch.ones(2, 4)).square().mean())
            ops += [(seen.count, seen.reads)] if step > 28 else []
        counts.append(ops)
        guard.close()
    more = [(a - b, reads - others) for (a, reads), (b, others) in zip(*counts, strict=True)]
    assert more == [(0, 0), (6, 0), (6, 0), (0, 0), (0, 0)]


def test_a_calm_run_reads_each_output_once_in_ten_steps(tmp_path: Path) -> None:
    seed_everything()
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(12)))
    with Guard(model, torch.optim.SGD(model.parameters(), lr=1e-3), run_dir=tmp_path) as guard:
        for _ in range(60):
            guard.step(lambda: model(torch.ones(2, 4)).square().mean())
    lines = [json.loads(line) for line in (tmp_path / "training_log.jsonl").read_text().splitlines()]
    read = [{k for k in line if k.startswith("absmax/")} for line in lines[30:60]]
    assert [len(names) for names in read] == ([4, 4] + [0] * 8) * 3
    assert len(read[0] | read[1]) == 8
    assert read[0] == read[10] == read[20]


def test_a_snapshot_is_taken_and_the_next_checkpoint_is_kept(tmp_path: Path) -> None:
    seed_everything()
    model = small()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    guard = Guard(model, optimizer, policy=Policy(snapshot_every=10_000))
    taken = guard._context.snapshots.count
    climb(guard, model, 185)
    assert guard.tally.warnings
    assert guard._context.snapshots.count > taken
    for i in range(6):
        guard.save(tmp_path / f"{i}.pt")
    assert sorted(p.name for p in tmp_path.glob("*.pt")) == ["0.pt", "3.pt", "4.pt", "5.pt"]
    guard.close()


def test_the_policy_may_stop_at_a_warning(tmp_path: Path) -> None:
    with pytest.raises(GuardStop, match="the policy stops at a warning: each update changes"):
        dying(tmp_path, policy=Policy(on_warning="stop"))
    lines = [json.loads(line) for line in (tmp_path / "training_log.jsonl").read_text().splitlines()]
    last = lines[-1]
    assert (last["verdict"], last["action"], last["loss"], last["grad_norm"]) == ("forecast", "stop", None, None)
    assert all(line["loss"] is not None for line in lines[:-1] if "loss" in line), "the step itself was good"
    assert "NaN" not in as_text(diagnose(tmp_path))


def test_the_policy_may_let_islands_open() -> None:
    _, guard = dying(policy=Policy(on_warning="heal"))
    assert guard._engine.healer.mode == "open"
    guard.close()


def test_an_unknown_answer_is_refused() -> None:
    with pytest.raises(UsageError, match=r"on_warning is 'panic'\. Next: use one of snapshot, heal, stop, nothing"):
        Policy(on_warning="panic")  # type: ignore[arg-type]


def test_a_number_of_the_loop_is_logged_and_forecast(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    seed_everything()
    model = small()
    guard = Guard(model, torch.optim.SGD(model.parameters(), lr=1e-4), run_dir=tmp_path)
    for step in range(60):
        guard.observe("entropy", torch.tensor(0.7 * 0.9 ** max(0, step - 30)), limit=0.005)
        guard.step(lambda: model(torch.ones(2, 4)).square().mean())
    with pytest.raises(UsageError, match=r"guard.observe\('entropy'\) got 2 values\. Next: give a single number"):
        guard.observe("entropy", torch.ones(2))
    guard.close()
    lines = [json.loads(line) for line in (tmp_path / "training_log.jsonl").read_text().splitlines()]
    logged = [line["entropy"] for line in lines if "entropy" in line]
    assert logged[35] == pytest.approx(0.7 * 0.9**5)
    assert len(logged) == 60
    assert "the entropy falls by 10% per step and reaches 0.005 in about" in caplog.text
    assert math.isfinite(guard.tally.updates)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch.func itself
@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:FutureWarning")  # torch 2.15, of its own code
def test_a_step_with_forward_mode_derivatives_is_guarded() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1))
    guard = Guard(model, torch.optim.Adam(model.parameters()))

    def loss(target: Tensor) -> Tensor:
        x = torch.ones(4, 2)
        return (torch.func.jvp(model, (x,), (x,))[1] - target).square().mean()

    targets = [torch.ones(4, 1) * (float("nan") if i == 3 else 1) for i in range(6)]
    assert [guard.step(lambda t=t: loss(t)).ok for t in targets] == [True, True, True, False, True, True]


# --- several ranks ----------------------------------------------------------------------------------------------------


def warned_on_one(rank: int, share: str, timing: str) -> dict[str, tuple[str, int, int, str, bool, list[str]]]:
    """Rank 1 alone sees its entropy fall: for each policy how the run ended, and what this rank did and said."""
    found = {}
    for how in ("snapshot", "heal", "stop"):
        seed_everything()
        model = nn.parallel.DistributedDataParallel(small())
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-4, fused=True)
        policy: Any = Policy(on_warning=how, share=share, snapshot_every=10_000)  # type: ignore[arg-type]
        guard = Guard(model, optimizer, policy=policy, timing=timing)  # type: ignore[arg-type]
        said: list[str] = []
        handler = logging.Handler()
        handler.emit = lambda record, said=said: said.append(record.getMessage())  # type: ignore[method-assign,misc]
        logging.getLogger("nanproof").addHandler(handler)
        stopped, before = "", 0
        try:
            for step in range(60):
                before = guard._context.snapshots.count if step == 30 else before
                if rank == 1:
                    guard.observe("entropy", 0.7 * 0.9 ** max(0, step - 30), limit=0.005)
                guard.step(lambda model=model: model(torch.ones(2, 4)).square().mean())
        except GuardStop as error:
            stopped = str(error)
        logging.getLogger("nanproof").removeHandler(handler)
        taken, pinned = guard._context.snapshots.count - before, guard._context.checkpoints.pin_next
        guard.close()
        early = [s for s in said if "early warning" in s]
        found[how] = stopped, guard.tally.steps, taken, guard._engine.healer.mode, pinned, early
    return found


@pytest.mark.slow
@pytest.mark.parametrize("timing", ["exact", "deferred"])
def test_ranks_answer_a_warning_of_one_of_them_together(timing: str) -> None:
    both = on_ranks(warned_on_one, "flags", timing)
    for how, first in both[0].items():
        second = both[1][how]
        assert first[1:5] == second[1:5], "the same step, the same snapshots, the same mode"
        assert len(first[5]) == 1
        assert "early warning: on rank 1: the entropy falls by 10% per step and reaches 0.005" in first[5][0]
        assert second[5] == [], "the first rank speaks for all"
        assert first[4], "the rank that saves checkpoints keeps the next one"
        assert ("on rank 1" in first[0]) == bool(second[0]) == (first[1] < 60) == (how == "stop")
        assert bool(first[2]) == (how != "stop")
        assert (first[3] == "open") == (how == "heal")


@pytest.mark.slow
def test_a_rank_that_tells_the_others_nothing_stops_and_heals_nothing_alone() -> None:
    both = on_ranks(warned_on_one, "gradients", "exact")
    for how in ("heal", "stop"):
        for rank in (0, 1):
            stopped, steps, _, mode, pinned, _ = both[rank][how]
            assert (stopped, steps) == ("", 60)
            assert mode != "open"
            assert pinned == (rank == 1)
