"""The run's folder: log, incidents, lock, summary."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch
from safetensors.torch import load_file

from nanproof import Guard, Incident, Policy, files
from nanproof.errors import LockedError
from nanproof.files import read_jsonl
from nanproof.guard import incident as incident_module
from nanproof.schema import schema_of
from support.forked import run_python
from support.runs import loss_of, make_batches, make_run, with_faults


def test_the_log_has_a_whole_line_for_every_step(tmp_path: Path) -> None:
    run = make_run(run_dir=tmp_path, log_every=4)
    verdicts = run.feed(with_faults(make_batches(12), {5: "nan"}))
    run.guard.close()
    lines = list(read_jsonl(tmp_path / "training_log.jsonl"))
    assert [line["verdict"] for line in lines] == verdicts
    assert [line["step"] for line in lines] == list(range(1, 14))
    assert lines[5]["loss"] == "NaN"
    assert lines[5]["action"] == "skip"
    assert {"step", "update", "loss", "grad_norm", "lr", "scale", "verdict", "action", "seconds"} <= set(lines[0])
    assert lines[1]["lr"] == pytest.approx(lines[0]["lr"] * 0.99)
    for line in (tmp_path / "training_log.jsonl").read_text().splitlines():
        json.loads(line, parse_constant=lambda word: pytest.fail(f"{word} is not JSON"))


def test_the_log_is_written_at_the_first_step_every_n_steps_and_at_once_on_an_incident(tmp_path: Path) -> None:
    run = make_run(run_dir=tmp_path, log_every=10)
    run.feed(make_batches(9))
    assert len(list(read_jsonl(tmp_path / "training_log.jsonl"))) == 1  # the first shows that the run trains
    run.feed(with_faults(make_batches(1), {0: "nan"})[:1])
    assert len(list(read_jsonl(tmp_path / "training_log.jsonl"))) == 10


def test_an_incident_is_complete_and_fits_its_schema(tmp_path: Path) -> None:
    run = make_run(run_dir=tmp_path)
    batches = with_faults(make_batches(60), {55: "grad:+inf"})
    for batch in batches[:55]:
        run.feed([batch])
    rng = torch.get_rng_state()
    running = run.model.norm.running_mean.clone()
    run.feed(batches[55:56])
    folder = tmp_path / "incidents" / "000056"
    data = json.loads((folder / "incident.json").read_text())
    jsonschema.validate(data, schema_of(Incident))
    incident = Incident.from_json(data)
    assert incident.verdict.level == "gradient"
    assert incident.action.kind == "skip"
    assert len(incident.readings) == 50
    assert incident.readings[-1].step == 55
    assert incident.tensors[0].name.startswith("grad ")
    assert incident.tensors[0].bad > 0
    assert incident.environment["torch"] == torch.__version__
    kept = load_file(folder / "batch.safetensors")
    assert torch.equal(kept["batch.x"], batches[55].x)
    outline = json.loads((folder / "batch.json").read_text())
    assert outline["items"]["fault"] == "grad:+inf"
    assert outline["items"]["x"] == {"tensor": "batch.x"}
    assert torch.equal(load_file(folder / "buffers.safetensors")["norm.running_mean"], running), "before the forward"
    assert torch.equal(load_file(folder / "rng.safetensors")["torch"], rng)
    assert len(json.loads((folder / "rng.json").read_text())["python"]) == 3


def test_a_batch_over_the_limit_is_left_out_with_a_word(tmp_path: Path) -> None:
    run = make_run(run_dir=tmp_path, incident_bytes=100)
    run.feed(with_faults(make_batches(1), {0: "nan"})[:1])
    folder = tmp_path / "incidents" / "000001"
    assert not (folder / "batch.safetensors").exists()
    notes = json.loads((folder / "incident.json").read_text())["notes"]
    assert "batch not kept: 240 bytes, more than the limit of 100" in notes


def test_a_run_that_keeps_failing_does_not_fill_the_disk(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(incident_module, "FULL_BUNDLES", 3)
    monkeypatch.setattr(incident_module, "RECORDS", 6)
    run = make_run(run_dir=tmp_path, policy=Policy(max_consecutive=100, rerun=False))
    run.feed(with_faults(make_batches(1), {0: "nan"})[:1] * 10)
    folders = sorted((tmp_path / "incidents").iterdir())
    assert len(folders) == 6
    assert [(f / "batch.safetensors").exists() for f in folders] == [True] * 3 + [False] * 3


def test_bad_steps_in_a_row_are_printed_in_full_a_few_times_only(tmp_path: Path, caplog: Any) -> None:
    run = make_run(run_dir=tmp_path, policy=Policy(max_consecutive=100, rerun=False))
    run.feed(with_faults(make_batches(1), {0: "grad:nan"})[:1] * 6)
    printed = [r.getMessage() for r in caplog.records if "→ skip" in r.getMessage()]
    assert len(printed) == 6
    assert ["; grad first.weight" in line or "runs.py" in line for line in printed] == [True] * 3 + [False] * 3
    assert all(f"incidents/{i:06d}" in line for i, line in enumerate(printed, 1))


def test_the_summary_is_loud_and_says_why(tmp_path: Path, caplog: Any) -> None:
    run = make_run(run_dir=tmp_path, spike_window=16)
    run.feed(with_faults(make_batches(20), {5: "nan", 14: "spike"}))
    run.guard.close()
    said = caplog.records[-1]
    assert said.levelname == "WARNING"
    assert "22 steps, 20 updates, 2 skipped" in said.getMessage()
    assert "1 × nonfinite loss" in said.getMessage()
    assert "1 × spike gradient" in said.getMessage()
    assert str(tmp_path / "incidents") in said.getMessage()


def test_the_summary_comes_at_the_end_of_a_script_that_never_closes(tmp_path: Path) -> None:
    script = (
        "import torch; from nanproof import Guard\n"
        "m = torch.nn.Linear(2, 2); g = Guard(m, torch.optim.SGD(m.parameters(), lr=0.1), run_dir='run')\n"
        "for i in range(5): g.step(lambda: m(torch.ones(1, 2)).sum() * (float('nan') if i == 3 else 1))\n"
    )
    done = run_python("-c", script, cwd=tmp_path, apart=True)
    assert done.returncode == 0, done.stderr
    assert "nanproof: 5 steps, 4 updates, 1 skipped" in done.stderr
    assert len(list(read_jsonl(tmp_path / "run" / "training_log.jsonl"))) == 5


def test_a_folder_in_use_is_refused(tmp_path: Path) -> None:
    make_run(run_dir=tmp_path)
    with pytest.raises(LockedError, match=rf"in use by process {os.getpid()}.*give this run a folder of its own"):
        make_run(run_dir=tmp_path)


def test_a_closed_run_gives_its_folder_back_and_the_log_goes_on(tmp_path: Path) -> None:
    for _ in range(2):
        run = make_run(run_dir=tmp_path)
        run.feed(with_faults(make_batches(2), {0: "nan"}))
        run.guard.close()
    assert len(list(read_jsonl(tmp_path / "training_log.jsonl"))) == 6
    assert sorted(p.name for p in (tmp_path / "incidents").iterdir()) == ["000001", "000001.2"]


def test_a_full_disk_costs_the_record_never_the_run(tmp_path: Path, caplog: Any) -> None:
    run = make_run(run_dir=tmp_path, log_every=1)
    try:
        files.arm("append", fault="enospc")
        run.feed(make_batches(2))
        files.arm("write", fault="enospc")
        run.feed(with_faults(make_batches(1), {0: "nan"}))
    finally:
        files.disarm()
    assert run.guard.tally.updates == 3
    assert "log lines lost" in caplog.text
    assert "guard-failed, keeping an incident" in caplog.text
    run.guard.close()
    assert "the guard itself failed once" in caplog.records[-1].getMessage()


def test_the_guard_s_own_failure_is_loud_and_the_healthy_run_goes_on(monkeypatch: Any, caplog: Any) -> None:
    clean = make_batches(6)
    reference = make_run()
    reference.feed(clean)
    run = make_run()
    run.feed(clean[:3])

    def broken(*_: Any, **__: Any) -> Any:
        raise ZeroDivisionError("a bug of ours")

    with monkeypatch.context() as patch:
        patch.setattr("nanproof.guard.readback.Reader.receive", broken)
        verdict = run.guard.step(lambda: loss_of(run.model, clean[3]))
        assert (verdict.kind, verdict.names) == ("guard-failed", ("judging a step: ZeroDivisionError: a bug of ours",))
        # even then a bad step is not carried out
        bad = with_faults(clean, {0: "nan"})[0]
        before = run.digest()
        run.guard.step(lambda: loss_of(run.model, bad))
        assert run.digest() == before
    run.feed(clean[4:])
    assert run.digest() == reference.digest()
    assert "guard-failed, judging a step: ZeroDivisionError" in caplog.text


@pytest.mark.parametrize("broken", ["readback.Signals.look", "snapshots.Snapshots.take"])
def test_no_other_part_of_the_guard_ends_a_healthy_run(monkeypatch: Any, caplog: Any, broken: str) -> None:
    clean = make_batches(8)
    reference = make_run(snapshot_every=3)
    reference.feed(clean)
    run = make_run(snapshot_every=3)
    with monkeypatch.context() as patch:
        patch.setattr(f"nanproof.guard.{broken}", lambda *_, **__: 1 / 0)
        assert set(run.feed(clean)) == {"ok"}
    assert run.digest() == reference.digest()
    assert run.guard.tally.failures
    assert "guard-failed" in caplog.text


def test_a_policy_may_stop_when_the_guard_fails(monkeypatch: Any) -> None:
    from nanproof.errors import GuardStop

    run = make_run(policy=Policy(on_guard_failure="stop"))
    monkeypatch.setattr("nanproof.guard.readback.Reader.receive", lambda *_, **__: 1 / 0)
    with pytest.raises(GuardStop, match=r"guard-failed guard.*the policy stops then"):
        run.feed(make_batches(1))


def test_an_error_of_the_user_s_own_comes_through_untouched() -> None:
    run = make_run()

    def broken() -> torch.Tensor:
        raise KeyError("labels")

    with pytest.raises(KeyError, match="labels"):
        run.guard.step(broken)
    assert run.feed(make_batches(2)) == ["ok", "ok"]


def test_state_round_trips() -> None:
    a, b = make_run(spike_window=16), make_run(spike_window=16)
    a.feed(with_faults(make_batches(20), {12: "nan"}))
    b.guard.load_state_dict(json.loads(json.dumps(a.guard.state_dict())))
    assert b.guard.state_dict() == a.guard.state_dict()
    windows = [run.guard._context.groups.all.window for run in (a, b)]
    assert windows[0].limits() == windows[1].limits()
    assert math.isfinite(windows[1].limits().grad_norm)


def test_batches_hands_out_the_loader_and_remembers_for_incidents(tmp_path: Path) -> None:
    run = make_run(run_dir=tmp_path, accumulate=4)
    for batch in run.guard.batches(with_faults(make_batches(9), {2: "nan"})):
        run.guard.step(lambda batch=batch: loss_of(run.model, batch))
    assert run.guard.tally.steps == 3, "ten micro-batches in windows of four, the last one incomplete"
    assert run.guard.tally.updates == 2
    assert (tmp_path / "incidents" / "000001" / "batch.safetensors").exists()


def test_two_guards_for_two_networks(tmp_path: Path) -> None:
    """A GAN: each network has its guard, its optimizer and its folder."""
    torch.manual_seed(0)
    g, d = torch.nn.Linear(2, 2), torch.nn.Linear(2, 1)
    guards = [Guard(m, torch.optim.Adam(m.parameters()), run_dir=tmp_path / name) for m, name in ((g, "g"), (d, "d"))]
    x = torch.ones(3, 2)
    for i in range(4):
        factor = math.nan if i == 2 else 1.0
        guards[1].step(lambda: d(g(x).detach()).mean() - d(x).mean())
        guards[0].step(lambda factor=factor: -d(g(x)).mean() * factor)
    assert [k.tally.updates for k in guards] == [3, 4]


def test_several_optimizers_step_together() -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4, bias=False), torch.nn.Linear(4, 2))
    sgd = torch.optim.SGD(model[0].parameters(), lr=1e-2, momentum=0.9)
    adam = torch.optim.AdamW(model[1].parameters(), lr=1e-2)
    guard = Guard(model, [sgd, adam])
    before = [p.detach().clone() for p in model.parameters()]
    guard.step(lambda: model(torch.randn(4, 4)).square().mean() * math.nan)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    guard.step(lambda: model(torch.randn(4, 4)).square().mean())
    assert not any(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
