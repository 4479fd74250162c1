"""Rollouts: real child processes, gates judged by their logs, fall-backs, and going on after a kill."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from nanproof.errors import LockedError, UsageError
from nanproof.files import Lock
from nanproof.run.rollout import load_plan, roll_out
from nanproof.run.rollout.engine import STATE
from nanproof.run.rollout.start import first_plan
from nanproof.watch.runs import find_runs

pytestmark = pytest.mark.slow

# a training that prints its steps; its loss falls by lr, explodes when lr is too large, and notes each start
TRAIN = """
import json, os, pathlib, sys, time
options = dict(a.split("=", 1) for a in sys.argv[1:] if "=" in a)
lr, steps, pause = float(options.get("lr", 0.1)), int(options.get("steps", 30)), float(options.get("pause", 0))
with open("starts.txt", "a") as f: f.write(f"{options.get('tag', '')} {lr} {os.environ.get('NPROC', '')}\\n")
with open("pids.txt", "a") as f: f.write(f"{os.getpid()}\\n")
loss, alpha = 8.0, 0.01
log = pathlib.Path(os.environ["NANPROOF_RUN_DIR"], "training_log.jsonl").open("a")
for step in range(1, steps + 1):
    loss = loss * (1 - lr) if lr < 1 else float("nan") if step > 5 else loss * 1.5
    print(json.dumps({"step": step, "loss": loss, "grad_norm": 1.0, "alpha": alpha * step}), file=log, flush=True)
    time.sleep(pause)
sys.exit(int(options.get("code", 0)))
"""


TRAINING = """
import torch
torch.manual_seed(0)
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
for _ in range(60):
    x = torch.randn(64, 8)
    optimizer.zero_grad()
    (model(x) - x.sum(1, keepdim=True)).square().mean().backward()
    optimizer.step()
"""


def plan(folder: Path, stages: str, top: str = "") -> Path:
    (folder / "train.py").write_text(TRAIN)
    path = folder / "plan.yaml"
    path.write_text(f"{top}\nstages:\n{stages}")
    return path


def starts(folder: Path) -> list[str]:
    return [line.strip() for line in (folder / "starts.txt").read_text().splitlines()]


def test_stages_run_in_order_and_pass(tmp_path: Path) -> None:
    path = plan(
        tmp_path,
        """
  - {name: one, command: python train.py tag=one, steps: 30, env: {NPROC: 1}}
  - name: two
    command: python train.py tag=two steps={steps}
    steps: 40
    set: {lr: 0.2}
    gates: {incidents: 0, loss: falling, grad_norm: [0.5, 2], loss_below: {value: 1.0, by: 40}, watch: ["alpha<0.5"]}
""",
    )
    result = roll_out(load_plan(path))
    assert result.ok, result
    assert starts(tmp_path) == ["one 0.1 1", "two 0.2"]
    assert {g.name for g in result.stages[1].gates} >= {"loss below", "gradient norm", "alpha<0.5", "loss falling"}


@pytest.mark.parametrize(("told", "seconds", "finished"), [(" {steps}", 3, True), ("", 200, False)])
def test_a_command_that_was_told_its_steps_ends_by_itself(
    tmp_path: Path, told: str, seconds: int, finished: bool
) -> None:
    code = "for i in range(1, 4): print('step', i, 'loss', 1 / i, flush=True)"
    slow = f"{code}\nimport time; time.sleep({seconds})\nopen('last.pt', 'w').close()"
    (tmp_path / "slow.py").write_text(slow)
    path = plan(tmp_path, f"  - {{name: one, command: 'python slow.py{told}', steps: 3, gates: {{loss: null}}}}")
    result = roll_out(load_plan(path))
    assert result.ok, result
    assert (tmp_path / "last.pt").exists() == finished


@pytest.mark.parametrize(
    ("gates", "closed"),
    [
        ("{loss_below: {value: 0.001, by: 30}}", "loss below"),
        ("{grad_norm: [2, 5]}", "gradient norm"),
        ("{watch: ['alpha<0.1']}", "alpha<0.1"),
        ("{watch: ['beta<0.1']}", "beta<0.1"),
    ],
)
def test_each_gate_can_stay_closed(tmp_path: Path, gates: str, closed: str) -> None:
    path = plan(tmp_path, f"  - {{name: one, command: python train.py, steps: 30, gates: {gates}}}")
    result = roll_out(load_plan(path))
    assert [g.name for g in result.stages[0].gates if not g.open] == [closed]


@pytest.mark.parametrize(
    ("command", "closed"),
    [
        ("python train.py lr=5", {"incidents", "loss falling"}),
        ("python train.py lr=0", {"loss falling"}),
        ("python train.py code=3", {"ended"}),
        ("python train.py steps=5", {"steps"}),
        ("python -c 'print(1)'", {"log"}),
    ],
)
def test_a_sick_run_does_not_pass(tmp_path: Path, command: str, closed: set[str]) -> None:
    path = plan(tmp_path, f'  - {{name: one, command: "{command}", steps: 30}}')
    result = roll_out(load_plan(path))
    assert not result.ok
    assert {g.name for g in result.stages[0].gates if not g.open} == closed


def test_the_fall_back_is_tried_and_later_stages_wait(tmp_path: Path) -> None:
    path = plan(
        tmp_path,
        """
  - {name: one, command: python train.py tag=one, set: {lr: 5}, on_fail: {set: {lr: 0.05}, env: {NPROC: 9}, retry: 2}}
  - {name: two, command: python train.py tag=two, set: {lr: 5}, on_fail: {set: {lr: 6}, retry: 1}}
  - {name: three, command: python train.py tag=three}
""",
    )
    result = roll_out(load_plan(path))
    assert not result.ok
    assert starts(tmp_path) == ["one 5.0", "one 0.05 9", "two 5.0", "two 6.0"]
    passed = [(s.name, s.passed) for s in result.stages]
    assert passed == [("one", False), ("one", True), ("two", False), ("two", False)]


def test_a_stage_is_ended_when_its_steps_are_done(tmp_path: Path) -> None:
    stage = "  - {name: one, command: python train.py steps=100000 pause=0.02, steps: 20}"
    result = roll_out(load_plan(plan(tmp_path, stage)))
    assert result.ok, result
    lines = (Path(result.stages[0].run_dir) / "training_log.jsonl").read_text().splitlines()
    assert 20 <= len(lines) < 5000
    (run,) = find_runs([result.stages[0].run_dir])
    run.poll()
    assert (run.state().kind, run.state().why) == ("finished", "nanproof rollout ended it: its 20 steps were done")


def test_it_goes_on_after_a_kill(tmp_path: Path) -> None:
    path = plan(
        tmp_path,
        """
  - {name: one, command: python train.py tag=one}
  - {name: two, command: python train.py tag=two steps=1000 pause=0.05, steps: 60}
  - {name: three, command: python train.py tag=three}
""",
    )
    command = [sys.executable, "-m", "nanproof", "rollout", str(path), "--quiet"]
    child = subprocess.Popen(command, start_new_session=True, stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + 600
    while len(starts(tmp_path) if (tmp_path / "starts.txt").exists() else []) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    os.kill(child.pid, signal.SIGKILL)
    child.wait(timeout=600)
    training = Path("/proc", (tmp_path / "pids.txt").read_text().split()[1])
    while training.exists() and "State:\tZ" not in (training / "status").read_text():  # it ends with the rollout
        assert time.monotonic() < deadline
        time.sleep(0.05)
    result = roll_out(load_plan(path))
    assert result.ok, result
    assert [s.split()[0] for s in starts(tmp_path)] == ["one", "two", "two", "three"]


def test_a_passed_roll_out_is_not_run_again_unless_told(tmp_path: Path) -> None:
    path = plan(tmp_path, "  - {name: one, command: python train.py}")
    assert roll_out(load_plan(path)).ok
    assert roll_out(load_plan(path)).ok
    assert len(starts(tmp_path)) == 1
    assert roll_out(load_plan(path), restart=True).ok
    assert len(starts(tmp_path)) == 2
    path.write_text(path.read_text() + "\n  - {name: two, command: python train.py}\n")
    with pytest.raises(UsageError, match="plan changed"):
        roll_out(load_plan(path))
    (load_plan(path).out / STATE).write_text("{")
    with pytest.raises(Exception, match="no state of a rollout"):
        roll_out(load_plan(path))


def test_two_roll_outs_of_one_plan_refuse_each_other(tmp_path: Path) -> None:
    path = plan(tmp_path, "  - {name: one, command: python train.py}")
    loaded = load_plan(path)
    loaded.out.mkdir(parents=True)
    with Lock(loaded.out), pytest.raises(LockedError):
        roll_out(loaded)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("stages: []", "no stages"),
        ("- 1", "no mapping"),
        ("stages: [{name: a}]", "'a' has no command"),
        ("stages: [{command: x, comand: y}]", "unknown key 'comand'.*did you mean command"),
        ("stages: [{command: x, gates: {loss: rising}}]", "gate loss .* 'rising'"),
        ("stages: [{command: x, gates: {grad_norm: [5, 1]}}]", "can never open"),
        ("stages: [{command: x, steps: 10, gates: {loss_below: {value: 1, by: 50}}}]", "can never open.*ends at 10"),
        ("stages: [{command: x, gates: {watch: ['alpha?']}}]", r"watch .* 'alpha\?'"),
        ("stages: [{command: x, gates: {watch: ['alpha<0.1', 'alpha>=0.5']}}]", "alpha<0.1 and alpha>=0.5 .*never"),
        ("stages: [{command: x, steps: many}]", "steps of .* 'many'"),
        ("stages: [{command: x, steps: -1}]", "at least 1"),
        ("stages: [{command: x, on_fail: {retry: 0}}]", "retry"),
        ("stages: [{command: x, set: {a: [1]}}]", "set of"),
        ("stages: [{name: a, command: x}, {name: a, command: y}]", "same name"),
        ("overrides: loud\nstages: [{command: x}]", "overrides is 'loud'"),
        ("stages: [", "is not YAML"),
        ("\x00", "is not YAML"),
    ],
)
def test_a_wrong_plan_is_refused_before_anything_runs(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "plan.yaml"
    path.write_text(text)
    with pytest.raises(UsageError, match=words):
        load_plan(path)


def test_a_command_that_does_not_exist(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot start 'no-such-program'"):
        roll_out(load_plan(plan(tmp_path, "  - {name: one, command: no-such-program}")))


def test_a_first_plan_is_sound(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("")
    alone = first_plan(tmp_path, processes=4)
    assert "--nproc" not in alone  # a script without data parallelism would train the same model four times
    assert "sets up no data parallelism" in alone
    (tmp_path / "train.py").write_text("model = DistributedDataParallel(model)")
    text = first_plan(tmp_path, processes=4)
    (tmp_path / "plan.yaml").write_text(text)
    loaded = load_plan(tmp_path / "plan.yaml")
    assert [s.name for s in loaded.stages] == ["smoke", "1 × 1", "1 × 2", "1 × 4"]
    assert "--nproc 4" in loaded.stages[3].command
    assert "--nproc" not in loaded.stages[0].command
    (tmp_path / "train.py").write_text("dist.init_process_group('gloo')\nmodel = DistributedDataParallel(model)")
    (tmp_path / "plan.yaml").write_text(first_plan(tmp_path))
    assert all("--nproc 1 " in s.command for s in load_plan(tmp_path / "plan.yaml").stages[:2])  # needs RANK to begin
    with pytest.raises(UsageError, match="no training script"):
        first_plan(tmp_path / "nowhere")
    with pytest.raises(UsageError, match=r"nope\.py cannot be read"):
        first_plan(tmp_path, "nope.py")


ARGPARSE = "parser.add_argument(\n    '--lr',\n    type=float,\n    default=3e-3,\n)"
HYDRA = "import hydra\n@hydra.main(config_path='conf', config_name='config')\ndef main(cfg): ..."
OWN_TRAINER = {
    "engine.py": "class Trainer: ...",
    "train.py": "from engine import Trainer  # no DistributedDataParallel",
}


@pytest.mark.parametrize(
    ("files", "processes", "style", "setting"),
    [
        ({"train.py": ARGPARSE}, 1, "flags", {"lr": "0.0015"}),
        (
            {"train.py": "RATE = 1 / 64\n@click.option('--learning-rate', default=RATE)\ndef main(): ..."},
            1,
            "flags",
            {"learning-rate": "0.00781"},
        ),
        (
            {"train.py": "parser.add_argument('--lr', default=None)\nload('a.yaml')", "a.yaml": "optim: {lr: 4e-3}"},
            1,
            "flags",
            {"lr": "0.002"},
        ),
        ({"train.py": "parser.add_argument('--lr', type=float, required=True)"}, 1, "flags", None),
        (
            {"train.py": HYDRA, "conf/config.yaml": "defaults: [{optim: adam}]", "conf/optim/adam.yaml": "lr: 1e-3"},
            1,
            "dotted",
            {"optim.lr": "0.0005"},
        ),
        ({"train.py": "import hydra"}, 1, "dotted", None),
        ({"train.py": "torch.optim.SGD(model.parameters(), lr=0.1)"}, 1, "dotted", None),
        (
            {"train.py": "from transformers import HfArgumentParser, Trainer, TrainingArguments"},
            4,
            "flags",
            {"learning_rate": "2.5e-05"},
        ),
        ({"train.py": "import tyro\nclass Config:\n    lr: float = 5e-4"}, 1, "flags", {"lr": "0.00025"}),
        (OWN_TRAINER, 1, "dotted", None),
        (
            {
                "train.py": "from parts.engine import fit",
                "parts/engine.py": "from torch.nn.parallel import DistributedDataParallel as D",
            },
            4,
            "dotted",
            None,
        ),
        ({"train.py": "mp.spawn(work, nprocs=2)\ndist.init_process_group()"}, 1, "dotted", None),
        ({"train.py": "rank = int(os.environ.get('LOCAL_RANK', 0))"}, 4, "dotted", None),
        ({"train.py": "this is no Python"}, 1, "dotted", None),
    ],
)
def test_a_first_plan_holds_what_the_script_can_do(
    files: dict[str, str], processes: int, style: str, setting: dict[str, str] | None, tmp_path: Path
) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "plan.yaml").write_text(first_plan(tmp_path, processes=4))
    loaded = load_plan(tmp_path / "plan.yaml")
    assert (
        max(int(n) for s in loaded.stages for n in re.findall(r"--nproc (\d+)", f"{s.command} --nproc 1")) == processes
    )
    assert loaded.style == style
    assert (loaded.stages[-1].on_fail.set if loaded.stages[-1].on_fail else None) == setting


def test_the_verb_writes_a_first_plan_and_runs_it_under_the_guard(tmp_path: Path) -> None:
    """The whole way: --init, a real training in the first stage, the table, going on where it stopped."""
    (tmp_path / "train.py").write_text(TRAINING)
    command = [sys.executable, "-m", "nanproof", "rollout"]

    def call(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*command, *words], cwd=tmp_path, capture_output=True, text=True, timeout=600, check=False
        )

    assert call("--init", "--processes", "1").returncode == 0
    assert call("--init").returncode == 2  # never over a plan that exists
    path = tmp_path / "plan.yaml"
    path.write_text(path.read_text().replace("steps: 1000 ", "steps: 50 ").replace("steps: 100 ", "steps: 30 "))
    done = call("plan.yaml")
    assert done.returncode == 0, done.stdout + done.stderr
    assert [line.split()[-1] for line in done.stdout.splitlines() if "as planned" in line] == ["passed", "passed"]
    assert len(list((tmp_path / "runs" / "train").glob("*/training_log.jsonl"))) == 2
    again = call("plan.yaml", "--json")
    assert len(json.loads(again.stdout)["stages"]) == 2


def test_the_verb_writes_a_report_and_an_exit_code(tmp_path: Path) -> None:
    path = plan(tmp_path, "  - {name: one, command: python train.py lr=5}", top="overrides: flags")
    command = [sys.executable, "-m", "nanproof", "rollout", str(path)]
    done = subprocess.run([*command, "--json"], capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 1, done.stderr
    assert not json.loads(done.stdout)["stages"][0]["passed"]
    report = (load_plan(path).out / "rollout.md").read_text()
    assert "| one | 1 | as planned | failed |" in report
    assert "**closed**: incidents" in report
    done = subprocess.run([*command, "--check"], capture_output=True, text=True, timeout=600, check=False)
    assert (done.returncode, "1 stages: one" in done.stdout) == (0, True)
