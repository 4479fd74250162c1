"""How runs end: stopped on purpose, observed to the bitter end, or with something that could not be guarded."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from nanproof.errors import UsageError
from nanproof.run.handover import hand_over
from run.launch import Ran, different, guarded, incidents, is_finite, nanproof, plain, run_guarded
from support.forked import run_python

pytestmark = pytest.mark.slow

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
    source = ALWAYS_BAD.replace(
        "    optimizer.step()\n    reached = i + 1\n",
        """
    try:
        optimizer.step()
        reached += 1
    except Exception as error:
        last = error
""",
    )
    ran = guarded(tmp_path, source, policy="strict")
    assert (ran.outcome.exit_code, ran.main["reached"]) == (66, 3)
    assert "last" not in ran.main, "a stop is no Exception"
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
        .startswith("NonFiniteError: cannot guard a model that already holds NaN or Inf: parameter weight")
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
    assert incident["notes"] == ["DataLoader batch 3 (dataset indices 24–31)"]


def test_a_step_inside_backward_is_held_until_the_verdict(tmp_path: Path) -> None:
    source = """
        import sys, torch
        model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))
        inside = torch.optim.SGD(model[0].parameters(), lr=1e-3)
        model[0].weight.register_post_accumulate_grad_hook(lambda p: inside.step())
        outside = torch.optim.Adam(model[1].parameters(), lr=1e-3)
        for i in range(4):
            outside.param_groups[0]["lr"] = 1e-3 / (i + 1)
            x = torch.randn(2, 4)
            x[0, 0] = float("nan") if i == 2 and sys.argv[1] == "bad" else x[0, 0]
            model(x).sum().backward()
            outside.step()
            outside.zero_grad()
            inside.zero_grad()
    """
    assert guarded(tmp_path, source, "good", name="good").outcome.not_guarded == {}
    ran = guarded(tmp_path, source, "bad")
    assert ran.outcome.exit_code == 0
    assert is_finite(ran.main["model"].state_dict())
    (account,) = ran.outcome.guarded
    assert (account["steps"], account["updates"]) == (4, 3)


def test_a_script_without_training_says_so(tmp_path: Path) -> None:
    ran = guarded(tmp_path, "import torch\n")
    assert dict(ran.outcome.not_guarded) == {"the script": "no torch optimizer was stepped"}
    found = record(ran)
    assert (found["attached"], found["reason"], found["state"]) == (False, "no torch optimizer was stepped", "finished")


BY_HAND = """
import torch
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
reached = 0
for i in range(6):
    model.zero_grad()
    model(torch.randn(8, 4)).square().mean().backward()
    with torch.no_grad():
        for p in model.parameters():
            p -= 0.1 * p.grad
    reached = i + 1
"""


def test_updates_by_hand_are_named_at_the_third_backward_pass(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    ran = guarded(tmp_path, BY_HAND)
    assert (ran.outcome.exit_code, ran.outcome.attached) == (0, False)
    assert list(ran.outcome.not_guarded) == ["the weights of Sequential"]
    assert "updated without a torch optimizer" in ran.outcome.reason
    assert caplog.text.count("NOT GUARDED: the weights of Sequential") == 1
    assert record(ran)["attached"] is False


FUNCTIONAL = """
import torch
model = torch.nn.Linear(4, 1)
weights = dict(model.named_parameters())
def loss(weights, x):
    return torch.func.functional_call(model, weights, (x,)).square().mean()
for i in range(6):
    x = torch.randn(8, 4)
    grads = torch.func.grad(loss)(weights, x)
    weights = {name: (w - 0.1 * grads[name]).detach() for name, w in weights.items()}
"""


def test_training_by_torch_func_alone_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    ran = guarded(tmp_path, FUNCTIONAL)
    assert (ran.outcome.exit_code, ran.outcome.attached) == (0, False)
    assert list(ran.outcome.not_guarded) == ["weights that torch.func differentiates"]
    assert "guard-failed" not in caplog.text


def test_inner_loops_by_torch_func_are_no_alarm(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """As in meta-learning: an optimizer steps the weights that the inner loops started from."""
    source = """
        import torch
        model = torch.nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        def loss(weights, x):
            return torch.func.functional_call(model, weights, (x,)).square().mean()
        for _ in range(2):
            inner = dict(model.named_parameters())
            for _ in range(5):
                grads = torch.func.grad(loss)(inner, torch.randn(8, 4))
                inner = {name: w - 0.1 * grads[name] for name, w in inner.items()}
            optimizer.zero_grad()
            loss(inner, torch.randn(8, 4)).backward()
            optimizer.step()
    """
    ran = guarded(tmp_path, source)
    assert (ran.outcome.attached, dict(ran.outcome.not_guarded)) == (True, {})
    assert "guard-failed" not in caplog.text


def test_the_summary_is_shown_whatever_the_script_makes_of_its_streams(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import os, sys\nsys.stdout = sys.stderr = open(os.devnull, 'w')\n" + ALWAYS_BAD)
    done = nanproof("run", "--json", "--run-dir", tmp_path / "run", tmp_path / "train.py", check=False)
    assert done.returncode == 66
    assert "skipped" in done.stderr
    assert json.loads(done.stdout)["exit_code"] == 66


SILENCERS = {
    "all levels disabled": "import logging; logging.disable(logging.CRITICAL)",
    "existing loggers disabled": "import logging.config as c; c.dictConfig({'version': 1})",
    "every logger at critical": "import logging as l; [l.getLogger(n).setLevel(50) for n in l.root.manager.loggerDict]",
}


@pytest.mark.parametrize("silencer", SILENCERS)
def test_messages_are_shown_whatever_the_script_makes_of_its_loggers(silencer: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(f"import torch\n{SILENCERS[silencer]}\n{ALWAYS_BAD}")
    done = nanproof("run", "--run-dir", tmp_path / "run", tmp_path / "train.py", check=False)
    assert "nanproof: guarding Adam " in done.stderr
    assert "nanproof: step 4: nonfinite" in done.stderr


def test_require_ends_the_script_before_it_trains_on_unguarded(tmp_path: Path) -> None:
    ran = guarded(tmp_path, BY_HAND, require=True)
    assert (ran.outcome.exit_code, ran.main["reached"]) == (2, 2)


def test_check_ends_the_script_after_its_first_guarded_step(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", "nanproof"):
        ran = guarded(tmp_path, ALWAYS_BAD, until_guarded=True)
    assert (ran.outcome.exit_code, ran.outcome.attached, ran.main["reached"]) == (0, True, 1)
    assert f"guarding Adam (2 tensors, 5 parameters) of Linear; records in {ran.run_dir}" in caplog.text


def test_gradients_for_inputs_and_accumulation_are_no_alarm(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """An attack on the input changes the input, and a long accumulation changes nothing: neither is a training."""
    source = """
        import torch
        model = torch.nn.Linear(4, 1)
        delta = torch.zeros(2, 4, requires_grad=True)
        for _ in range(5):
            model(torch.ones(2, 4) + delta).sum().backward()
            delta.data += 0.1 * delta.grad.sign()
        model.zero_grad()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(8):
            (model(torch.randn(2, 4)).square().mean() / 8).backward()
        optimizer.step()
    """
    ran = guarded(tmp_path, source)
    assert ran.outcome.attached
    assert "NOT GUARDED" not in caplog.text
    assert dict(ran.outcome.not_guarded) == {}


def test_a_bad_gradient_beside_the_optimizers_is_not_spread_by_clipping(tmp_path: Path) -> None:
    source = """
        import torch
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 1))
        optimizer = torch.optim.SGD(model[0].parameters(), lr=0.1)
        for i in range(6):
            model(torch.randn(8, 4)).square().mean().backward()
            if i == 3:
                model[1].bias.grad.fill_(float("nan"))
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            model.zero_grad()
    """
    ran = guarded(tmp_path, source)
    assert is_finite(ran.main["model"].state_dict())
    (incident,) = incidents(ran.run_dir)
    assert (incident["verdict"]["level"], incident["verdict"]["names"]) == ("gradient", ["1.bias"])


def test_an_exception_in_the_backward_pass_is_told_from_the_scripts_own_line(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        """import torch
torch.autograd.set_detect_anomaly(True)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for i in range(4):
    x = torch.randn(8, 4)
    if i == 2:
        x[0, 0] = float("nan")
    optimizer.zero_grad()
    model(x).exp().mean().sqrt().backward()
    optimizer.step()
"""
    )
    done = nanproof("run", "--run-dir", "run", "train.py", check=False, cwd=tmp_path)
    assert done.returncode == 1
    assert "cause: train.py:10 RuntimeError: Function" in done.stderr
    assert "why: 1 × exception, nonfinite input" in done.stderr


def test_two_threads_that_train_at_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """One of them is guarded, the other one is named; neither is disturbed."""
    source = """
        import threading, torch
        models, turn, failed = {}, threading.Barrier(2), []
        torch.manual_seed(0)
        for name in ("a", "b"):
            layers = torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 1)
            models[name] = torch.nn.Sequential(*layers)
        def train(name):
            try:
                optimizer = torch.optim.SGD(models[name].parameters(), lr=0.1)
                for i in range(8):
                    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(i))
                    turn.wait()
                    out = models[name](x)
                    turn.wait()  # both have an open step here
                    optimizer.zero_grad()
                    (out.square().mean() * (float("nan") if (name, i) == (BAD, 4) else 1.0)).backward()
                    optimizer.step()
            except Exception as error:
                failed.append(repr(error))
                turn.abort()
        threads = [threading.Thread(target=train, args=(name,), name=name) for name in ("a", "b")]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    """
    ran = guarded(tmp_path, source.replace("BAD", "''"))
    assert ran.main["failed"] == []
    (missed,) = ran.outcome.not_guarded
    other = missed.removeprefix("SGD in ")
    assert other in ("a", "b")
    assert "guard-failed" not in caplog.text
    alone = plain(tmp_path, source.replace("BAD", "''"))["models"]
    assert different(ran.main["models"][other].state_dict(), alone[other].state_dict()) == []
    assert ran.outcome.attached


def test_a_state_that_the_loop_carries_on_is_named(tmp_path: Path) -> None:
    source = """
        import torch
        class Recurrent(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.cell, self.out = torch.nn.GRUCell(4, 8), torch.nn.Linear(8, 1)
            def forward(self, x, h):
                h = self.cell(x, h)
                return self.out(h), h
        model = Recurrent()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        h = torch.zeros(2, 8)
        for i in range(5):
            x = torch.full((2, 4), float("nan") if i == 3 else 1.0)
            out, h = model(x, h)
            h = h.detach()
            optimizer.zero_grad()
            out.square().mean().backward()
            optimizer.step()
    """
    first, second = incidents(guarded(tmp_path, source).run_dir)
    assert "carries it on" not in first["location"]["why"]
    assert second["location"]["leaf"].startswith("batch 1")
    assert "the model itself has returned it before, and the loop carries it on" in second["location"]["why"]


DIES = """
import torch
from torch.utils.data import DataLoader, TensorDataset
torch.manual_seed(0)
x = torch.randn(48, 4)
x[29, 1] = {bad}
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 4)
    def forward(self, x):
        h = self.layer(x)
        if "{how}" == "cholesky":
            return torch.linalg.cholesky(h.T @ h + torch.eye(4))
        if "{how}" == "eigh":
            return torch.linalg.eigh(h.T @ h)[0]
        return h.sigmoid()
net = Net()
optimizer = torch.optim.Adam(net.parameters())
for (batch,) in DataLoader(TensorDataset(x), batch_size=8):
    optimizer.zero_grad()
    out = net(batch)
    if "{how}" == "bce":
        loss = torch.nn.functional.binary_cross_entropy(out, torch.ones_like(out))
    elif "{how}" == "ctc":
        loss = torch.nn.functional.ctc_loss(out.log_softmax(-1)[:, None], torch.tensor([[1, 2]]), (8,), (2,))
    else:
        loss = out.mean()
    if "{how}" == "key":
        {{}}["missing"]
    if "{how}" == "exit" and not torch.isfinite(loss):
        sys.exit("loss is nan")
    if not torch.isfinite(loss):
        raise FloatingPointError("loss is nan")
    loss.backward()
    optimizer.step()
"""


@pytest.mark.parametrize("how", ["bce", "exit", "raise", "cholesky", "eigh", "ctc"])
def test_a_death_by_exception_is_an_incident(how: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ran = guarded(tmp_path, DIES.format(how=how, bad='float("nan")'))
    assert ran.outcome.exit_code == 1
    (incident,) = ran.incidents
    assert incident["step"] == 4
    assert incident["verdict"]["kind"] == "exception"
    assert "DataLoader batch 3 (dataset indices 24–31)" in incident["notes"]
    assert "batch" in incident["bundle"]
    assert incident["location"]["file"] == str(tmp_path / "script.py")
    traceback = [*incident["location"]["stack"], *incident["location"]["notes"]]
    assert any("script.py" in line and "<module>" in line for line in traceback)
    told = "\n".join(hand_over(ran.outcome))
    assert "the script failed (exit code 1) after 3 steps, 3 updates, 1 ended by an exception" in told
    assert "nothing went wrong" not in told
    assert "left out" not in told
    assert f"next: nanproof diagnose {ran.run_dir}" in told
    shown = capsys.readouterr().err
    assert "src/nanproof" not in shown.partition("Traceback")[2].partition("nanproof:")[0]


def test_a_factorization_that_fails_inside_the_model_is_located_though_nothing_is_known_to_be_bad(
    tmp_path: Path,
) -> None:
    """A matrix of finite values may be indefinite; and what is not finite may be a value that no variable holds."""
    source = DIES.format(how="cholesky", bad="1.0").replace("+ torch.eye(4)", "- 1e4 * (x[0, 0] > 2) * torch.eye(4)")
    ran = guarded(tmp_path, source.replace("x[29, 1]", "x[24, 0] = 3.0; x[29, 1]"))
    (incident,) = ran.incidents
    assert incident["location"]["op"] == "_LinAlgError"
    assert (
        "torch.linalg.cholesky" in (tmp_path / "script.py").read_text().splitlines()[incident["location"]["line"] - 1]
    )
    assert incident["notes"] == ["DataLoader batch 3 (dataset indices 24–31)"]


def test_an_exception_that_has_nothing_to_do_with_it_is_none(tmp_path: Path) -> None:
    ran = guarded(tmp_path, DIES.format(how="key", bad=1.0))
    assert (ran.outcome.exit_code, ran.incidents) == (1, [])
    last = json.loads((ran.run_dir / "training_log.jsonl").read_text().splitlines()[-1])
    assert last["event"] == "exception"
    assert last["message"].startswith("KeyError: ")
    assert last["where"].rpartition(":")[2].isdecimal()


def test_a_run_folder_that_cannot_be_written_is_an_error_before_anything_runs(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "s.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    with pytest.raises(UsageError, match="cannot be written"):
        run_guarded(str(tmp_path / "s.py"), tmp_path / "file" / "run")
    assert not (tmp_path / "ran").exists()


FORKS = """
import os, sys
import torch
torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.Adam(model.parameters())
def train(bad):
    for i in range(4):
        optimizer.zero_grad()
        (model(torch.randn(2, 4)).square().mean() * (float("nan") if i == bad else 1)).backward()
        optimizer.step()
train(1)
child = os.fork()
if child == 0:
    train(2)
    os._exit(3 if all(bool(p.isfinite().all()) for p in model.parameters()) else 4)
code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
train(0)
sys.exit(code)
"""


def test_a_forked_process_that_trains_keeps_records_of_its_own(tmp_path: Path) -> None:
    """In a process of its own: one that runs tests has threads, and a fork of it may wait for their locks."""
    (tmp_path / "script.py").write_text(FORKS)
    done = nanproof("run", "--run-dir", "run", "script.py", check=False, fresh=False, cwd=tmp_path)
    assert done.returncode == 3, done.stderr
    outcome = json.loads((tmp_path / "run" / "run.json").read_text())
    (account,) = outcome["guarded"]
    assert (account["steps"], account["actions"]["skip"]) == (8, 2)
    (process,) = outcome["processes"]
    assert process["guarded"][0]["actions"]["skip"] == 1
    assert (tmp_path / process["guarded"][0]["folder"]).parent.samefile(tmp_path / "run")


def test_what_the_script_lets_go_is_freed(tmp_path: Path) -> None:
    source = """
        import gc, weakref
        import torch
        gone = []
        model = torch.nn.Linear(4, 1)
        for _ in range(3):
            optimizer = torch.optim.Adam(model.parameters())
            gone.append(weakref.ref(optimizer))
            for _ in range(2):
                optimizer.zero_grad()
                model(torch.randn(2, 4)).square().mean().backward()
                optimizer.step()
        held = [r() is not None for r in gone]
        gone.append(weakref.ref(model))
        del model, optimizer
        gc.collect()
        left = [r() is not None for r in gone]
    """
    ran = guarded(tmp_path, source)
    assert ran.main["held"] == [False, False, True]
    assert ran.main["left"] == [False] * 4
    (account,) = ran.outcome.guarded
    assert (account["steps"], account["updates"]) == (6, 6)
    assert [line["update"] for line in ran.log] == [1, 2, 3, 4, 5, 6]


WORKER = """
import sys

import torch
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for i in range(3):
    optimizer.zero_grad()
    (model(torch.ones(2, 4)).square().mean() * (float("nan") if i == 1 else 1)).backward()
    optimizer.step()
assert "nanproof/run/startup" not in "".join(sys.path)
sys.exit(5 if bool(model.weight.isfinite().all()) else 4)
"""


def test_a_process_that_is_started_as_a_command_joins_the_run(tmp_path: Path) -> None:
    (tmp_path / "worker.py").write_text(WORKER)
    source = f"""
        import subprocess, sys
        code = subprocess.run([sys.executable, {str(tmp_path / "worker.py")!r}], check=False).returncode
    """
    before = dict(os.environ)
    ran = guarded(tmp_path, source)
    assert dict(os.environ) == before
    assert (ran.main["code"], ran.outcome.attached) == (5, True)
    (process,) = ran.outcome.processes
    assert (process["attached"], process["exit_code"], process["state"]) == (True, None, "ended")
    assert process["guarded"][0]["actions"]["skip"] == 1
    assert Path(process["guarded"][0]["folder"]).parent.samefile(ran.run_dir)


def test_a_process_that_is_killed_was_guarded_all_the_same(tmp_path: Path) -> None:
    """As Ray ends its actors: nothing of the process itself can be said, but its records are there."""
    worker = WORKER.partition("assert")[0] + "import os, signal\nos.kill(os.getpid(), signal.SIGKILL)\n"
    (tmp_path / "worker.py").write_text(worker)
    source = f"""
        import subprocess, sys
        code = subprocess.run([sys.executable, {str(tmp_path / "worker.py")!r}], check=False).returncode
    """
    ran = guarded(tmp_path, source)
    assert (ran.main["code"], ran.outcome.attached, ran.outcome.not_guarded) == (-9, True, {})
    (process,) = ran.outcome.processes
    assert process["attached"]
    folder = Path(process["guarded"][0]["folder"])
    assert len(incidents(folder)) == 1
    said = hand_over(ran.outcome)
    assert said[0] == f"nanproof: 1 started process was guarded; records in {folder}"
    assert said[-1] == f"  next: nanproof diagnose {folder}"


TERMINATED = """
import os, signal
import torch
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for i in range(6):
    optimizer.zero_grad()
    (model(torch.ones(2, 4)).square().mean() * (float("nan") if i == 1 else 1)).backward()
    optimizer.step()
child = os.fork()
if child == 0:
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
os.kill(os.getpid(), signal.SIGTERM)
"""


def test_sigterm_ends_it_at_once_and_its_records_are_complete(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(TERMINATED)
    done = nanproof("run", "--run-dir", tmp_path / "run", tmp_path / "script.py", check=False, fresh=False)
    assert done.returncode == -signal.SIGTERM, done.stderr
    assert "terminated (SIGTERM) after 6 steps, 5 updates, 1 skipped" in done.stderr
    assert done.stderr.endswith(f"  next: nanproof diagnose {tmp_path / 'run'}\n")
    assert "Traceback" not in done.stderr
    record = json.loads((tmp_path / "run" / "run.json").read_text())
    assert (record["state"], record["exit_code"]) == ("terminated", 143)
    assert len((tmp_path / "run" / "training_log.jsonl").read_text().splitlines()) >= 6


BLOCKED = """
import os, signal, time
from pathlib import Path
import torch
import torch.distributed as dist
rank = int(os.environ["RANK"])
dist.init_process_group("gloo", init_method=f"file://{os.getcwd()}/meet", rank=rank, world_size=2)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for i in range(3):
    optimizer.zero_grad()
    model(torch.ones(2, 4)).square().mean().backward()
    optimizer.step()
if rank == 0:
    Path("pid.part").write_text(str(os.getpid()))
    os.rename("pid.part", "pid")
    dist.barrier()  # until the other rank comes, which it never does
while not os.path.exists("pid"):
    time.sleep(0.05)
time.sleep(0.5)
os.kill(int(Path("pid").read_text()), signal.SIGTERM)
"""


def test_sigterm_ends_a_rank_that_waits_for_another(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(BLOCKED)

    def start(rank: int) -> subprocess.CompletedProcess[str]:
        place = {**os.environ, "RANK": str(rank), "WORLD_SIZE": "2"}
        words = ["-m", "nanproof", "run", "--run-dir", "run", "script.py"]
        return run_python(*words, cwd=tmp_path, environment=place)

    with ThreadPoolExecutor(2) as pool:
        blocked, _ = pool.map(start, (0, 1))
    assert blocked.returncode == -signal.SIGTERM, blocked.stdout
    assert "nanproof: terminated (SIGTERM) after 3 steps, 3 updates; records in run\n" in blocked.stdout
    record = json.loads((tmp_path / "run" / "run.json").read_text())
    assert (record["state"], record["exit_code"]) == ("terminated", 143)


def test_a_script_that_handles_sigterm_keeps_its_handler(tmp_path: Path) -> None:
    source = """
        import os, signal
        seen = []
        before = signal.signal(signal.SIGTERM, lambda *_: seen.append(1))
        os.kill(os.getpid(), signal.SIGTERM)
    """
    before = signal.getsignal(signal.SIGTERM)
    try:
        assert guarded(tmp_path, source).main["seen"] == [1]
    finally:
        signal.signal(signal.SIGTERM, before)


def test_the_log_of_an_earlier_run_is_kept(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    dead, other = '{"step": 1, "loss": 2.0}\n{"step": 2, "loss": NaN}\n' * 20, "no log\n"
    for name, text in (("train.jsonl", dead), ("notes.txt", other)):
        (tmp_path / name).write_text(text)
        os.utime(tmp_path / name, (1e9, 1e9))
    torch.save({}, tmp_path / "last.pt")
    os.utime(tmp_path / "last.pt", (1e9, 1e9))
    source = f"""
        import torch
        for name in ("train.jsonl", "notes.txt"):
            open({str(tmp_path)!r} + "/" + name, "w").close()
        for _ in range(2):
            torch.save({{}}, {str(tmp_path / "last.pt")!r})
    """
    ran = guarded(tmp_path, source)
    (copy,) = (ran.run_dir / "overwritten").iterdir()
    assert copy.read_text() == dead
    assert f"overwrites {tmp_path / 'train.jsonl'}, a log of an earlier run; a copy is in {copy}" in caplog.text
    assert caplog.text.count("last.pt, which an earlier run has saved") == 1
    assert "notes.txt" not in caplog.text


def test_a_run_that_breaks_off_at_a_bad_batch_is_not_called_good(tmp_path: Path) -> None:
    source = DIES.format(how="break", bad='float("nan")').replace('raise FloatingPointError("loss is nan")', "break")
    ran = guarded(tmp_path, source)
    assert ran.outcome.exit_code == 0
    assert "1 not finite and left out by the script" in ran.outcome.guarded[0]["summary"]
