"""What locate promises around the location itself: it leaves no trace, and wrong use is a clear error."""

from __future__ import annotations

import json
import linecache
import math
import random
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from torch import Tensor, nn

import nanproof
from nanproof import Guard, Incident
from nanproof.cli.shell import nanproof as nanproof_group
from nanproof.errors import GuardStop, UsageError
from nanproof.guard.observers import Observer
from nanproof.locating.incidents import find_incident
from support.ranks import on_ranks
from support.runs import digest, make_batches, make_run, seed_everything

locate = nanproof.locate


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Linear(8, 8), nn.BatchNorm1d(8)

    def forward(self, x: Tensor) -> Tensor:
        h = nn.functional.dropout(self.norm(self.stem(x)), 0.3)
        return torch.log(torch.relu(h))  # the line


LINE = next(i for i, s in enumerate(Path(__file__).read_text().splitlines(), 1) if "# the line" in s)


def made() -> tuple[Net, Tensor]:
    seed_everything()
    return Net(), torch.randn(4, 8)


def test_everything_is_left_as_it_was_found() -> None:
    model, x = made()
    optimizer = torch.optim.Adam(model.parameters())
    for p in model.parameters():
        p.grad = torch.full_like(p, 0.5)
    grads = [p.grad for p in model.parameters()]
    random.random()
    before = digest(model, [optimizer])
    copies = [g.clone() for g in grads]
    location = locate(lambda m, b: m(b).mean(), model=model, batch=x)
    assert location.reproduced
    assert digest(model, [optimizer]) == before, "parameters, buffers and random states"
    assert all(p.grad is g for p, g in zip(model.parameters(), grads, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(grads, copies, strict=True))


def test_it_is_left_as_found_when_the_step_raises_too() -> None:
    model, x = made()
    before = digest(model, [])

    def step() -> Tensor:
        model.train()
        np.random.rand()
        torch.rand(3)
        raise RuntimeError("no data")

    with pytest.raises(UsageError, match=r"step_fn raised RuntimeError: no data\. Next: make the step run"):
        locate(step, model=model, batch=x)
    assert digest(model, []) == before


def test_a_location_reads_like_a_test_failure() -> None:
    model, x = made()
    text = str(locate(lambda m, b: m(b).mean(), model=model, batch=x))
    assert "pole in log (forward)" in text
    assert f"test_api.py:{LINE} in forward" in text
    assert f">    {LINE} |         return torch.log(torch.relu(h))  # the line" in text
    assert "-Inf of 32" in text
    assert "path log → " in text
    assert "verified: its inputs are good and its output is not" in text
    assert "nanproof.ops" in text


@pytest.mark.parametrize(
    ("step", "words"),
    [
        (lambda: None, "the step returned NoneType, not a loss"),
        (lambda m, b: b * 2, r"the loss has shape \(4, 8\)"),
        (lambda a, b, c: 0, r"needs arguments that locate does not have\. Next: write it as step_fn\(\) or"),
        (lambda: next(iter([])), "step_fn reads from a loader that has ended"),
    ],
)
def test_a_step_that_cannot_be_played(step: Any, words: str) -> None:
    model, x = made()
    with pytest.raises(UsageError, match=words):
        locate(step, model=model, batch=x)


def test_a_step_that_changes_the_batch_is_refused_and_the_batch_restored() -> None:
    model, x = made()
    before = x.clone()

    def step(m: nn.Module, b: dict[str, Tensor]) -> Tensor:
        b["x"].mul_(2)
        return m(b["x"]).mean()

    with pytest.raises(UsageError, match=r"step_fn changes the batch in place \(batch x\)"):
        locate(step, model=model, batch={"x": x})
    assert torch.equal(x, before)


def test_a_step_that_trains_is_refused() -> None:
    model, x = made()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step() -> Tensor:
        loss = model(x).relu().mean()
        optimizer.step()
        with torch.no_grad():
            model.stem.weight.add_(1.0)
        return loss

    with pytest.raises(UsageError, match=r"step_fn changes the parameters"):
        locate(step, model=model)


def test_the_loss_term_is_named() -> None:
    model, x = made()
    found = locate(lambda m, b: {"text": m.stem(b).mean(), "latent": m(b).mean()}, model=model, batch=x)
    assert (found.component, found.line) == ("latent", LINE)
    assert "loss term latent" in str(found)


def test_a_healthy_step_has_no_location() -> None:
    model = nn.Linear(2, 2)
    found = locate(lambda: model(torch.ones(1, 2)).mean(), model=model)
    assert not found.reproduced
    assert "did not fail when it was replayed" in str(found)


def test_kept_evidence_is_capped_and_the_line_is_still_found() -> None:
    model, x = made()
    found = locate(lambda m, b: m(b).mean(), model=model, batch=x, max_bytes=1)
    assert found.line == LINE
    assert found.inputs == ()


def test_a_guarded_run_locates_its_first_incident_by_itself(tmp_path: Path, caplog: Any) -> None:
    model, x = made()
    guard = Guard(model, torch.optim.SGD(model.parameters(), lr=0.1), run_dir=tmp_path)
    for _ in range(3):
        guard.step(lambda: model(x).mean())
    places = [
        Incident.from_json(json.loads((f / "incident.json").read_text())).location
        for f in sorted((tmp_path / "incidents").iterdir())
    ]
    assert places[0] is not None
    assert (Path(places[0].file).name, places[0].line) == ("test_api.py", LINE)
    assert places[0].verified is True
    assert places[1] == places[0]
    assert places[2] is None, "a kind that led to the same place again is not located any more"
    assert f"test_api.py:{LINE} log" in caplog.text


def test_locating_does_not_disturb_the_exactness_of_a_skip() -> None:
    def final(seconds: float | None) -> str:
        run = make_run(locate_seconds=seconds)
        for i, b in enumerate(make_batches(10)):
            factor = math.nan if i == 5 else 1.0
            run.guard.step(lambda b=b, factor=factor: run.model(b.x).square().mean() * factor)
        return run.digest()

    assert final(None) == final(60.0)


SCRIPT = """
import argparse
import torch
from torch import nn
from nanproof import Guard

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)
    def forward(self, x):
        return torch.log(nn.functional.dropout(torch.sigmoid(self.norm(self.lin(x))), 0.5))

def make_step(batch):
    argparse.ArgumentParser().parse_args()  # a script reads its own arguments, not those of nanproof
    model = Net()
    return model, lambda: model(batch["x"]).mean()

if __name__ == "__main__":
    torch.manual_seed(0)
    model = Net()
    guard = Guard(model, torch.optim.SGD(model.parameters(), lr=0.1), run_dir="run", policy="strict")
    batch = {"x": torch.randn(6, 4)}
    guard.step(lambda: model(batch["x"]).mean(), batch=batch)
"""


def cli(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """`nanproof locate` in this process: starting torch again for each call would take most of the time."""
    linecache.checkcache()
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(sys, "argv", ["nanproof", "locate", *arguments])
        done = CliRunner().invoke(nanproof_group, ["locate", *arguments])
    return subprocess.CompletedProcess(arguments, done.exit_code, done.stdout, done.stderr)


def test_an_incident_is_played_again_from_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(GuardStop):
        runpy.run_path("train.py", run_name="__main__")
    incident = "run/incidents/000001"
    stored = cli(tmp_path, incident)
    assert stored.returncode == 1
    for words in (
        "pole in log (forward)",
        "train.py:12 in forward",
        ">    12 |",
        "  in   input 0",
        "  do   no finite value",
    ):
        assert words in stored.stdout, "a stored location shows what a live one does"
    of_the_run = cli(tmp_path, "run")
    assert of_the_run.stdout.endswith(stored.stdout), "a run's folder means its first incident"
    assert "the first incident: run/incidents/000001" in of_the_run.stdout
    again = cli(tmp_path, incident, "--step", "train.py:make_step")
    assert again.returncode == 1, again.stderr
    assert "pole in log (forward)" in again.stdout
    assert "train.py:12 in forward" in again.stdout
    assert json.loads(cli(tmp_path, incident, "--step", "train.py:make_step", "--json").stdout)["line"] == 12
    wide = cli(tmp_path, incident, "--step", "train.py:make_step", "--fp64")
    assert "in float64 the step fails too: precision alone does not explain it" in wide.stdout
    assert cli(tmp_path, incident, "--step", "train.py:make_step", "--verify").returncode == 1
    script.write_text(SCRIPT.replace("torch.log(", "torch.log1p("))
    gone = cli(tmp_path, incident, "--step", "train.py:make_step", "--verify")
    assert gone.returncode == 0
    assert "the incident is gone" in gone.stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nowhere"], "nowhere is not an incident folder"),
        (["healthy"], "healthy holds no incident: nothing went wrong in that run"),
        (["nowhere", "--step", "train.py:make_step"], "there is no file 'train.py'"),
        (["nowhere", "--step", "make_step"], "names no function"),
    ],
)
def test_wrong_arguments(tmp_path: Path, arguments: list[str], words: str) -> None:
    (tmp_path / "healthy").mkdir()
    (tmp_path / "healthy" / "run.json").write_text("{}")
    done = cli(tmp_path, *arguments)
    assert done.returncode == 2
    assert words in done.stderr


def test_an_incident_of_a_rank_that_suffered_leads_to_the_culprits(tmp_path: Path) -> None:
    model, x = made()
    guard = Guard(model, torch.optim.SGD(model.parameters(), lr=0.1), run_dir=tmp_path)
    guard.step(lambda: model(x).mean())
    guard.close()
    record = json.loads((tmp_path / "incidents" / "000001" / "incident.json").read_text())
    for rank, location in ((0, None), (1, record["location"])):
        folder = tmp_path / "incidents" / f"000007-r{rank}"
        folder.mkdir()
        told = record | {"id": folder.name, "rank": rank, "world_size": 2, "location": location}
        told["verdict"] = record["verdict"] | {"rank": 1}
        (folder / "incident.json").write_text(json.dumps(told))
    folder, remark = find_incident(tmp_path / "incidents" / "000007-r0")
    assert folder.name == "000007-r1"
    assert "came from rank 1" in remark


def test_a_step_that_cannot_be_traced_is_located_by_module() -> None:
    class Shy(nn.Module):
        """Refuses to run while somebody watches its operations."""

        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            if torch._C._len_torch_dispatch_stack():
                raise RuntimeError("not under a mode")
            return torch.log(self.fc(x) * 0)

    model = nn.Sequential(nn.Linear(8, 8), Shy())
    found = locate(lambda m, b: m(b).sum(), model=model, batch=torch.randn(2, 8))
    assert (found.reproduced, found.module, found.verified) == (True, "1", None)
    assert "only modules were looked at" in str(found)


def culprit(rank: int, kind: str) -> tuple[Any, Any]:
    """Only rank 1's data breaks; both ranks replay together, and only rank 1 finds a birth of its own."""
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel as DDP

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin, self.out = nn.Linear(8, 8), nn.Linear(8, 1)

        def forward(self, x: Tensor) -> Tensor:
            h = self.lin(x)
            r = torch.sqrt((h - h.detach() + x.abs().min()).abs())  # rank 1's line
            return self.out(r).mean()

    seed_everything()
    model: nn.Module = Model()
    if kind == "ddp":
        model = DDP(model)
    else:
        fully_shard(model.lin)
        fully_shard(model.out)
        fully_shard(model)
    guard = Guard(model, torch.optim.SGD(model.parameters(), lr=0.1))
    found: list[Incident] = []

    class Heard(Observer):
        def incident(self, incident: Incident) -> None:
            found.append(incident)

    guard.subscribe(Heard())
    x = torch.zeros(2, 8) if rank == 1 else torch.ones(2, 8)
    verdict = guard.step(lambda: model(x), batch=x)
    assert not verdict.ok
    location = found[0].location
    return found[0].verdict.rank, None if location is None else location.line


@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_several_ranks_replay_together_and_the_culprit_is_named(kind: str) -> None:
    line = next(i for i, s in enumerate(Path(__file__).read_text().splitlines(), 1) if "# rank 1's line" in s)
    assert on_ranks(culprit, kind) == [(1, None), (1, line)]


def reduced(rank: int) -> list[tuple[str, str, bool]]:
    """Every rank's own values are finite, what float16 makes of their sum is not."""
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
    from torch.nn.parallel import DistributedDataParallel as DDP

    def hooked(model: nn.Module, x: Tensor) -> Tensor:
        out: Tensor = model(x)
        return (out * 5e4).sum()

    def own(model: nn.Module, x: Tensor) -> Tensor:
        out = model(x)
        total = (out.detach().mean() * 0 + 4e4).half()
        torch.distributed.all_reduce(total)  # left float16
        return out.mean() + total.float()

    answers = []
    for loss in (hooked, own):
        seed_everything()
        model: nn.Module = nn.Linear(8, 1)
        if loss is hooked:
            model = DDP(model)
            model.register_comm_hook(None, default_hooks.fp16_compress_hook)
        guard = Guard(model, torch.optim.SGD(model.parameters(), lr=0.1))
        found: list[Incident] = []

        class Heard(Observer):
            def incident(self, incident: Incident, found: list[Incident] = found) -> None:
                found.append(incident)

        guard.subscribe(Heard())
        x = torch.ones(2, 8)
        verdict = guard.step(lambda model=model, loss=loss, x=x: loss(model, x), batch=x)
        assert not verdict.ok
        location = found[0].location
        assert location is not None
        finite = all(bool(p.isfinite().all()) for p in model.parameters())
        answers.append((location.mechanism, f"{location.line} {location.why}", finite))
    return answers


def test_a_reduction_that_leaves_the_range_is_told_and_not_applied() -> None:
    """A rerun of each rank alone is finite: that is no reason to take the step."""
    lines = [i for i, s in enumerate(Path(__file__).read_text().splitlines(), 1) if s.endswith("# left float16")]
    for hooked, own in on_ranks(reduced):
        assert hooked[0] == own[0] == "communication"
        assert "the gradients of each of 2 ranks are finite, their reduction by fp16_compress_hook is not" in hooked[1]
        assert own[1].startswith(f"{lines[0]} finite on every rank before all_reduce, not after")
        assert hooked[2]
        assert own[2]


def test_sparse_gradients_and_batches_are_guarded(caplog: pytest.LogCaptureFixture) -> None:
    class Bag(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.head = nn.Embedding(5, 3, sparse=True), nn.Parameter(torch.randn(5, 3))

        def forward(self, index: Tensor, graph: Tensor) -> Tensor:
            return self.table(index).mean() + torch.sparse.mm(graph, self.head).mean()

    model, graph = Bag(), torch.eye(5).to_sparse()
    guard = Guard(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for factor in (1.0, math.nan, 1.0):
        batch = (torch.tensor([1, 2]), graph)
        verdict = guard.step(lambda batch=batch, factor=factor: model(*batch) * factor, batch=batch)
        assert verdict.ok == (factor == 1.0)
    assert "guard-failed" not in caplog.text


class Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(8, 8)
        self.mode = "good"

    def forward(self, x: Tensor) -> Tensor:
        h = self.lin(x)
        if self.mode == "forward":
            h = torch.log(h * 0)  # born in the model's forward
        if self.mode == "backward":
            h = h + torch.sqrt(h - h.detach())  # born in the model's backward
        return h


@pytest.mark.parametrize("mode", ["forward", "backward", "between"])
def test_a_loop_without_closure_is_located_too(tmp_path: Path, mode: str) -> None:
    model = Deep()
    guard = Guard(model, torch.optim.SGD(model.parameters(), lr=0.1), run_dir=tmp_path)
    x = torch.randn(2, 8)
    for model.mode in ("good", mode):
        out = model(x)
        loss = out.square().mean() if model.mode != "between" else torch.sqrt(out.mean() * 0)
        guard.backward(loss)  # the call
        guard.step()
    record = json.loads(next((tmp_path / "incidents").iterdir()).joinpath("incident.json").read_text())
    place = record["location"]
    marker = {"between": "# the call"}.get(mode, f"# born in the model's {mode}")
    lines = [i for i, s in enumerate(Path(__file__).read_text().splitlines(), 1) if marker in s and "marker" not in s]
    assert place["line"] in lines
    assert place["phase"] == ("forward" if mode == "forward" else "backward")
    if mode == "between" and hasattr(torch._C._autograd.SavedTensor, "data"):  # else what autograd saved is not shown
        assert (place["op"], place["mechanism"]) == ("sqrt", "pole")


def test_a_loss_is_located_whose_bad_term_has_no_gradient(tmp_path: Path) -> None:
    model = Deep()
    guard = Guard(model, torch.optim.SGD(model.parameters(), lr=0.1), run_dir=tmp_path)
    for x in (torch.ones(2, 8), torch.zeros(2, 8)):
        guard.backward((model(x).square() + torch.log(x)).mean())
        guard.step()
    record = json.loads(next((tmp_path / "incidents").iterdir()).joinpath("incident.json").read_text())
    place = record["location"]
    assert (place["phase"], place["mechanism"]) == ("forward", "loss-expression")
    assert "guard.backward(" in Path(__file__).read_text().splitlines()[place["line"] - 1]


def test_batch_norm_is_not_blamed_for_the_infinity_that_it_was_given() -> None:
    """It writes its running statistics in place without saying so: what they are afterwards was no input."""
    model = nn.Sequential(nn.Conv2d(1, 2, 1), nn.BatchNorm2d(2))

    def step(model: nn.Module, batch: Tensor) -> Tensor:
        return model(batch).mean()

    with torch.no_grad():
        model[0].weight.fill_(torch.finfo(torch.float32).max)
    location = locate(step, model=model, batch=torch.full((2, 1, 2, 2), 4.0))
    assert (location.op, location.mechanism) == ("convolution", "range-overflow")
