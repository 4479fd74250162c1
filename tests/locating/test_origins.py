"""Where a bad value comes from: masks, parameters outside the model, the optimizer, the compiler, other ranks."""

from __future__ import annotations

import copy
import math
import os
import random
import signal
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import nanproof
from nanproof import Guard, Policy
from nanproof.errors import UsageError
from nanproof.locating import CollectiveRefused, no_collectives
from nanproof.locating.incidents import find_incident, read_record
from nanproof.locating.indices import check_indices
from nanproof.locating.mode import ReplayMode
from nanproof.locating.suspect import suspect_commit
from nanproof.locating.update import Healthy, replayed_update
from support.ranks import on_ranks

PAD = torch.zeros(2, 4, dtype=torch.bool)
PAD[1] = True
FILE = Path(__file__).name


def line_of(marker: str) -> int:
    lines = Path(__file__).read_text().splitlines()
    return next(i for i, s in enumerate(lines, 1) if s.endswith(f"# {marker}"))


def minus_infinity(dtype: torch.dtype) -> Tensor:
    return torch.zeros(2, 4, dtype=dtype).masked_fill(PAD, -math.inf)


def assigned(w: Tensor, _: nn.Module) -> Tensor:
    w = w.clone()
    w[PAD[:, None].expand_as(w)] = -math.inf
    return w


MASKS: dict[str, Callable[[Tensor, Any], Tensor]] = {
    "index assignment": assigned,
    "table": lambda w, _: w + torch.tensor([0.0, -math.inf], dtype=w.dtype)[PAD.long()][:, None],
    "buffer": lambda w, m: w + m.mask[:, None].to(w.dtype),
    "attribute": lambda w, m: w + m.plain[:, None].to(w.dtype),
    "numpy": lambda w, _: w + torch.from_numpy(minus_infinity(torch.float32).numpy())[:, None].to(w.dtype),
    "log of a boolean": lambda w, _: w + (~PAD).to(w.dtype).log()[:, None],
    "literal": lambda w, _: w.masked_fill(PAD[:, None], -math.inf),
    "two lowest numbers": lambda w, _: (
        w
        + (
            torch.zeros(2, 1, 4, dtype=w.dtype).masked_fill(PAD[:, None], torch.finfo(w.dtype).min)
            + torch.zeros(2, 1, 4, dtype=w.dtype).masked_fill(PAD[:, None], torch.finfo(w.dtype).min)
        )
    ),
}


class Attention(nn.Module):
    mask: Tensor

    def __init__(self, how: Callable[[Tensor, Any], Tensor], dtype: torch.dtype) -> None:
        super().__init__()
        self.q, self.how = nn.Linear(8, 8, dtype=dtype), how
        self.register_buffer("mask", minus_infinity(torch.float32))
        self.plain = minus_infinity(torch.float32)

    def forward(self, x: Tensor) -> Tensor:
        scores = self.how(self.q(x) @ x.transpose(1, 2), self)
        return torch.softmax(scores, -1)  # masked softmax


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("how", MASKS)
def test_a_fully_masked_row_is_blamed_at_the_softmax(how: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model, x = Attention(MASKS[how], dtype), torch.randn(2, 4, 8, dtype=dtype)
    losses = [lambda m, b: m(b).float().pow(2).mean()]
    if how not in ("index assignment", "literal"):  # their gradient is cut off: hiding the NaN heals the step
        losses.append(lambda m, b: m(b).float().nan_to_num().pow(2).mean())
    for loss in losses:
        found = nanproof.locate(loss, model=model, batch=x)
        assert (found.line, found.mechanism, found.verified) == (line_of("masked softmax"), "masked-row", True), str(
            found
        )
        assert any("the mask comes from" in n for n in found.notes)


def test_a_mask_that_leaves_something_is_never_blamed() -> None:
    model, x = nn.Linear(8, 8), torch.randn(2, 4, 8)
    mask = torch.zeros(4).masked_fill(torch.tensor([False, True, True, True]), -math.inf)

    def step(m: nn.Module, b: Tensor) -> Tensor:
        p = torch.softmax(m(b) @ b.transpose(1, 2) + mask, -1)
        return torch.log(p.sum() * 0)  # not the mask

    assert nanproof.locate(step, model=model, batch=x).line == line_of("not the mask")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_an_operation_that_breaks_finite_values_beside_a_mask_is_the_origin(dtype: torch.dtype) -> None:
    model, x = nn.Linear(4, 4), torch.randn(4, 4)
    mask = torch.zeros(4, 4, dtype=dtype).fill_diagonal_(-math.inf)

    def step(m: nn.Module, b: Tensor) -> Tensor:
        scores = m(b).to(dtype) + mask
        return torch.softmax(scores / 1e-40, -1).float().pow(2).mean()  # beside a mask

    found = nanproof.locate(step, model=model, batch=x)
    assert (found.line, found.op, found.verified) == (line_of("beside a mask"), "div", True)
    assert found.mechanism == "range-overflow"
    assert not any("the mask comes from" in note for note in found.notes)


def test_minus_infinity_in_the_data_is_no_mask() -> None:
    x = torch.randn(3, 8)
    x[1, 2] = -math.inf
    found = nanproof.locate(lambda m, b: m(b["mel"]).relu().mean(), model=nn.Linear(8, 2), batch={"mel": x})
    assert (found.leaf, found.mechanism) == ("batch mel[1, 2]", "bad-leaf")


def test_an_infinity_that_is_divided_away_is_still_the_origin() -> None:
    model = nn.Linear(4, 4).half()
    with torch.no_grad():
        model.bias.fill_(300.0)

    def step(m: nn.Module, b: Tensor) -> Tensor:
        h = m(b)
        square = h.pow(2).mean(-1, keepdim=True)  # overflow
        return (1 / (h / square.sqrt()).float()).mean()  # zero

    found = nanproof.locate(step, model=model, batch=torch.randn(2, 4).half())
    assert (found.line, found.mechanism, found.verified) == (line_of("overflow"), "range-overflow", True)
    assert any(f"{FILE}:{line_of('zero')}" in n for n in found.notes)


def test_parameters_outside_the_model_are_seen_and_their_gradients_left_alone() -> None:
    model, head = nn.Linear(4, 3), nn.Parameter(torch.zeros(3))
    head.grad = torch.ones(3)
    kept = head.grad

    def step() -> Tensor:
        out = model(torch.ones(2, 4))
        return (out.detach().abs() * head.abs().sqrt()).sum() + out.sum()  # head

    found = nanproof.locate(step, model=model)
    assert (found.line, found.phase, found.op) == (line_of("head"), "backward", "sqrt")
    assert head.grad is kept
    assert torch.equal(kept, torch.ones(3))


def test_a_discriminator_keeps_gradients_and_statistics() -> None:
    model, critic = nn.Linear(4, 3), nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    before = {k: v.clone() for k, v in critic.state_dict().items()}
    found = nanproof.locate(lambda: torch.log(critic(model(torch.randn(4, 4))) * 0).sum(), model=model)
    assert found.verified
    assert all(p.grad is None for p in critic.parameters())
    assert all(torch.equal(v, before[k]) for k, v in critic.state_dict().items())


def test_counters_and_lists_of_modules_are_put_back() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.f, self.calls, self.seen, self.state = nn.Linear(2, 2), 0, [0], torch.zeros(2)

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            self.seen.append(self.calls)
            self.state.add_(1)
            self.fresh = True
            return torch.log(self.f(x) * 0) if self.calls == 1 else self.f(x)

    model = Counting()
    found = nanproof.locate(lambda m, b: m(b).sum(), model=model, batch=torch.ones(1, 2))
    assert found.verified
    assert (model.calls, model.seen, model.state.tolist()) == (0, [0], [0.0, 0.0])
    assert not hasattr(model, "fresh")


def test_a_whole_training_step_is_located_and_changes_nothing() -> None:
    model = nn.Linear(4, 2)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    weights = [p.clone() for p in model.parameters()]

    def train_step() -> float:
        optimizer.zero_grad()
        h = model(torch.ones(2, 4))
        loss = (h - h.detach()).pow(2).sum().sqrt()  # own backward
        loss.backward()
        optimizer.step()
        scheduler.step()
        return loss.item()

    found = nanproof.locate(train_step, model=model)
    assert (found.line, found.phase, found.op, found.verified) == (line_of("own backward"), "backward", "sqrt", True)
    assert "safe_sqrt" in str(found)
    assert all(torch.equal(p, w) for p, w in zip(model.parameters(), weights, strict=True))
    assert not optimizer.state
    assert optimizer.param_groups[0]["lr"] == 0.1
    assert scheduler.last_epoch == 0


def test_a_loss_of_weight_zero_is_not_blamed() -> None:
    model = nn.Linear(2, 2)

    def step() -> tuple[dict[str, Tensor], Tensor]:
        out = model(torch.ones(1, 2))
        return {"main": (out - out.detach()).sum().sqrt(), "aux": torch.log(out * 0).sum()}, out

    found = nanproof.locate(step, model=model, loss_weights={"aux": 0})
    assert (found.op, found.phase) == ("sqrt", "backward")
    assert nanproof.locate(step, model=model).component == "aux"


@pytest.mark.parametrize(
    ("step", "words"),
    [
        (lambda h: (h * 0) / (h * 0).norm(), "a vector of length zero"),
        (lambda h: (h * 0).relu() / (h * 0).relu().sum(-1, keepdim=True), "a row that sums to zero"),
        (lambda h: (h * (h > 99)).sum() / (h > 99).sum(), "the sum over nothing"),
        (lambda h: (h - h.min()) / ((h * 0).max() - (h * 0).min()) * 0, ""),
        (lambda h: (h * 0).sum(0) / torch.tensor([0, 1, 1, 1]), "the sum over nothing divided by a count of nothing"),
        (lambda h: h[:0].mean(), "nothing is left to average"),
        (lambda h: (h * (h * 0)).sum() / (h * 0).pow(2).sum(), "the squared length of a zero vector"),
        (lambda h: (h * 0) / (h * 3 - h * 3), "a difference of equal values"),
        (lambda h: (h * 0).half() / ((h * 0).half().norm() + 1e-8), "eps 1e-08 is 0 in float16"),
    ],
)
def test_kinds_of_zero_by_zero_are_told_apart(step: Any, words: str) -> None:
    model = nn.Linear(3, 4)
    found = nanproof.locate(lambda: step(model(torch.ones(2, 3))).float().sum(), model=model)
    assert words in found.why


def test_memory_that_nobody_wrote_is_named() -> None:
    model = nn.Linear(2, 2)

    def step() -> Tensor:
        out = torch.empty(4, 2)  # never filled whole
        out[:2] = model(torch.ones(2, 2))
        return out.sum()

    found = nanproof.locate(step, model=model)
    assert (found.mechanism, found.line) == ("uninitialized", line_of("never filled whole"))
    assert found.op == "empty"


def test_the_optimizer_that_wrote_a_bad_parameter_is_named() -> None:
    model = nn.Linear(2, 2).half()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    for p in model.parameters():
        p.grad = torch.full_like(p, 1e-5)
    optimizer.step()
    found = nanproof.locate(lambda: model(torch.ones(1, 2).half()).float().sum(), model=model, optimizer=optimizer)
    assert found.mechanism == "bad-leaf"
    assert "Adam wrote it: exp_avg_sq is 0 there and eps 1e-08 is 0 in float16" in found.why
    assert found.written_by == "Adam"


def guarded(tmp_path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, scale: float) -> nanproof.Incident:
    """The first incident of a guarded run whose gradients are finite."""
    torch.manual_seed(0)
    dtype = next(model.parameters()).dtype
    guard = Guard(model, optimizer, run_dir=tmp_path / "run", policy=Policy(snapshot_every=2))
    for _ in range(12):
        x = torch.randn(4, 4).to(dtype)
        verdict = guard.step(lambda x=x: model(x).float().pow(2).mean() * scale, batch=x)  # type: ignore[misc]
        if not verdict.ok:
            break
    guard.close()
    folder, _ = find_incident(tmp_path / "run")
    return read_record(folder)


def test_an_update_replayed_from_the_snapshot_proves_that_the_optimizer_is_the_writer(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).half()
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    torch.optim.lr_scheduler.StepLR(optimizer, 1)  # puts a step of its own in the place of the optimizer's
    found = guarded(tmp_path, model, optimizer, 1e-5).location
    assert found is not None
    assert (found.mechanism, found.verified) == ("bad-leaf", True)
    said = next(n for n in found.notes if "replayed from the finite snapshot of update 0" in n)
    assert "makes 4 of 4 bad parameters non-finite again" in said
    assert "eps 1e-08 is 0 in float16" in said
    assert "in float32 the same update is finite" in said
    assert "verified: the optimizer's update, replayed from finite values" in str(found)
    assert (found.replayed, found.written_by) == (True, "Adam")
    assert "change its eps, lr, weight decay or dtype" in found.advice


def test_weights_that_outgrew_their_snapshot_are_told_with_the_reason(tmp_path: Path) -> None:
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, weight_decay=1e6)
    found = guarded(tmp_path, model, optimizer, 1.0).location
    assert found is not None
    said = next(n for n in found.notes if "grew from" in n)
    assert "weight decay alone does that, lr · weight_decay = 1e+06" in said


def test_a_replayed_update_leaves_the_optimizer_alone() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    before = Healthy(
        update=1,
        values={p: torch.ones_like(p) for p in model.parameters()},
        state={p: dict(s) for p, s in optimizer.state.items()},
        gradients={p: torch.ones_like(p) for p in model.parameters()},
    )
    kept = copy.deepcopy((optimizer.state_dict(), model.state_dict()))
    with torch.no_grad():
        model.weight.fill_(math.nan)
    said, proved = replayed_update(optimizer, before, {})
    assert (proved, "is finite: it was not the optimizer alone" in said) == (False, True)
    assert all(torch.equal(a, b) for a, b in zip(tensors_of(optimizer.state_dict()), tensors_of(kept[0]), strict=True))
    assert torch.equal(model.bias, kept[1]["bias"])
    assert all(torch.equal(p.grad, torch.ones_like(p)) for p in model.parameters() if p.grad is not None)


def tensors_of(value: Any) -> list[Tensor]:
    return [t for t in tree_leaves(value) if isinstance(t, Tensor)]


def test_a_replay_with_another_loss_proves_nothing() -> None:
    model, draws = nn.Linear(2, 2), iter(range(100))

    def step() -> Tensor:
        return torch.log(model(torch.ones(1, 2)) * 0).sum() + (math.nan if next(draws) == 0 else 0.0)

    found = nanproof.locate(step, model=model, loss=1.5)
    assert found.verified is not True
    assert any("the original's was 1.5" in n for n in found.notes)


def test_what_cannot_be_reproduced_says_how_often() -> None:
    model = nn.Linear(2, 2)
    found = nanproof.locate(lambda: model(torch.ones(1, 2)).sum(), model=model, loss=math.nan)
    assert not found.reproduced
    assert any("0 of 5 replays failed" in n for n in found.notes)


@pytest.mark.slow
def test_locating_does_not_import_the_compiler() -> None:
    code = (
        "import sys, torch, nanproof; m = torch.nn.Linear(2, 2)\n"
        "f = nanproof.locate(lambda: (m(torch.ones(1, 2)) - m(torch.ones(1, 2))).pow(2).sum().sqrt(), model=m)\n"
        "assert f.verified; assert 'torch._dynamo' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=600)


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.f = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:  # compiled wrongly
        return torch.exp(self.f(x))


@pytest.mark.slow
def test_a_failure_of_compiled_code_alone_is_bisected() -> None:
    def wrong(graph: Any, _: Any) -> Any:
        """A backend with a bug: whatever holds an exp comes out as NaN."""

        def run(*inputs: Any) -> Any:
            bad = any("exp" in str(n.target) for n in graph.graph.nodes)
            return tuple(o * math.nan if bad and o.is_floating_point() else o for o in graph.forward(*inputs))

        return run

    class Stack(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(4, 4), Inner(), nn.Linear(4, 1)])

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = layer(x)
            return x

    model = torch.compile(Stack(), backend=wrong)
    x = torch.randn(3, 4)
    found = nanproof.locate(lambda: model(x).mean(), model=model)
    assert (found.mechanism, found.module, found.verified) == ("compiled-only", "layers.1", True)
    assert (Path(found.file).name, found.line) == (FILE, line_of("compiled wrongly"))
    assert "it begins in the backend" in found.why
    assert not bool(model(x).isfinite().all()), "the model is still compiled as it was"


def test_a_failure_of_one_kernel_alone_is_told() -> None:
    def broken(values: Tensor, dim: int, *, dtype: torch.dtype | None = None) -> Tensor:
        """A kernel with a bug, which the deterministic one does not have."""
        good = torch.ones(len(values), len(values)).tril() @ values
        return good if torch.are_deterministic_algorithms_enabled() else good * math.nan

    model = nn.Linear(2, 2)
    library = torch.library.Library("aten", "IMPL")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's, that a kernel is replaced
            library.impl("cumsum", broken, "CPU")
            found = nanproof.locate(lambda: model(torch.ones(3, 2)).cumsum(0).sum(), model=model)
    finally:
        library._destroy()
    assert (found.op, found.verified) == ("cumsum", True)
    assert found.why == "only one kernel fails: with torch.use_deterministic_algorithms(True) the step is finite"
    assert not torch.are_deterministic_algorithms_enabled()


def test_the_line_where_a_value_was_rounded_to_zero_is_told() -> None:
    model = nn.Linear(2, 1, bias=False)
    nn.init.constant_(model.weight, -100.0)

    def step() -> Tensor:
        chance = torch.sigmoid(model(torch.ones(3, 2)))  # rounded here
        kept = chance.squeeze(-1)
        return -torch.log(kept).mean()  # found here

    found = nanproof.locate(step, model=model)
    assert (found.mechanism, found.line) == ("underflow", line_of("found here"))
    assert f"the result of sigmoid at {found.file}:{line_of('rounded here')} is 0 by rounding" in found.why


def test_the_commit_of_a_line(tmp_path: Path) -> None:
    def git(*words: str) -> None:
        who = ("-c", "user.name=Ada", "-c", "user.email=ada@example.org")
        subprocess.run(["git", *who, *words], cwd=tmp_path, check=True, capture_output=True)

    source = tmp_path / "train.py"
    source.write_text("a = 1\nb = 2\n")
    assert suspect_commit(str(source), 2) == ""
    git("init", "-q")
    git("add", "train.py")
    git("commit", "-qm", "Use exp")
    assert suspect_commit(str(source), 2).endswith(": Use exp")
    assert " by Ada, " in suspect_commit(str(source), 2)
    source.write_text("a = 1\nb = 3\n")
    assert "not committed yet" in suspect_commit(str(source), 2)


def test_a_library_line_is_reached_from_the_users(tmp_path: Path) -> None:
    library = tmp_path / "site-packages" / "shelf"
    library.mkdir(parents=True)
    (library / "__init__.py").write_text("def loss(x):\n    return (x * 0).log().sum()\n")
    code = compile((library / "__init__.py").read_text(), str(library / "__init__.py"), "exec")
    space: dict[str, Any] = {}
    exec(code, space)
    model = nn.Linear(2, 2)
    found = nanproof.locate(lambda: space["loss"](model(torch.ones(1, 2))), model=model)  # my line
    assert (Path(found.file).name, found.line) == (FILE, line_of("my line"))
    assert found.stack == ("shelf/__init__.py:2 in loss",)
    assert "→ shelf/__init__.py:2 in loss" in str(found)


def alone(rank: int, kind: str) -> str:
    model: nn.Module = nn.Linear(2, 1)
    if kind == "ddp":
        model = nn.parallel.DistributedDataParallel(model)

    def step() -> Tensor:
        out = model(torch.ones(2, 2))
        if kind == "own reduction":
            torch.distributed.all_reduce(out.detach().clone())
        return torch.log(out * 0).sum()

    if rank == 0:  # the other rank does not replay: a collective would wait forever
        found = nanproof.locate(step, model=model)
        said = f"{found.reproduced} {found.op} {' '.join(found.notes)}"
    else:
        said = ""
    with no_collectives():
        try:
            torch.distributed.barrier()
        except CollectiveRefused as refused:
            said += f"; {refused.message}"
    torch.distributed.barrier()
    return said


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ddp", "own reduction"])
def test_one_rank_alone_never_waits_for_the_others(kind: str) -> None:
    first, second = on_ranks(alone, kind)
    if kind == "ddp":
        assert first.startswith("True log")
    else:
        assert first.startswith("False  not located on several ranks: the step communicates (all_reduce)")
    assert second == "; the step communicates (barrier), and only this rank replays it"


def _sampled(model: nn.Module, batch: Tensor) -> Tensor:
    temperature = 0.0
    probabilities = torch.softmax(model(batch) / temperature, -1)
    action = torch.multinomial(probabilities, 1)
    chosen: Tensor = model(batch).gather(1, action)
    return chosen.mean()


def test_a_step_that_a_bad_value_ends_with_an_error_is_located() -> None:
    """torch.multinomial, the checks of torch.distributions, a user's own check: there never is a loss."""
    model = nn.Linear(4, 4)
    found = nanproof.locate(_sampled, model=model, batch=torch.randn(3, 4))
    line = _sampled.__code__.co_firstlineno + 2
    assert (found.line, found.op, found.mechanism, found.verified) == (line, "div", "pole", True)
    assert found.chain[-1] == "error"
    assert any("RuntimeError: probability tensor contains" in note for note in found.notes), found.notes


def test_an_error_without_a_bad_value_stays_the_users() -> None:
    with pytest.raises(UsageError, match="cannot be multiplied"):
        nanproof.locate(lambda m, b: m(b[:, :2]).mean(), model=nn.Linear(4, 4), batch=torch.randn(3, 4))


@pytest.mark.parametrize("how", ["out=", "copy_"])
def test_what_memory_held_before_it_was_written_over_is_no_input(how: str) -> None:
    """Fresh memory holds anything, NaN too; the operation that writes there has not read it."""
    used = torch.full((3, 2), math.nan)  # as torch.empty may return it

    def step(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        with torch.no_grad():
            if how == "out=":
                torch.log(batch["count"], out=used)  # with out
            else:
                used.copy_(torch.log(batch["count"]))  # copied
        return nn.functional.mse_loss(model(batch["x"]), used)

    batch = {"x": torch.randn(3, 4), "count": torch.tensor([[1.0, 4.0], [0.0, 2.0], [3.0, 1.0]])}
    found = nanproof.locate(step, model=nn.Linear(4, 2), batch=batch)
    assert (found.op, found.phase, found.verified) == ("log", "forward", True)
    assert found.line == line_of("with out" if how == "out=" else "copied")


def test_a_step_that_ends_the_program_is_located() -> None:
    """ "Loss is nan, stopping training": sys.exit in the step ends neither the replay nor the program."""
    model = nn.Linear(2, 2)

    def step() -> Tensor:
        loss = torch.log(model(torch.ones(1, 2)) * 0).sum()  # before the exit
        if not math.isfinite(loss.item()):
            sys.exit(1)
        return loss

    found = nanproof.locate(step, model=model)
    assert (found.line, found.op, found.verified) == (line_of("before the exit"), "log", True)
    assert any("SystemExit" in note for note in found.notes)


def test_no_replay_is_begun_after_its_time() -> None:
    model, runs = nn.Linear(2, 2), []

    def step() -> Tensor:
        runs.append(1)
        return torch.log(model(torch.ones(1, 2)) * 0).sum()

    found = nanproof.locate(step, model=model, seconds=0)
    assert (found.op, found.verified, len(runs)) == ("log", None, 1)
    assert "the time for locating was used up" in found.doubt


def test_a_loss_module_outside_the_model_is_named_by_its_variable() -> None:
    class Weighted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.tensor([1.0, math.inf])

        def forward(self, out: Tensor) -> Tensor:
            return (out * self.weight).sum()

    model, criterion = nn.Linear(2, 2), Weighted()
    found = nanproof.locate(lambda: criterion(model(torch.ones(1, 2))), model=model)
    assert (found.leaf, found.module, found.verified) == ("attribute criterion.weight[1]", "criterion", True)


INDEXED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "embedding": lambda v, i: nn.functional.embedding(i, v),
    "index_select": lambda v, i: v.index_select(0, i),
    "gather": lambda v, i: v.gather(0, i[:, None]),
    "scatter": lambda v, i: v.scatter(0, i[:, None], 1.0),
    "scatter_add": lambda v, i: v.scatter_add(0, i[:, None], torch.ones(len(i), 1)),
    "index_add": lambda v, i: v.index_add(0, i, torch.ones(len(i), 2)),
    "index": lambda v, i: v[i],
    "index of a column": lambda v, i: v.T[:, i],
    "index beside a mask": lambda v, i: v[:, None][i, torch.tensor([True])],
    "index_put": lambda v, i: v.index_put((i,), torch.tensor(0.0)),
    "take": lambda v, i: v.take(i),
    "nll_loss": lambda v, i: nn.functional.nll_loss(v.T[:1].expand(len(i), -1), i, ignore_index=-1),
}


@pytest.mark.parametrize("index", [[0, 2], [2, 3], [0, -1], [-4, 0], [100, 0], [6, 1]], ids=str)
@pytest.mark.parametrize("op", INDEXED)
def test_an_index_out_of_range_raises_before_a_kernel_meets_it(op: str, index: list[int]) -> None:
    """On every device as the CPU itself does: an accelerator would abort, and every later call would fail."""
    met: list[bool] = []

    class Check(ReplayMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            try:
                check_indices(function._opname, args)
                met.append(False)
            except IndexError:
                met.append(True)
            return function(*args, **(kwargs or {}))

    values = torch.randn(3, 2)
    raised = False
    with Check():
        try:
            INDEXED[op](values, torch.tensor(index))
        except (IndexError, RuntimeError):
            raised = True
    assert any(met) == raised


def test_a_repaired_value_that_becomes_an_index_does_not_reach_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nanproof.locating.mode._recovers", lambda device: False)
    model = nn.Linear(2, 1)

    def step() -> Tensor:
        share = model(torch.ones(4, 2)).sigmoid() / torch.zeros(4, 1)  # becomes an index
        cell = (share.nan_to_num(0.0, 0.0) * 3).long().squeeze(-1)
        return (torch.ones(3)[cell] * share.squeeze(-1)).sum()

    found = nanproof.locate(step, model=model)
    assert (found.line, found.reproduced) == (line_of("becomes an index"), True)


class Cancels(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor([1e8, 1.0, -1e8]))

    def forward(self, x: Tensor) -> Tensor:
        total = torch.dot(self.w, x)  # ROUNDS
        return 1 / total


def test_an_operation_that_fails_by_rounding_before_it_is_not_verified() -> None:
    found = nanproof.locate(lambda m, b: m(b), model=Cancels(), batch=torch.ones(3))
    assert found.mechanism == "underflow"
    assert found.verified is False
    line = next(n for n, text in enumerate(Path(__file__).read_text().splitlines(), 1) if text.endswith("# ROUNDS"))
    assert found.doubt.startswith(f"rounding before it is to blame: with dot at {__file__}:{line} computed in float64")
    assert f"on the path of the bad value, but {found.doubt}" in str(found)


def test_a_replay_that_does_not_come_to_the_operation_blames_no_rounding() -> None:
    """TorchScript compiles in between: the operations of the second run are not those of the first."""

    def plain(v: Tensor) -> Tensor:
        return torch.log(v * 0)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that TorchScript is deprecated
        scripted = torch.jit.script(plain)
        found = nanproof.locate(lambda m, b: scripted(m(b)).mean(), model=nn.Linear(2, 2), batch=torch.ones(1, 2))
    assert (found.op, found.verified) == ("log", False)
    assert found.doubt == "a replay up to it does not come to it"


def test_a_proof_names_what_it_could_not_compute_in_float64() -> None:
    @torch.library.custom_op("nanproof_tests::twice", mutates_args=())
    def twice(v: Tensor) -> Tensor:
        return v * 2

    torch.library.register_autograd("nanproof_tests::twice", lambda ctx, g: g * 2)
    found = nanproof.locate(
        lambda m, b: torch.exp(twice(m(b)) * 0 + 100).sum(), model=nn.Linear(2, 2), batch=torch.ones(1, 2)
    )
    assert (found.op, found.verified) == ("exp", True)
    assert "before it, not computed in float64: twice" in found.notes


def test_a_tie_that_is_meant_to_be_exact_is_verified() -> None:
    """In float64 both sides change alike; one side alone would break the tie."""

    def step(model: nn.Module, batch: Tensor) -> Tensor:
        h = model(batch)
        return (1 / (h @ h.T - h @ h.T)).mean()

    found = nanproof.locate(step, model=nn.Linear(16, 16), batch=torch.randn(8, 16))
    assert (found.mechanism, found.verified, found.doubt) == ("pole", True, "")


class Mirrored(nn.Module):
    """Two sums with opposite errors: with both of them exact they cancel as before, with one they do not."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor([1.0] + 4096 * [2.0**-24]))

    def forward(self, x: Tensor, extra: Tensor) -> Tensor:
        above = torch.dot(self.w, x)  # ALONE
        below = torch.dot(-self.w, x)
        return 1 / (above + below) + extra.mean()


LARGE = 1_000_001
"""Elements of a step that is too large to try the operations before an origin one by one first."""


@pytest.mark.parametrize("size", [1, LARGE])
def test_an_operation_that_one_of_those_before_it_can_heal_is_not_verified(size: int) -> None:
    batch = torch.ones(4097), torch.zeros(size)
    found = nanproof.locate(lambda m, b: m(*b), model=Mirrored(), batch=batch)
    line = next(n for n, text in enumerate(Path(__file__).read_text().splitlines(), 1) if text.endswith("# ALONE"))
    assert found.verified is False
    assert found.doubt.startswith(
        f"rounding before it is to blame: with dot at {__file__}:{line} alone computed in float64"
    )


@pytest.mark.parametrize("size", [1, LARGE])
def test_an_operation_that_fails_whatever_is_rounded_before_it_is_verified(size: int) -> None:
    def step(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        h = model(batch[0]).softmax(-1)
        return torch.exp(h * 2000).mean() + batch[1].mean()

    found = nanproof.locate(step, model=nn.Linear(4, 3), batch=(torch.randn(5, 4), torch.zeros(size)))
    assert (found.op, found.verified, found.doubt) == ("exp", True, "")


@pytest.mark.parametrize("size", [1, LARGE])
def test_an_overflow_by_rounding_is_not_verified(size: int) -> None:
    """In float32 the sum is too small, so what is left over is too large."""
    weights = torch.tensor([1.0] + 4096 * [2.0**-24])
    rest, largest = 1 + float(weights.double().sum()), torch.finfo(torch.float32).max

    def step(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        total = torch.dot(batch[0], torch.ones(4097))
        return (rest - total) * largest + model(torch.ones(2)).mean() + batch[1].mean()

    found = nanproof.locate(step, model=nn.Linear(2, 2), batch=(weights, torch.zeros(size)))
    assert (found.op, found.mechanism, found.verified) == ("mul", "range-overflow", False)
    assert "with dot at" in found.doubt


def test_the_same_computation_on_two_lines_stays_a_tie() -> None:
    def step(model: nn.Module, batch: Tensor) -> Tensor:
        first = model(batch)
        second = model(batch)
        return torch.sqrt((first - second).square().sum()) + first.square().mean()

    found = nanproof.locate(step, model=nn.Linear(16, 16), batch=torch.randn(8, 16))
    assert (found.mechanism, found.op, found.verified) == ("pole", "sqrt", True)


@pytest.mark.parametrize("counts", [True, False])
def test_a_value_that_counts_is_not_called_left_out(counts: bool) -> None:
    """A gradient of 0 comes from the bottom of a square, or from a where that leaves the value out."""

    def step(model: nn.Module, batch: Tensor) -> Tensor:
        h = model(batch)
        distance = (h - h.detach()).square().sum(-1).sqrt()
        kept = distance.square() if counts else torch.where(distance > 0, distance, 0.0)
        return kept.clamp(max=5).mean() + h.square().mean()

    found = nanproof.locate(step, model=nn.Linear(3, 2), batch=torch.randn(4, 3))
    assert found.op == "sqrt"
    assert (found.mechanism == "where-gradient") is not counts
    assert ("leaves this value out" in found.why) is not counts
    if counts:
        assert found.why == "the gradient of sqrt is infinite at 0, and the gradient that comes in is 0: 0 · inf"


def test_a_variance_that_cancels_is_told_as_rounding() -> None:
    def step(model: nn.Module, batch: Tensor) -> Tensor:
        h = model(batch) * 0.01 + 1000
        return torch.sqrt(h.pow(2).mean(-1) - h.mean(-1).pow(2)).mean()

    torch.manual_seed(0)
    found = nanproof.locate(step, model=nn.Linear(16, 16), batch=torch.randn(64, 16))
    assert found.mechanism == "underflow"
    assert "the result of sub" in found.why
    assert found.why.endswith("is negative by rounding")


@pytest.mark.parametrize(
    ("step", "words"),
    [
        (lambda m, b: torch.acos(m(b) * 0 + 1).sum(), "the gradient of acos is infinite at 1 and −1"),
        (lambda m, b: torch.acos(m(b) * 0 + 1.0000001).sum(), "its largest input is 1 + 1.2e-07"),
        (lambda m, b: torch.logdet(m(b).T @ m(b) * 0), "linalg_slogdet of a singular matrix is infinite"),
    ],
)
def test_poles_are_told_where_they_are(step: Any, words: str) -> None:
    found = nanproof.locate(step, model=nn.Linear(3, 3), batch=torch.randn(2, 3))
    assert words in found.why


def test_a_product_with_a_number_leaves_nothing_out() -> None:
    """The gradient is 0 here because of the other factor: no mask is to blame."""

    def step(model: nn.Module, batch: Tensor) -> Tensor:
        h = model(batch)
        return (torch.sqrt(h - h.detach()) * 0.5).square().sum()

    found = nanproof.locate(step, model=nn.Linear(3, 3), batch=torch.randn(2, 3))
    assert found.mechanism in ("pole", "invalid")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_kernel_that_does_not_survive_float64_does_not_end_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    def step(model: nn.Module, batch: Tensor) -> Tensor:
        h = torch.sigmoid(model(batch))
        if h.dtype == torch.float64:  # as a compiled kernel does that takes its memory for float32
            os.kill(os.getpid(), signal.SIGSEGV)
        return torch.log(h * 0).mean()

    monkeypatch.setattr("nanproof.locating.apart.foreign_code", lambda: ["kernels.so"])
    found = nanproof.locate(step, model=nn.Linear(3, 3), batch=torch.randn(2, 3))
    assert (found.op, found.verified) == ("log", True)
    assert "not replayed in float64: the kernels of kernels.so do not survive it" in found.notes


def test_a_replay_in_a_child_process_gives_the_same_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    def step(model: nn.Module, batch: Tensor) -> Tensor:
        return torch.log(torch.softmax(model(batch) * 200, -1)).mean()

    torch.manual_seed(0)
    model, batch = nn.Linear(3, 3), torch.randn(2, 3)
    here = nanproof.locate(step, model=model, batch=batch)
    monkeypatch.setattr("nanproof.locating.apart.foreign_code", lambda: ["kernels.so"])
    assert str(nanproof.locate(step, model=model, batch=batch)) == str(here)
    assert here.mechanism == "underflow"


def test_memory_that_code_takes_by_its_address_is_never_float64() -> None:
    seen: list[torch.dtype] = []

    def step(model: nn.Module, batch: Tensor) -> Tensor:
        h = torch.sigmoid(model(batch))
        if h.data_ptr():
            seen.append(h.dtype)
        return torch.log(h * 0).mean()

    assert nanproof.locate(step, model=nn.Linear(3, 3), batch=torch.randn(2, 3)).verified
    assert set(seen) == {torch.float32}


def test_random_generators_of_the_step_are_put_back() -> None:
    ours, numpys, pythons = torch.Generator().manual_seed(1), np.random.default_rng(1), random.Random(1)

    def step(model: nn.Module, batch: Tensor) -> Tensor:
        kept = torch.rand(8, generator=ours) + numpys.random() + pythons.random()
        return torch.log(model(batch) * 0 + (kept > kept.mean()).float()).sum()

    before = ours.get_state(), numpys.bit_generator.state, pythons.getstate()
    assert nanproof.locate(step, model=nn.Linear(8, 8), batch=torch.randn(2, 8)).verified
    assert torch.equal(ours.get_state(), before[0])
    assert (numpys.bit_generator.state, pythons.getstate()) == before[1:]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_kernel_that_does_not_survive_a_repaired_value_does_not_end_the_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def step(model: nn.Module, batch: Tensor) -> Tensor:
        h = torch.exp(model(batch) * 0 + 100)  # too large
        if bool(h.isfinite().all()):  # as a compiled kernel does whose index was never in range
            os.kill(os.getpid(), signal.SIGSEGV)
        return h.mean()

    monkeypatch.setattr("nanproof.locating.apart.foreign_code", lambda: ["kernels.so"])
    found = nanproof.locate(step, model=nn.Linear(3, 3), batch=torch.randn(2, 3))
    assert (found.op, found.line, found.verified) == ("exp", line_of("too large"), None)
    assert found.doubt == "the kernels of kernels.so do not survive it"
