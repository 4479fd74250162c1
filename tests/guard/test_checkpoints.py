"""Checkpoints in custody."""

from __future__ import annotations

import copy
import json
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.fsdp import fully_shard

from nanproof import Guard, Policy, files
from nanproof.errors import DriftError, FormatError, NonFiniteError, UsageError
from support.forked import run_python
from support.ranks import on_ranks
from support.runs import digest, make_batches, make_run, seed_everything, with_faults

CLEAN = make_batches(30)


def poison(run: Any) -> None:
    with torch.no_grad():
        run.model.norm.running_var[1] = float("nan")


def test_save_and_resume_continue_bit_for_bit(tmp_path: Path) -> None:
    whole = make_run()
    whole.feed(CLEAN)
    first = make_run()
    first.feed(CLEAN[:15])
    first.guard.save(tmp_path / "a.pt", extra={"epoch": 3})
    second = make_run(seed=7)
    audit = second.guard.resume(tmp_path / "a.pt")
    assert audit.update == 15
    assert audit.drifts == ()
    assert "guard, optimizers and schedulers all count 15 updates" in str(audit)
    second.feed(CLEAN[15:])
    assert second.digest() == whole.digest()
    assert second.guard.tally.updates == 30


def test_a_corrupt_state_is_refused_and_named(tmp_path: Path) -> None:
    run = make_run(with_ema=False)
    run.feed(CLEAN[:4])
    run.guard.save(tmp_path / "good.pt")
    poison(run)
    with pytest.raises(
        NonFiniteError,
        match=r"refused to write .*bad\.pt: buffer norm\.running_var \[16\].*1 NaN.*last good .*good\.pt",
    ):
        run.guard.save(tmp_path / "bad.pt")
    assert not (tmp_path / "bad.pt").exists()


def test_retention_never_deletes_the_last_good_one(tmp_path: Path) -> None:
    run = make_run(keep=2, with_ema=False, policy=Policy(max_consecutive=100, rerun=False))
    for i in range(4):
        run.feed(CLEAN[i : i + 1])
        run.guard.save(tmp_path / f"{i}.pt")
    assert sorted(p.name for p in tmp_path.glob("*.pt")) == ["2.pt", "3.pt"]
    run.feed(with_faults(CLEAN[:1], {0: "nan"})[:1])
    for i in range(4, 8):  # saved right after a bad step: kept for now, but not trusted
        run.guard.save(tmp_path / f"{i}.pt")
    assert sorted(p.name for p in tmp_path.glob("*.pt")) == ["3.pt", "6.pt", "7.pt"]
    assert json.loads((tmp_path / "last_good.json").read_text())["last_good"] == "3.pt"


def test_resume_from_a_folder_takes_the_last_healthy_one(tmp_path: Path) -> None:
    run = make_run(with_ema=False)
    for i in range(3):
        run.feed(CLEAN[i * 4 : i * 4 + 4])
        run.guard.save(tmp_path / f"{i}.pt")
    state = torch.load(tmp_path / "2.pt", weights_only=True)
    state["model"]["norm.running_var"][0] = float("inf")
    torch.save(state, tmp_path / "2.pt")
    data = (tmp_path / "1.pt").read_bytes()
    (tmp_path / "1.pt").write_bytes(data[: len(data) // 2])
    fresh = make_run(with_ema=False)
    audit = fresh.guard.resume(tmp_path)
    assert audit.path.endswith("0.pt")
    assert audit.update == 4
    assert "passed over 2.pt: 2.pt is corrupt: model.norm.running_var" in str(audit)
    assert "passed over 1.pt: 1.pt cannot be read" in str(audit)


def plain_checkpoint(run: Any, path: Path) -> None:
    state = {"epoch": 3, "model_state_dict": run.model.state_dict(), "optimizer_state_dict": run.optimizer.state_dict()}
    torch.save({**state, "lr_scheduler": run.scheduler.state_dict()}, path)


def test_a_checkpoint_of_a_plain_loop_is_audited_and_resumed(tmp_path: Path) -> None:
    run = make_run(with_ema=False)
    run.feed(CLEAN[:5])
    plain_checkpoint(run, tmp_path / "plain.pt")
    fresh = make_run(with_ema=False, seed=3)
    assert fresh.guard.resume(tmp_path / "plain.pt").update == 5
    for a, b in ((run.model, fresh.model), (run.optimizer, fresh.optimizer), (run.scheduler, fresh.scheduler)):
        assert repr(a.state_dict()) == repr(b.state_dict())
    run.optimizer.param_groups[0]["lr"] = 0.5  # somebody set it by hand; the schedule does not know
    plain_checkpoint(run, tmp_path / "edited.pt")
    with pytest.raises(DriftError, match=r"learning rate in force \[0\.5\], the checkpoint's schedule says \[0\.009"):
        fresh.guard.resume(tmp_path / "edited.pt")


def test_a_drifted_schedule_is_an_error_that_says_what_would_change(tmp_path: Path) -> None:
    """The fourth system: the config says 1e-4, the checkpoint's scheduler brings 5e-4 back."""

    def make(lr: float) -> tuple[nn.Module, Any, Any, Guard]:
        seed_everything()
        model = nn.Linear(8, 4)
        optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=lr, total_steps=100)
        return model, optimizer, scheduler, Guard(model, optimizer, scheduler=scheduler)

    model, _, _, guard = make(5e-4)
    for b in CLEAN[:10]:
        guard.step(lambda b=b: nn.functional.cross_entropy(model(b.x), b.y))
    guard.save(tmp_path / "epoch_28.pt")
    _, optimizer, scheduler, guard = make(1e-4)
    before = copy.deepcopy((optimizer.state_dict(), scheduler.state_dict()))
    with pytest.raises(DriftError, match=r"epoch_28\.pt would change the configuration: .*checkpoint .*configured"):
        guard.resume(tmp_path / "epoch_28.pt")
    assert (optimizer.state_dict(), scheduler.state_dict()) == before, "nothing was loaded"
    audit = guard.resume(tmp_path / "epoch_28.pt", fresh_schedule=True)
    assert audit.drifts == ()
    assert optimizer.param_groups[0]["lr"] == before[0]["param_groups"][0]["lr"]
    assert optimizer.param_groups[0]["max_lr"] == 1e-4, "OneCycleLR keeps it in the optimizer's groups"
    assert scheduler.state_dict()["last_epoch"] == 0
    optimizer, scheduler, guard = make(1e-4)[1:]
    accepted = guard.resume(tmp_path / "epoch_28.pt", accept_drift=True)
    assert any("max_lr: checkpoint 0.0005, configured 0.0001" in d for d in accepted.drifts)
    assert not any("betas" in d for d in accepted.drifts), "momentum cycles with the schedule"
    assert optimizer.param_groups[0]["max_lr"] == 5e-4


def test_counters_that_disagree_are_a_drift(tmp_path: Path) -> None:
    run = make_run(with_ema=False)
    run.feed(CLEAN[:6])
    run.scheduler.step()  # a stray step, as a loop does that also schedules on skipped steps
    run.guard.save(tmp_path / "a.pt")
    with pytest.raises(DriftError, match=r"step counters disagree: guard at 6, scheduler 0 at 7"):
        make_run(with_ema=False).guard.resume(tmp_path / "a.pt")


def test_a_guard_may_join_a_run_that_has_begun(tmp_path: Path) -> None:
    first = make_run(with_ema=False)
    first.feed(CLEAN[:6])
    second = Guard(first.model, first.optimizer, scheduler=first.scheduler)
    assert second.tally.updates == 6
    second.save(tmp_path / "a.pt")
    assert second.resume(tmp_path / "a.pt").drifts == ()


def test_other_options_drift_too(tmp_path: Path) -> None:
    run = make_run(lambda p: torch.optim.AdamW(p, lr=1e-2, eps=1e-8), with_ema=False)
    run.feed(CLEAN[:2])
    run.guard.save(tmp_path / "a.pt")
    other = make_run(lambda p: torch.optim.AdamW(p, lr=1e-2, eps=1e-5, betas=(0.9, 0.95)), with_ema=False)
    with pytest.raises(DriftError, match=r"betas: checkpoint \[0\.9, 0\.999\], configured \[0\.9, 0\.95\] and 1 more"):
        other.guard.resume(tmp_path / "a.pt")


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda p: None, UsageError, "there is no checkpoint"),
        (lambda p: p.mkdir(), UsageError, "no healthy checkpoint in .*holds no checkpoints of this kind"),
        (lambda p: p.write_bytes(b""), FormatError, "cannot be read"),
        (lambda p: torch.save({"lr": 1.0}, p), FormatError, r"has no model state among its keys \['lr'\]"),
        (lambda p: torch.save([1], p), FormatError, "holds a list, not a dictionary"),
    ],
)
def test_what_is_no_checkpoint(tmp_path: Path, make: Any, error: type[Exception], words: str) -> None:
    path = tmp_path / "x"
    make(path)
    with pytest.raises(error, match=words):
        make_run().guard.resume(path)


class Bomb:
    def __reduce__(self) -> Any:
        return (os.mkdir, ("executed",))


def test_nothing_in_a_checkpoint_is_executed(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({"nanproof": 1, "model": Bomb()}, tmp_path / "x.pt")
    with pytest.raises(FormatError, match="cannot be read"):
        make_run().guard.resume(tmp_path / "x.pt")
    assert not (tmp_path / "executed").exists()


KILL = """
import sys; sys.path.insert(0, sys.argv[2])
from nanproof import files
from support.runs import make_batches, make_run
point, on, fault = sys.argv[3].split(":")
files.arm(point, on=int(on), fault=fault)
run = make_run(with_ema=False, keep=2)
for i, b in enumerate(make_batches(6)):
    run.feed([b])
    run.guard.save(sys.argv[1] + f"/{i}.pt")
"""


@pytest.mark.parametrize(
    "fault",
    [f"{p}:{n}:kill" for p in ("write", "fsync", "rename") for n in (3, 6)] + ["remove:1:kill", "remove:3:kill"],
)
def test_killed_at_any_point_a_healthy_checkpoint_remains(tmp_path: Path, fault: str) -> None:
    done = run_python("-c", KILL, str(tmp_path), str(Path(__file__).parent.parent), fault)
    assert done.returncode == -9, done.stdout
    for path in tmp_path.glob("*.pt"):
        torch.load(path, weights_only=True)  # whatever has its name is whole
    assert make_run(with_ema=False).guard.resume(tmp_path).update >= 1


def test_a_full_disk_is_an_error_and_the_old_checkpoint_stays(tmp_path: Path) -> None:
    run = make_run(with_ema=False)
    run.feed(CLEAN[:2])
    run.guard.save(tmp_path / "a.pt")
    old = (tmp_path / "a.pt").read_bytes()
    run.feed(CLEAN[2:4])
    files.arm("write", fault="enospc")
    try:
        with pytest.raises(OSError, match="armed at write"):
            run.guard.save(tmp_path / "a.pt")
    finally:
        files.disarm()
    assert (tmp_path / "a.pt").read_bytes() == old


def sharded(rank: int, folder: str) -> tuple[str, str, int, str]:
    """FSDP2: a folder of shards, whole or absent; a run resumed from it continues bit for bit."""

    def make() -> tuple[nn.Module, Any, Guard]:
        seed_everything()
        model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
        fully_shard(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)
        return model, optimizer, Guard(model, optimizer, scheduler=scheduler)

    def feed(model: nn.Module, guard: Guard, batches: list[Any]) -> None:
        for b in batches:
            guard.step(lambda b=b: nn.functional.cross_entropy(model(b.x), b.y))

    mine = make_batches(10, seed=rank)
    model, optimizer, guard = make()
    feed(model, guard, mine[:5])
    guard.save(Path(folder) / "step5")
    feed(model, guard, mine[5:])
    whole = digest(model, [optimizer], rng=False)
    model, optimizer, guard = make()
    audit = guard.resume(Path(folder))
    feed(model, guard, mine[5:])
    again = digest(model, [optimizer], rng=False)
    with torch.no_grad():
        if rank == 1:
            next(iter(model.parameters())).to_local()[0] = float("nan")
    try:
        guard.save(Path(folder) / "bad")
        said = "written"
    except NonFiniteError as error:
        said = str(error)
    return whole, again, audit.update, said


class Trap:
    def __reduce__(self) -> Any:
        return (os.mkdir, ("executed",))


def hostile(rank: int, folder: str) -> tuple[str, str]:
    """Resuming reads the folder's pickled index: nothing in it may run, and bad shards are refused."""
    seed_everything()
    model = nn.Linear(8, 4)
    fully_shard(model)
    guard = Guard(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    guard.step(lambda: model(torch.ones(2, 8)).sum())
    said = []
    for name in ("corrupt", "trap"):
        path = Path(folder) / name
        guard.save(path)
        if rank == 0 and name == "trap":
            index = pickle.loads((path / ".metadata").read_bytes())
            index.planner_data = {"x": Trap()}
            (path / ".metadata").write_bytes(pickle.dumps(index))
        if name == "corrupt":  # overwritten by a loop that does not look
            with torch.no_grad():
                next(iter(model.parameters())).to_local()[0] = float("nan")
            state, _ = get_state_dict(model, [guard.training.optimizers[0]])
            dcp.save({"model": state}, checkpoint_id=path)
            with torch.no_grad():
                next(iter(model.parameters())).to_local()[0] = 0.0
        dist.barrier()
        try:
            guard.resume(path)
            said.append("resumed")
        except (FormatError, NonFiniteError) as error:
            said.append(str(error))
    return said[0], said[1]


def test_hostile_and_corrupt_folders_are_refused(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "checkpoints").mkdir()
    for corrupt, trap in on_ranks(hostile, str(tmp_path / "checkpoints")):
        assert "corrupt is corrupt: " in corrupt
        assert "trap is refused: .metadata: " in trap
        assert "posix.mkdir" in trap
    assert not (tmp_path / "executed").exists()


@pytest.mark.slow
def test_a_sharded_model_is_saved_and_resumed(tmp_path: Path) -> None:
    for rank, (whole, again, update, said) in enumerate(on_ranks(sharded, str(tmp_path))):
        assert whole == again
        assert update == 5
        assert "refused to write" in said
        assert ("1 NaN" in said or "NaN of" in said) if rank == 1 else "a tensor on another rank" in said
    assert sorted(p.name for p in tmp_path.iterdir()) == ["last_good.json", "step5"]
