"""Ray Train: two guarded workers, the save of a bad state, a worker that dies; `make engines` runs this."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

ray = pytest.importorskip("ray", reason="make engines runs this in an environment that has Ray")

from nanproof.integrations.ray import GuardCallback, guard_loop  # noqa: E402

STEPS, BAD, POISONED, DIES = 12, 5, 8, 10

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # those of the library itself


def train(config: dict[str, Any]) -> None:
    """Saves and reports every second step; with ``faults``, one bad batch, one bad state, one death."""
    import os
    import tempfile

    import ray.train
    from ray.train.torch import prepare_model
    from torch.nn.functional import mse_loss

    rank, folder, faults = ray.train.get_context().get_world_rank(), Path(config["folder"]), config["faults"]
    torch.manual_seed(0)
    model = prepare_model(torch.nn.Linear(4, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    first, found = 0, ray.train.get_checkpoint()
    if found is not None:
        with found.as_directory() as kept:
            state = torch.load(Path(kept) / "state.pt")
        model.module.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first = state["step"] + 1
        (folder / f"resumed-{rank}-{first}").touch()
    for step in range(first, STEPS):
        x = torch.randn(2, 4, generator=torch.Generator().manual_seed(10 * step + rank))
        if step == BAD:
            if not faults:
                continue
            x[0, 0] = float("nan") if rank == 1 else x[0, 0]
        optimizer.zero_grad()
        mse_loss(model(x), x.sum(1, keepdim=True)).backward()
        optimizer.step()
        if step == DIES and faults and rank == 1 and found is None:
            os._exit(3)
        if step % 2 == 0:
            state = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
            if faults and step == POISONED and found is None:  # what is saved is bad, what is trained is not
                state["model"] = {k: v * float("nan") for k, v in state["model"].items()}
            with tempfile.TemporaryDirectory() as made:
                if rank == 0:
                    torch.save(state, Path(made) / "state.pt")
                checkpoint = ray.train.Checkpoint.from_directory(made) if rank == 0 else None
                ray.train.report({"step": step}, checkpoint=checkpoint)
    torch.save(model.module.state_dict(), folder / f"end-{rank}.pt")


def fit(loop: Any, folder: Path, *, faults: bool, callbacks: list[Any]) -> Any:
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    folder.mkdir()
    return TorchTrainer(
        loop,
        train_loop_config={"folder": str(folder), "faults": faults},
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(
            storage_path=str(folder / "ray"), callbacks=callbacks, failure_config=FailureConfig(max_failures=1)
        ),
    ).fit()


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Any:
    ray.init(num_cpus=2, include_dashboard=False)
    yield
    ray.shutdown()


def test_a_dead_worker_restarts_from_the_last_healthy_checkpoint(tmp_path: Path) -> None:
    run = tmp_path / "run"
    fit(train, tmp_path / "plain", faults=False, callbacks=[])
    fit(guard_loop(train, run_dir=run), tmp_path / "guarded", faults=True, callbacks=[GuardCallback(run)])
    resumed = sorted(p.name for p in (tmp_path / "guarded").glob("resumed-*"))
    assert resumed == [f"resumed-{rank}-{POISONED - 1}" for rank in (0, 1)]  # not from the bad save after it
    for rank in (0, 1):
        wanted, got = (torch.load(tmp_path / kind / f"end-{rank}.pt") for kind in ("plain", "guarded"))
        assert all(torch.equal(wanted[k], got[k]) for k in wanted)
    incidents = GuardCallback(run).gather()
    assert {i["rank"] for i in incidents} == {0, 1}
    assert {(i["verdict"]["kind"], i["verdict"]["rank"]) for i in incidents} == {("nonfinite", 1)}
