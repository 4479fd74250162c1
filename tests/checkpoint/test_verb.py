"""``nanproof scan`` as a user meets it: what it prints, and with which code it ends."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner, Result

from checkpoint import writers
from nanproof.cli.shell import nanproof


def run(*arguments: object) -> Result:
    return CliRunner().invoke(nanproof, ["scan", *map(str, arguments)])


def lines(result: Result) -> list[str]:
    return [" ".join(line.split()) for line in result.output.splitlines()]


@pytest.fixture
def series(tmp_path: Path) -> Path:
    return writers.series(tmp_path / "run", "hhbp")


def test_the_series_of_the_issue(series: Path) -> None:
    result = run(series)
    assert result.exit_code == 1
    assert lines(result) == [
        "step_0.pt healthy 27 tensors, 11.8 kB, headroom fp32 2^126+, lr 0.000171",
        "step_1.pt healthy 27 tensors, 11.8 kB, headroom fp32 2^126+, lr 0.000171",
        "step_2.pt CORRUPT 1 buffer NaN (model.1.running_mean), parameters finite → repairable",
        "step_3.pt CORRUPT 6 of 6 parameters NaN",
        "2 of 2 buffers NaN",
        "last healthy: step_1.pt first bad: step_2.pt",
    ]


def test_clean_exits_0(series: Path) -> None:
    assert run(series / "step_0.pt").exit_code == 0
    assert run(str(series / "step_[01].pt"), "--fast", "--jobs", 2).exit_code == 0


def test_json_is_strict_and_complete(series: Path) -> None:
    result = run(series, "--json", "--against", series / "step_0.pt")
    data = json.loads(result.stdout, parse_constant=lambda word: pytest.fail(f"{word} is not JSON"))
    assert [r["health"] for r in data["series"]["reports"]] == ["healthy", "healthy", "corrupt", "corrupt"]
    assert data["series"]["turns"] == [{"last_healthy": "step_1.pt", "first_bad": "step_2.pt"}]
    bad = [t for t in data["series"]["reports"][2]["tensors"] if t["state"] == "nonfinite"]
    assert (bad[0]["name"], bad[0]["facts"]["nan"], bad[0]["facts"]["first_bad"]) == ("model.1.running_mean", 1, [2])


def test_bisect_says_how_many_it_read(series: Path) -> None:
    result = run(series, "--bisect")
    assert "read 2 of 4 checkpoints" in lines(result)
    assert "last healthy: step_1.pt first bad: step_2.pt" in lines(result)
    assert result.exit_code == 1


def test_config(series: Path, tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("lr: 1e-4\n")
    result = run(series / "step_0.pt", "--config", tmp_path / "c.yaml")
    assert "step_0.pt: checkpoint will restore lr 0.0001713, config says 0.0001 (lr)" in lines(result)
    assert result.exit_code == 1


def test_against(series: Path) -> None:
    result = run(series / "step_2.pt", "--against", series / "step_0.pt")
    assert "step_2.pt against step_0.pt:" in lines(result)
    assert "model.1.running_mean: relative change nan" in lines(result)


def test_repair_and_quarantine(series: Path, tmp_path: Path) -> None:
    result = run(series / "step_2.pt", "--repair", tmp_path / "fixed.pt")
    assert result.exit_code == 0
    assert lines(result)[-1].endswith("fixed.pt: healthy; step_2.pt is as it was")
    result = run(series / "step_3.pt", "--repair", tmp_path / "no.pt")
    assert result.exit_code == 1
    assert lines(result)[-1].startswith("not repaired: model.")
    assert run(series, "--quarantine", tmp_path / "bad").exit_code == 1
    assert run(series).exit_code == 0
    assert len(lines(run("--quarantine", tmp_path / "bad", "--undo"))) == 2
    assert run(series).exit_code == 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "no path given"),
        (["nowhere"], "there is nothing at nowhere"),
        (["--undo"], "--undo needs --quarantine DIR"),
        (["RUN", "--repair", "x.pt"], "--repair takes one checkpoint, got 4"),
        (["RUN/step_0.pt", "--against", "RUN"], "--against takes one checkpoint, got 4"),
        (["RUN/step_0.pt", "--config", "none.yaml"], "none.yaml cannot be read"),
        (["RUN/step_2.pt", "--repair", "RUN/step_0.pt"], "exists already"),
        (["--quarantine", "RUN", "--undo"], "has no quarantine.jsonl"),
        (["RUN", "--jobs", "0"], "invalid value for '--jobs'"),
        (["RUN", "--frobnicate"], "no such option"),
    ],
)
def test_wrong_arguments_get_a_sentence_and_exit_2(arguments: list[str], words: str, series: Path) -> None:
    result = run(*(a.replace("RUN", str(series)) for a in arguments))
    assert result.exit_code == 2
    assert words in " ".join(result.output.split())
    assert "Traceback" not in result.output


def test_names_from_files_cannot_play_with_the_terminal(tmp_path: Path) -> None:
    torch.save({"\x1b[31mred\x1b[0m\n[bold]": torch.tensor([float("nan")])}, tmp_path / "[red]a.pt")
    output = run(tmp_path / "[red]a.pt").output
    assert "\x1b" not in output
    assert output.startswith("[red]a.pt")
    assert "[bold]" in output


def test_many_reasons_are_cut(tmp_path: Path) -> None:
    torch.save({f"w{i}": torch.zeros(4, 4) for i in range(40)}, tmp_path / "a.pt")
    assert lines(run(tmp_path / "a.pt"))[-1] == "and 34 more"


def test_interrupted_by_the_user(tmp_path: Path) -> None:
    """A kill half-way leaves nothing behind: scanning writes nothing."""
    import signal
    import time

    from checkpoint.test_far import many_safetensors

    many_safetensors(tmp_path / "many.safetensors")
    before = sorted(p.name for p in tmp_path.iterdir())
    process = subprocess.Popen(
        [sys.executable, "-m", "nanproof", "scan", str(tmp_path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    opened = Path(f"/proc/{process.pid}/fd")
    while process.poll() is None and not any("many" in str(link.resolve()) for link in opened.iterdir()):
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=600)
    assert process.returncode in (0, 130)
    assert "Traceback" not in errors
    assert sorted(p.name for p in tmp_path.iterdir()) == before
