"""How runs end: stopped on purpose, observed to the bitter end, or with something that could not be guarded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from run.launch import Ran, guarded, incidents, is_finite, nanproof

ALWAYS_BAD = """
import torch
torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.Adam(model.parameters())
start = {k: v.clone() for k, v in model.state_dict().items()}
reached = 0
for i in range(40):
    optimizer.zero_grad()
    (model(torch.randn(2, 4)).sum() * (float("nan") if i >= 3 else 1.0)).backward()
    optimizer.step()
    reached = i + 1
"""


def record(ran: Ran) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((ran.run_dir / "run.json").read_text())
    return found


def test_a_run_that_cannot_be_saved_is_stopped_with_66(tmp_path: Path) -> None:
    ran = guarded(tmp_path, ALWAYS_BAD)
    assert ran.outcome.exit_code == 66
    assert ran.outcome.stopped
    assert ran.main["reached"] < 40
    assert is_finite(ran.main["model"].state_dict())
    assert record(ran)["exit_code"] == 66
    assert record(ran)["guarded"][0]["actions"]["rollback"] >= 1


def test_strict_stops_at_the_first_bad_step(tmp_path: Path) -> None:
    ran = guarded(tmp_path, ALWAYS_BAD, policy="strict")
    assert (ran.outcome.exit_code, ran.main["reached"]) == (66, 3)


def test_settings_change_the_policy(tmp_path: Path) -> None:
    ran = guarded(tmp_path, ALWAYS_BAD, policy_changes={"max_consecutive": 1, "max_rollbacks": 0})
    assert (ran.outcome.exit_code, ran.main["reached"]) == (66, 4)


def test_observing_lets_everything_happen_and_records_it(tmp_path: Path) -> None:
    ran = guarded(tmp_path, ALWAYS_BAD, policy="observe")
    assert (ran.outcome.exit_code, ran.main["reached"]) == (0, 40)
    assert not is_finite(ran.main["model"].state_dict())
    assert {i["action"]["kind"] for i in ran.incidents} == {"commit"}


def test_a_loop_that_catches_everything_does_not_go_on_unguarded(tmp_path: Path) -> None:
    source = ALWAYS_BAD.replace("    optimizer.step()\n    reached = i + 1\n", """
    try:
        optimizer.step()
        reached += 1
    except Exception as error:
        last = error
""")  # fmt: skip
    ran = guarded(tmp_path, source, policy="strict")
    assert (ran.outcome.exit_code, ran.main["reached"]) == (0, 3)
    assert type(ran.main["last"]).__name__ == "GuardStop"
    assert is_finite(ran.main["model"].state_dict())


def test_a_model_that_is_bad_already_is_refused_before_its_first_step(tmp_path: Path) -> None:
    source = """
        import torch
        model = torch.nn.Linear(4, 1)
        model.weight.data[0, 0] = float("nan")
        optimizer = torch.optim.Adam(model.parameters())
        model(torch.randn(2, 4)).sum().backward()
        optimizer.step()
    """
    assert guarded(tmp_path, source).outcome.exit_code == 2
    assert (
        guarded(tmp_path, source, name="watched", policy="observe")
        .outcome.not_guarded["Adam"]
        .startswith("NonFiniteError: cannot guard a model that is bad already: parameter weight")
    )


LEAVES = """
import os
import torch
from torch.utils.data import DataLoader, TensorDataset
if __name__ == "__main__":
    torch.manual_seed(0)
    x = torch.randn(48, 4)
    x[29, 1] = float("nan")
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.Adam(model.parameters())
    loader = DataLoader(TensorDataset(x), batch_size=8, num_workers=1, multiprocessing_context="spawn")
    for i, (batch,) in enumerate(loader):
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()
        if i == 4:
            child = os.fork()
            if child == 0:  # trains on by itself, which is none of the run's
                model(batch).sum().backward()
                optimizer.step()
                os._exit(0)
            assert os.waitpid(child, 0)[1] == 0
    print(all(bool(p.isfinite().all()) for p in model.parameters()), flush=True)
    os._exit(5)
"""


def test_workers_a_fork_and_os_exit_in_the_middle_of_a_training(tmp_path: Path) -> None:
    (tmp_path / "leaves.py").write_text(LEAVES)
    done = nanproof("run", "--run-dir", tmp_path / "run", tmp_path / "leaves.py", check=False)
    assert (done.returncode, done.stdout) == (5, "True\n"), done.stderr
    assert "6 steps, 5 updates, 1 skipped" in done.stderr
    assert "not guarded" not in done.stderr
    assert json.loads((tmp_path / "run" / "run.json").read_text())["exit_code"] == 5
    (incident,) = incidents(tmp_path / "run")
    assert incident["notes"] == ["batch 3 of its loader, samples 24–31"]


LBFGS = """
import torch
model = torch.nn.Linear(4, 1)
{more}
optimizer = torch.optim.LBFGS(model.parameters(), max_iter=2)
x = torch.randn(8, 4)
def closure():
    optimizer.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    return loss
optimizer.step(closure)
done = True
"""
ADAM_FIRST = """
adam = torch.optim.Adam(model.parameters())
model(torch.randn(2, 4)).sum().backward()
adam.step()
"""


def test_lbfgs_alone_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ran = guarded(tmp_path, LBFGS.format(more=""))
    assert ran.outcome.exit_code == 2
    assert "LBFGS only: it evaluates its closure many times" in capsys.readouterr().err
    assert "done" not in ran.main


def test_lbfgs_after_something_that_can_be_guarded_is_named(tmp_path: Path) -> None:
    ran = guarded(tmp_path, LBFGS.format(more=ADAM_FIRST))
    assert ran.outcome.exit_code == 0
    assert ran.main["done"]
    assert record(ran)["not_guarded"] == dict(ran.outcome.not_guarded)
    assert ran.outcome.not_guarded["LBFGS"].startswith("it evaluates its closure many times")


def test_what_cannot_be_hooked_is_named(tmp_path: Path) -> None:
    source = """
        import torch
        model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))
        inside = torch.optim.SGD(model[0].parameters(), lr=1e-3)
        model[0].weight.register_post_accumulate_grad_hook(lambda p: inside.step())
        outside = torch.optim.Adam(model[1].parameters(), lr=1e-3)
        for i in range(3):
            outside.param_groups[0]["lr"] = 1e-3 / (i + 1)
            model(torch.randn(2, 4)).sum().backward()
            outside.step()
            outside.zero_grad()
    """
    ran = guarded(tmp_path, source)
    assert ran.outcome.exit_code == 0
    assert ran.outcome.not_guarded == {
        "SGD": "it steps inside the backward pass, before a verdict is possible",
        "the learning rate of Adam": "the script sets it itself, so a skipped step does not hold it",
    }


def test_a_script_without_training_says_so(tmp_path: Path) -> None:
    ran = guarded(tmp_path, "import torch\n")
    assert dict(ran.outcome.not_guarded) == {"the script": "no torch optimizer was stepped in this process"}
    assert not ran.run_dir.exists()
