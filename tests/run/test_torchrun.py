"""Several processes, for real: DDP and FSDP2 under torchrun, two machines on loopback, a rank that is killed."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from nanproof import scan
from nanproof.run.torchrun import launch
from run.launch import SCRIPTS, different, fork_ranks, incidents, is_finite, nanproof, run_bare, run_guarded
from support.ranks import on_ranks

pytestmark = pytest.mark.slow

ENVIRONMENT = {
    **os.environ,
    "OMP_NUM_THREADS": "1",
    # torch 2.13 shares its rendezvous store with the workers, and after a restart gloo may read old addresses there
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
}


def torchrun(*words: str | Path, **options: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, timeout=600, check=False, env=ENVIRONMENT, **options)


def states(out: Path) -> list[Any]:
    return [torch.load(f"{out}.{rank}") for rank in (0, 1)]


@pytest.fixture(scope="module")
def never_saw(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """Both ranks of the DDP script, without the bad batches."""
    out = tmp_path_factory.mktemp("ddp") / "without"
    fork_ranks(lambda: run_bare("ddp.py", "--out", str(out), "--without"))
    return states(out)


def test_ddp_bare_dies_on_every_rank(tmp_path: Path) -> None:
    fork_ranks(lambda: run_bare("ddp.py", "--out", str(tmp_path / "bare")))
    assert not any(is_finite(s["model"]) for s in states(tmp_path / "bare"))


def test_ddp_with_a_fault_on_any_rank(never_saw: list[Any], tmp_path: Path) -> None:
    done = nanproof(
        "run", "--nproc", "2", "--run-dir", tmp_path / "run", SCRIPTS / "ddp.py", "--out", tmp_path / "guarded"
    )
    assert different(states(tmp_path / "guarded"), never_saw) == []
    found = {(i["id"], i["verdict"]["level"], i["verdict"]["rank"]) for i in incidents(tmp_path / "run")}
    assert found == {("000005-r0", "input", 0), ("000008-r0", "input", 1), ("000008-r1", "input", 1)}
    assert done.stderr.count("nanproof: guarding ") == 1
    assert "12 steps, 10 updates, 2 skipped" in done.stderr
    assert "DataLoader batch 7 (dataset indices 152–159)" in done.stderr, "the samples of the culprit, rank 1"
    assert "56–63" not in done.stderr, "and not those of rank 0"
    assert f"{tmp_path / 'run' / 'incidents' / '000008-r1'}\n" in done.stderr


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated:UserWarning")  # torch 2.7, of its own code
def test_fsdp2_with_a_fault_on_any_rank(tmp_path: Path) -> None:
    script = SCRIPTS / "fsdp2.py"
    fork_ranks(lambda: run_bare("fsdp2.py", "--out", str(tmp_path / "without"), "--without"))
    done = torchrun("-m", "nanproof", "run", "--run-dir", tmp_path / "run", script, "--out", tmp_path / "guarded")
    assert done.returncode == 0, done.stderr
    assert different(states(tmp_path / "guarded"), states(tmp_path / "without")) == []
    assert {i["verdict"]["rank"] for i in incidents(tmp_path / "run")} == {0, 1}
    assert scan(tmp_path / "guarded.dcp").health == "healthy"


def test_two_machines(never_saw: list[Any], tmp_path: Path) -> None:
    """Two agents that meet at a port of this machine, one process each."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        place = f"127.0.0.1:{free.getsockname()[1]}"
    words = [
        sys.executable,
        "-m",
        "nanproof",
        "run",
        "--nproc",
        "1",
        "--nnodes",
        "2",
        "--rdzv",
        place,
        "--run-dir",
        str(tmp_path / "run"),
        str(SCRIPTS / "ddp.py"),
        "--out",
        str(tmp_path / "guarded"),
    ]
    machines = [
        subprocess.Popen(words, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    said = [m.communicate(timeout=600)[1] for m in machines]
    assert [m.returncode for m in machines] == [0, 0], said
    assert different(states(tmp_path / "guarded"), never_saw) == []
    assert sum("12 steps, 10 updates, 2 skipped" in s for s in said) == 1


def test_a_rank_that_is_killed_costs_nothing_since_the_last_checkpoint(tmp_path: Path) -> None:
    script = SCRIPTS / "resumed.py"
    fork_ranks(lambda: run_guarded("resumed.py", tmp_path / "r", "--out", str(tmp_path / "whole")))
    killed = torchrun(
        "--max-restarts=1",
        "-m",
        "nanproof",
        "run",
        "--run-dir",
        tmp_path / "run",
        script,
        "--out",
        tmp_path / "killed",
        "--kill-at",
        "12",
    )
    assert killed.returncode == 0, killed.stderr
    assert "resumed at batch 10" in killed.stdout
    assert different(torch.load(tmp_path / "killed"), torch.load(tmp_path / "whole")) == []
    assert is_finite(torch.load(tmp_path / "killed"))
    # the bad batch before the kill and the one after it, each seen by both ranks; the rank that was left may also have
    # recorded that it lost the other
    bad = [(i["step"], i["rank"]) for i in incidents(tmp_path / "run") if i["verdict"]["kind"] == "nonfinite"]
    assert sorted(bad) == [(5, 0), (5, 1), (14, 0), (14, 1)]
    record = json.loads((tmp_path / "run" / "run.json").read_text())
    assert record["guarded"][0]["updates"] == 18


@pytest.mark.parametrize(("code", "recorded", "seen"), [(1, 66, 66), (1, 1, 1), (0, 0, 0), (1, None, 1)])
def test_a_stop_on_purpose_comes_through_torchrun(code: int, recorded: int | None, seen: int, tmp_path: Path) -> None:
    """torchrun itself says 1 whatever a rank says; any rank's own record tells more, if it is of this run."""
    (tmp_path / "run.r3.json").write_text('{"exit_code": 66}')
    write = f"open('run.r1.json', 'w').write('{{\"exit_code\": {recorded}}}')" if recorded is not None else "0"
    command = [sys.executable, "-c", f"import os; os.chdir({str(tmp_path)!r}); {write}; raise SystemExit({code})"]
    assert launch(command, tmp_path) == seen


def test_processes_that_the_script_spawns_itself(tmp_path: Path) -> None:
    done = nanproof("run", "--run-dir", tmp_path / "run", SCRIPTS / "spawned.py", "--out", tmp_path / "s")
    assert all(is_finite(s) for s in states(tmp_path / "s"))
    assert {i["id"] for i in incidents(tmp_path / "run")} == {"000006-r0", "000006-r1"}
    assert "8 steps, 7 updates, 1 skipped" in done.stderr
    assert "not guarded" not in done.stderr


ALONE = """
import torch
import torch.distributed as dist
from torch import nn
rank = dist.get_rank()
torch.manual_seed(rank)
model = nn.Linear(4, 1)
optimizer = torch.optim.Adam(model.parameters())
for i in range(4 + 3 * rank):
    optimizer.zero_grad()
    (model(torch.randn(2, 4)).square().mean() * (float("nan") if i == 2 + rank else 1)).backward()
    optimizer.step()
"""


def train_alone(rank: int, folder: str) -> tuple[int, list[int], bool]:
    """Ranks with models of their own, that make different numbers of steps."""
    from run.launch import guarded

    place = Path(folder, str(rank))
    place.mkdir()
    ran = guarded(place, ALONE)
    (account,) = ran.outcome.guarded
    steps = [i["step"] for i in incidents(Path(account["folder"]))]
    return account["steps"], steps, is_finite(ran.main["model"].state_dict())


def test_ranks_that_do_not_keep_step_do_not_wait_for_each_other(tmp_path: Path) -> None:
    assert on_ranks(train_alone, str(tmp_path), timeout=600) == [(4, [3], True), (7, [4], True)]
