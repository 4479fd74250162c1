"""Diagnosing runs by their files: each run is read as it lies there, and its true cause is named."""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from diagnosing import runs
from nanproof import Guard
from nanproof.diagnosing import Diagnosis, diagnose
from nanproof.diagnosing.diagnosis import Suspect
from nanproof.diagnosing.run import read_run
from nanproof.errors import GuardStop, UsageError
from run.launch import nanproof


def evidence(diagnosis: Diagnosis) -> str:
    return "\n".join(diagnosis.causes[0].evidence)


def marks(diagnosis: Diagnosis) -> dict[str, str]:
    return {x.what: x.mark for x in diagnosis.checklist}


def test_the_scheduler_of_the_checkpoint_overrode_the_rate(tmp_path: Path) -> None:
    runs.scheduler_run(tmp_path)
    found = diagnose(tmp_path)
    assert (found.causes[0].name, found.decided) == ("scheduler-state-on-resume", True)
    assert "train.log: lr 4.92e-04 from step 201 on; config: 1e-4 (configs/config.py:31)" in evidence(found)
    assert "checkpoint ckpt/epoch_28.pth: scheduler.base_lrs = 2e-05, max_lr = 0.0005" in evidence(found)
    assert any(c.startswith("nanproof scan ") and c.endswith("epoch_28.pth") for c in found.causes[0].commands)
    assert any("resumed" in m.what for m in found.timeline)
    assert any(m.when == "step 280" and "NaN" in m.what for m in found.timeline)
    assert marks(found)["log"] == "!"
    assert marks(found)["checkpoint"] == "✓"


def test_a_rate_that_only_decayed_is_no_override(tmp_path: Path) -> None:
    runs.save(tmp_path / "ckpt" / "epoch_28.pth", lr=5e-4)
    runs.loop_log(tmp_path / "train.log", steps=300, broke=250, lr=2e-4, grow=True)
    (tmp_path / "config.yaml").write_text("lr: 5.0e-4\nepochs: 3\n")
    found = diagnose(tmp_path)
    assert found.causes[0].name != "scheduler-state-on-resume"
    assert "lr" not in " ".join(x.found for x in found.checklist if x.mark == "✗")


def test_a_rate_above_the_config_without_a_resume_is_a_matter_of_the_rate(tmp_path: Path) -> None:
    runs.loop_log(tmp_path / "train.log", steps=300, broke=250, lr=8e-4, grow=True)
    (tmp_path / "config.yaml").write_text("lr: 1.0e-4\nepochs: 3\n")
    found = diagnose(tmp_path)
    assert found.causes[0].name == "lr-too-high"
    assert "train.log: lr 8.00e-04 from step 1 on; config: 1.0e-4 (config.yaml:1)" in evidence(found)


@pytest.mark.parametrize("make", [runs.scheduler_run, runs.double_fp16_run, runs.autocast_run])
def test_files_named_one_by_one_say_what_their_folder_says(tmp_path: Path, make: Callable[[Path], None]) -> None:
    """A log, a config or code that is named is not taken for a checkpoint that cannot be read."""
    make(tmp_path)
    whole, files = diagnose(tmp_path), sorted(p for p in tmp_path.rglob("*") if p.is_file())
    named = diagnose(files)
    assert [c.name for c in named.causes] == [c.name for c in whole.causes]
    assert marks(named) == marks(whole)


def test_a_checkpoint_without_an_ending_is_known_by_its_first_bytes(tmp_path: Path) -> None:
    runs.save(tmp_path / "last", bad="parameter")
    (tmp_path / "notes").write_text("loss was fine yesterday\n")
    found = diagnose([tmp_path / "last", tmp_path / "notes"])
    assert next(x.found for x in found.checklist if x.what == "checkpoint").startswith("last: corrupt")
    assert not any("notes" in x.found for x in found.checklist)


@pytest.mark.parametrize(("growth", "amplifies"), [(3.0, True), (1.05, False)])
def test_logged_activations_that_grow_by_orders_of_magnitude(tmp_path: Path, growth: float, amplifies: bool) -> None:
    """Normalized models hide it from loss and gradient norm, which keep their level up to the break."""
    lines = [
        {"step": i, "loss": 1.38 + i % 3 / 100, "grad_norm": 0.9 + i % 5 / 20, "activation_max": 10 * growth**i}
        for i in range(1, 30)
    ]
    lines += [{"step": i, "loss": "NaN", "grad_norm": "NaN", "activation_max": "NaN"} for i in range(30, 36)]
    (tmp_path / "training_log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = diagnose(tmp_path)
    assert (bool(found.causes) and found.causes[0].name == "arch-instability") is amplifies
    if amplifies:
        assert "activation_max grew from 30 to about" in evidence(found)


def test_weights_loaded_in_fp16_under_fp16(tmp_path: Path) -> None:
    runs.double_fp16_run(tmp_path)
    found = diagnose(tmp_path)
    assert found.causes[0].name == "double-fp16"
    assert found.decided
    assert "NP702" in found.tables["Precision"] or "NP702" in evidence(found)
    assert marks(found)["precision"] == "!"


def test_autocast_without_a_scaler(tmp_path: Path) -> None:
    runs.autocast_run(tmp_path)
    found = diagnose(tmp_path, facts={"gpu": "A100"})
    assert (found.causes[0].name, found.decided) == ("amp-misuse", True)
    assert "bf16 of accelerate.yaml:3 is overridden there" in evidence(found)
    assert "torch.bfloat16" in found.causes[0].fix


@pytest.mark.parametrize("scaled", [False, True])
def test_a_scaler_that_never_scales_the_loss(tmp_path: Path, scaled: bool) -> None:
    backward = "scaler.scale(loss).backward()" if scaled else "loss.backward()"
    (tmp_path / "train.py").write_text(
        "import torch\n"
        "scaler = torch.cuda.amp.GradScaler()\n"
        "for x, y in loader:\n"
        "    with torch.cuda.amp.autocast():\n"
        "        loss = model(x, y)\n"
        f"    {backward}\n"
        "    opt.step()\n"
    )
    runs.loop_log(tmp_path / "train.log", steps=300)
    told = [f.words for f in read_run([tmp_path]).part.facts if f.name == "no-scaler"]
    assert bool(told) != scaled
    assert scaled or told[0].endswith("the GradScaler never scales the loss")


def test_a_rate_that_starts_again_in_a_tracker_which_records_no_resume(tmp_path: Path) -> None:
    rows = ["epoch,lr-AdamW,step,train_loss"]
    for step in range(0, 20_000, 250):
        rate = 3e-4 * (1 - (step if step < 12_000 else step - 12_000) / 20_000)
        loss = 2 - step / 12_000 if step < 12_000 else min(4.4, 1 + (step - 12_000) / 500)
        rows.append(f"{step // 2000},{rate:.8f},{step},{loss + step % 3 / 100:.5f}")
    (tmp_path / "metrics.csv").write_text("\n".join(rows) + "\n")
    found = diagnose(tmp_path)
    assert found.broke
    assert found.causes[0].name == "scheduler-state-on-resume"


def test_the_exit_message_of_a_scaler_beside_its_curve(tmp_path: Path) -> None:
    rows = [
        f" iteration {i:8d}/ 9000 | lm loss: {3 - i / 5000:.4E} | loss scale: {s:.1f} | grad norm: 0.9 |"
        for i in range(100, 6100, 100)
        for s in (65536.0 if i < 4300 else max(1.0, 65536.0 / 4 ** ((i - 4200) // 100)),)
    ]
    rows.append("Exception: Current loss scale already at minimum - cannot decrease scale anymore. Exiting run.")
    (tmp_path / "train.log").write_text("\n".join(rows) + "\n")
    found = diagnose(tmp_path)
    assert (found.causes[0].name, found.decided) == ("loss-scale-collapse", True)


@pytest.mark.parametrize(("error", "verdict"), [("KeyError: 'image_id'", "unknown"), ("ValueError: nan", "broken")])
def test_an_error_of_the_script_is_not_blamed_on_its_numbers(error: str, verdict: str, tmp_path: Path) -> None:
    lines = [f"step {i} loss {0.0213 if i == 9 else 0.5 * 0.7**i:.4f}" for i in range(40)]
    trace = ["Traceback (most recent call last):", '  File "train.py", line 9, in <module>', error]
    (tmp_path / "train.log").write_text("\n".join([*lines, *trace]) + "\n")
    found = diagnose(tmp_path)
    assert found.verdict == verdict
    assert found.ended == (f"{error} (train.log:43)" if verdict == "unknown" else "")


def test_a_healthy_run_is_called_healthy(tmp_path: Path) -> None:
    runs.loop_log(tmp_path / "train.log", steps=300)
    found = diagnose(tmp_path)
    assert found.benign
    assert marks(found)["log"] == "✓"


def test_finite_but_useless_is_not_called_healthy(tmp_path: Path) -> None:
    rows = [{"step": s, "loss": 2.0 - 0.005 * s, "eval_accuracy": 0.0} for s in range(1, 200)]
    (tmp_path / "log.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
    found = diagnose(tmp_path)
    assert not found.benign
    assert any("eval_accuracy is 0 at all 199 points" in x.found for x in found.checklist if x.mark == "!")


def test_a_flat_loss_at_chance_is_named(tmp_path: Path) -> None:
    rows = [{"step": s, "loss": 2.3026 + 0.0005 * (s % 3)} for s in range(1, 200)]
    (tmp_path / "log.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
    found = diagnose(tmp_path)
    assert not found.benign
    assert any("chance for 10 classes" in x.found for x in found.checklist)


def test_all_labels_masked_by_the_log(tmp_path: Path) -> None:
    lines = ["WARNING: tokenization mismatch: 385 vs. 399. (ignored)"] * 3
    lines += [
        f"{{'loss': 0.0, 'grad_norm': 0.0, 'learning_rate': 1e-05, 'epoch': {0.01 * i:.2f}}}" for i in range(1, 30)
    ]
    (tmp_path / "train.log").write_text("\n".join(lines) + "\n")
    found = diagnose(tmp_path)
    assert (found.causes[0].name, found.causes[0].confidence) == ("empty-target-mean", "strong")
    assert "train.log:1" in evidence(found)


def test_what_locate_proved_decides(tmp_path: Path) -> None:
    runs.incident(tmp_path)
    found = diagnose(tmp_path)
    assert (found.causes[0].name, found.causes[0].confidence) == ("masked-row", "strong")
    assert "masked-row in softmax at model.py:31" in evidence(found)
    assert "incident incidents/412" in evidence(found)
    assert found.timeline[0].when == "step 412"


TRAIN = """
import torch
model = torch.nn.Linear(4, 1)
opt = torch.optim.{optimizer}(model.parameters(), lr={lr})
for i in range(30):
    x = torch.full((8, 4), float(i != 9))
    loss = (model(x).square() + torch.log(x[:, :1])).mean()
    opt.zero_grad(); loss.backward(); opt.step()
"""


@pytest.mark.slow
def test_a_guarded_run_is_told_by_its_own_script_and_by_what_its_replay_showed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The script is that of run.json, others beside it are not read; the loss broke, not the batch."""
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(TRAIN.format(optimizer="Adam", lr="3e-4"))
    Path("other.py").write_text(TRAIN.format(optimizer="SGD", lr="1e3"))
    Path("model.py").write_text("WIDTH = 4\n")
    nanproof("run", "--run-dir", "runs/a", "train.py", fresh=False)
    for folder in (".", "runs/a"):
        found = diagnose(folder)
        assert [s.value for s in found.in_force if s.setting == "optimizer"] == ["adam (train.py:4)"]
        assert found.causes[0].name == "unstable-op"
        assert "the model's output is finite, the loss is not" in evidence(found)
        assert any("other.py" in note for note in found.notes)
    assert found.causes[0].commands[0] == "nanproof locate runs/a/incidents/000010"
    record = Path("runs/a/incidents/000010/incident.json")
    record.write_text(json.dumps({**json.loads(record.read_text()), "location": None}))
    assert not any(c.startswith("nanproof locate") for cause in diagnose(".").causes for c in cause.commands)


@pytest.mark.parametrize(
    ("typed", "more", "left_out"),
    [
        ("train.py --fast", "", {"other.py", "plot.py"}),  # neither is imported
        ("train.py --fast", "import importlib\nnet = importlib.import_module(cfg.net)\n", {"other.py"}),
        ("train.py --fast", "from layers import Norm\n", {"other.py"}),  # src/layers.py: on a path set elsewhere
        ("plot.py", "", set()),
        ("", "", set()),
    ],
)
def test_other_code_is_left_out_only_where_the_script_that_trained_and_what_it_loads_are_known(
    tmp_path: Path, typed: str, more: str, left_out: set[str]
) -> None:
    (tmp_path / "src").mkdir()
    for name in ("train.py", "other.py"):
        (tmp_path / name).write_text(f"import model\n{more}" + TRAIN.format(optimizer="SGD", lr="0.1"))
    for name in ("model.py", "plot.py"):
        (tmp_path / name).write_text("class Net: pass\nif __name__ == '__main__':\n    print(Net())\n")
    if "layers" in more:
        (tmp_path / "src" / "layers.py").write_text("class Norm: pass\n")
    (tmp_path / "train.log").write_text("".join(f"step {i} loss {2 - i / 100}\n" for i in range(50)))
    (tmp_path / ".bash_history").write_text(f"ls\npython {typed}\n" if typed else "ls\n")
    code = {p.name for p in read_run([tmp_path]).places.code} - {"layers.py"}
    assert code == {"model.py", "other.py", "plot.py", "train.py"} - left_out


def test_weights_that_an_update_made_bad_are_not_blamed_on_what_was_loaded(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Embedding(20, 8), torch.nn.Flatten(), torch.nn.Linear(16, 3)).half()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)  # its eps is 0 in float16
    x, y = torch.randint(0, 20, (8, 2)), torch.randint(0, 3, (8,))
    with contextlib.suppress(GuardStop), Guard(model, optimizer, heal="off", run_dir=tmp_path / "run") as guard:
        for _ in range(20):
            guard.step(lambda: torch.nn.functional.cross_entropy(model(x).float(), y), batch=(x, y))
    found = diagnose(tmp_path / "run").causes
    assert (found[0].name, found[0].confidence) == ("optimizer-eps-beta", "strong")
    assert "corrupted-checkpoint" not in [c.name for c in found if c.confidence == "strong"]


def guarded(folder: Path, loss: Callable[[torch.Tensor], torch.Tensor], lr: float) -> list[Suspect]:
    """The causes of a float32 run under the guard."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Linear(16, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=lr)
    x = torch.randn(8, 8)
    with contextlib.suppress(GuardStop), Guard(model, optimizer, heal="off", run_dir=folder) as guard:
        for _ in range(20):
            guard.step(lambda: loss(model(x)), batch=(x,))
    return list(diagnose(folder).causes)


def test_an_overflow_of_float32_is_no_overflow_of_fp16(tmp_path: Path) -> None:
    grown = guarded(tmp_path / "grown", lambda y: y.square().mean(), lr=1e12)
    assert (grown[0].name, grown[0].confidence) == ("lr-too-high", "strong")
    unbounded = guarded(tmp_path / "exp", lambda y: (100 * (1 + y.abs())).exp().mean(), lr=1e-4)
    assert (unbounded[0].name, unbounded[0].confidence) == ("unstable-op", "strong")
    assert "fp16-overflow" not in [c.name for c in (*grown, *unbounded)]


def test_a_checkpoint_that_was_bad_from_the_start_is_the_cause(tmp_path: Path) -> None:
    runs.save(tmp_path / "ckpt" / "step_100.pt", steps=100, bad="parameter")
    lines = ["Resuming from checkpoint ckpt/step_100.pt at step 100"]
    lines += [f"step {s}: loss nan, lr 1e-4" for s in range(101, 140)]
    (tmp_path / "train.log").write_text("\n".join(lines) + "\n")
    found = diagnose(tmp_path)
    assert (found.causes[0].name, found.causes[0].confidence) == ("corrupted-checkpoint", "strong")
    assert any(c.startswith("nanproof scan ") and c.endswith("step_100.pt") for c in found.commands)


def test_a_checkpoint_saved_after_the_break_is_a_consequence(tmp_path: Path) -> None:
    for step, bad in ((100, ""), (200, ""), (300, "parameter"), (400, "parameter")):
        runs.save(tmp_path / "ckpt" / f"step_{step}.pt", steps=step, total=500, bad=bad)
    runs.loop_log(tmp_path / "train.log", steps=420, broke=250, grow=True)
    found = diagnose(tmp_path)
    assert found.causes[0].name != "corrupted-checkpoint"
    told = [m.what for m in found.timeline]
    assert any("last healthy checkpoint: ckpt/step_200.pt" in w for w in told)
    assert any("first bad checkpoint: ckpt/step_300.pt" in w for w in told)


def test_versions_and_gpu_meet_the_table_of_known_bugs(tmp_path: Path) -> None:
    (tmp_path / "pip-freeze.txt").write_text("torch==2.6.0\ndeepspeed==0.15.4\n")
    (tmp_path / "ds.json").write_text(
        json.dumps({"zero_optimization": {"stage": 2, "overlap_comm": True}, "bf16": {"enabled": True}})
    )
    runs.loop_log(tmp_path / "train.log", steps=120, broke=100)
    found = diagnose(tmp_path)
    assert (found.causes[0].name, found.causes[0].confidence) == ("distributed-desync", "strong")
    assert "DeepSpeed 0.14 to 0.16.4" in evidence(found)
    assert found.causes[0].fix.startswith("zero_optimization.overlap_comm: false")


def test_what_the_kernel_log_says_about_memory(tmp_path: Path) -> None:
    (tmp_path / "dmesg.txt").write_text("[123.4] NVRM: Xid (PCI:0000:90:1c): 63, pid=1, Row remapper\n")
    runs.loop_log(tmp_path / "train.log", steps=120, broke=100)
    assert diagnose(tmp_path).causes[0].name == "hardware-fault"


def test_facts_of_the_user_are_weighed_with_the_files(tmp_path: Path) -> None:
    runs.loop_log(tmp_path / "train.log", steps=300, broke=250)
    before = diagnose(tmp_path)
    after = diagnose(tmp_path, facts={"only-with-padding": "yes"})
    assert before.causes[0].name != "masked-row"
    assert after.causes[0].name == "masked-row"


def test_nothing_to_diagnose_says_what_was_looked_for(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"looked for logs .*TensorBoard.*checkpoints"):
        diagnose(tmp_path)
    with pytest.raises(UsageError, match="does not exist"):
        diagnose(tmp_path / "nowhere")


def test_hostile_files_are_reported_and_never_fatal(tmp_path: Path) -> None:
    (tmp_path / "train.log").write_bytes(os.urandom(5000) + b"\nstep 1: loss nan\n" + b"x" * 200_000)
    (tmp_path / "ckpt.pt").write_bytes(b"PK\3\4" + os.urandom(200))
    (tmp_path / "config.yaml").write_text("a: &a [*a, *a]\nlr: [1, 2\n")
    (tmp_path / "bomb.yaml").write_text(
        "\n".join(f"k{i}: &k{i} [{', '.join([f'*k{i - 1}'] * 9) if i else '1'}]" for i in range(12))
    )
    (tmp_path / "train.py").write_text("def broken(:\n")
    (tmp_path / "incidents").mkdir()
    (tmp_path / "incidents" / "incident.json").write_text('{"version": 99, "verdict": {}}')
    (tmp_path / "requirements.txt").write_bytes(b"\xff\xfe\x00torch==2")
    (tmp_path / "loop").symlink_to(tmp_path, target_is_directory=True)
    found = diagnose(tmp_path)
    assert not any("please report" in x.found for x in found.checklist)
    assert any(x.mark == "✗" and x.what == "incident" for x in found.checklist)
    assert any(x.what == "checkpoint" and x.mark == "!" for x in found.checklist)


def test_a_reader_that_fails_is_said_and_the_others_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from nanproof.diagnosing import run

    def broken(*_: object) -> None:
        raise ZeroDivisionError("a bug of ours")

    runs.loop_log(tmp_path / "train.log", steps=300, broke=250, grow=True)
    (tmp_path / "train.py").write_text("import torch\n")
    monkeypatch.setattr(run, "read_code", broken)
    found = diagnose(tmp_path)
    assert any(x.mark == "✗" and "ZeroDivisionError: a bug of ours" in x.found for x in found.checklist)
    assert any(m.when == "step 250" for m in found.timeline)


def test_a_file_named_by_itself_is_enough(tmp_path: Path) -> None:
    runs.loop_log(tmp_path / "output", steps=300, broke=250, grow=True)
    found = diagnose([tmp_path / "output"])
    assert any(m.when == "step 250" for m in found.timeline)


def test_code_and_config_alone_are_risks_and_no_causes(tmp_path: Path) -> None:
    runs.autocast_run(tmp_path)
    (tmp_path / "train.log").unlink()
    found = diagnose(tmp_path)
    assert not found.broke
    assert {c.confidence for c in found.causes} == {"possible"}
    assert found.causes[0].name == "amp-misuse"


@pytest.mark.parametrize("seed", [0, 1])  # of the weights: with 0 the gradient norm happens to leap before
def test_a_run_of_the_real_trainer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """One bad sample; the Trainer hides the NaN, saves two NaN checkpoints, and goes on to the end."""
    import torch
    from transformers import Trainer, TrainingArguments

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin = torch.nn.Linear(4, 2)

        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"loss": torch.nn.functional.cross_entropy(self.lin(x), labels)}

    data = [{"x": torch.full((4,), 0.1 * (i % 7)), "labels": torch.tensor(i % 2)} for i in range(200)]
    data[77]["x"][0] = float("nan")
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(seed)
    arguments = TrainingArguments(
        "out",
        learning_rate=1e-3,
        logging_steps=1,
        per_device_train_batch_size=4,
        max_steps=60,
        save_steps=20,
        use_cpu=True,
        report_to=[],
        seed=3,
        disable_tqdm=True,
    )
    Trainer(model=Net(), args=arguments, train_dataset=data).train()  # type: ignore[arg-type]
    found = diagnose(tmp_path)
    told = [m.what for m in found.timeline]
    assert any("hidden by the Trainer's logging_nan_inf_filter" in w for w in told)
    assert any("last healthy checkpoint: out/checkpoint-20" in w for w in told)
    assert any("first bad checkpoint: out/checkpoint-40" in w for w in told)
    assert "bad-data" in [c.name for c in found.causes]
    assert not found.decided, "the log alone cannot tell a bad sample from a bad operation"
    assert len(found.missing) == 1
    sure = diagnose(tmp_path, facts={"same_batch": "yes"})
    assert sure.causes[0].name == "bad-data"
    assert sure.causes[0].share > next(c.share for c in found.causes if c.name == "bad-data")


def test_the_config_beside_the_log_is_the_one_of_the_run(tmp_path: Path) -> None:
    """A project keeps many configs, and the newest of them need not be the run's."""
    runs.loop_log(tmp_path / "run" / "train.log", steps=300, broke=250, lr=8e-4, grow=True)
    (tmp_path / "run" / "config.yaml").write_text("lr: 1.0e-4\nepochs: 3\n")
    (tmp_path / "configs").mkdir()
    for name in ("a", "b", "c"):
        (tmp_path / "configs" / f"{name}.yaml").write_text("lr: 8.0e-4\nepochs: 3\n")
    found = diagnose(tmp_path)
    assert next(x.found for x in found.checklist if x.what == "config").startswith("run/config.yaml")
    assert "config: 1.0e-4 (run/config.yaml:1)" in evidence(found)


@pytest.mark.parametrize("name", ["result.json", "all_results.json", "eval-metrics.json"])
def test_results_are_no_config(tmp_path: Path, name: str) -> None:
    runs.loop_log(tmp_path / "train.log", steps=300, broke=250)
    (tmp_path / name).write_text(json.dumps({"lr": 0.5, "steps": 300, "batch_size": 4}))
    found = diagnose(tmp_path)
    assert not any(x.what == "config" and name in x.found for x in found.checklist)


@pytest.mark.parametrize(("fell", "cause"), [(261, "fp16-overflow"), (240, "loss-scale-collapse")])
def test_a_loss_scale_that_falls_after_the_loss_was_nan_is_a_consequence(tmp_path: Path, fell: int, cause: str) -> None:
    lines = [
        {
            "step": i,
            "loss": "NaN" if i >= 260 else 1.0 + i % 3 / 100,
            "grad_norm": "NaN" if i >= fell - 1 else 0.5 + i % 5 / 10,
            "loss_scale": 2.0 ** min(10, 9 + fell - i),
        }
        for i in range(1, 281)
    ]
    (tmp_path / "training_log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert diagnose(tmp_path).causes[0].name == cause


@pytest.mark.parametrize(("activation", "near"), [(30_000, True), (300, False), (300_000, False)])
def test_activations_near_the_end_of_fp16(tmp_path: Path, activation: int, near: bool) -> None:
    lines = [{"step": i, "loss": 1.0 + i % 3 / 100, "activation": activation + i % 7} for i in range(1, 41)]
    lines += [{"step": i, "loss": "NaN", "activation": "NaN"} for i in range(41, 51)]
    (tmp_path / "training_log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert ("fp16 ends at 65,504" in evidence(diagnose(tmp_path, facts={"precision": "fp16"}))) is near


def test_settings_that_trackers_keep(tmp_path: Path) -> None:
    """W&B keeps the command line of a run, MLflow a file for each parameter."""
    lines = "".join(f"step {i} loss {3 - i / 20 if i < 30 else math.nan:.3f}\n" for i in range(1, 40))
    files = tmp_path / "wandb" / "wandb" / "run-1" / "files"
    files.mkdir(parents=True)
    files.joinpath("output.log").write_text(lines)
    told = {
        "program": "train.py",
        "args": ["--lr", "0.1", "--fp16", "--batch-size", "16"],
        "gpu": "Tesla V100-SXM2-16GB",
    }
    files.joinpath("wandb-metadata.json").write_text(json.dumps(told))
    run = tmp_path / "mlflow" / "mlruns" / "0" / "abc"
    for name in ("metrics", "params"):
        run.joinpath(name).mkdir(parents=True)
    run.joinpath("meta.yaml").write_text("run_id: abc\nstatus: 3\n")
    run.joinpath("metrics", "loss").write_text("".join(f"{i} {'nan' if i > 20 else 2} {i}\n" for i in range(30)))
    for name, value in {"lr": "0.1", "mixed_precision": "fp16", "batch_size": "16"}.items():
        run.joinpath("params", name).write_text(value)
    for tracker in ("wandb", "mlflow"):
        held = {h.setting: h.value.partition(" ")[0] for h in diagnose(tmp_path / tracker).in_force}
        assert {"precision": "fp16", "lr": "0.1", "batch": "16"}.items() <= held.items()
