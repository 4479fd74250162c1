"""``nanproof diagnose`` as a user meets it: what it prints, and with which code it ends."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from diagnosing import runs
from nanproof.cli.shell import nanproof


def run(*arguments: object) -> Result:
    return CliRunner(env={"COLUMNS": "100"}).invoke(nanproof, ["diagnose", *map(str, arguments)])


GOLDEN = """\
Possible cause: every entry of a softmax row is masked (masked-row, possible)
  evidence  only with padding or a batch above 1 (--fact)
            at once and in every precision (--fact)
  repair    nanproof.ops.masked_softmax, or keep one unmasked entry per row; fill with
              torch.finfo(dtype).min instead of -inf
  run       nanproof explain masked-row
"""


def test_a_symptom_without_files() -> None:
    result = run("--fact", "only-with-padding", "--fact", "nan-at-lr-0", "--fact", "onset=step1")
    assert result.output.startswith(GOLDEN)
    assert result.exit_code == 1


def test_it_says_what_would_decide_when_it_cannot_tell() -> None:
    result = run("--fact", "loss=nan", "--fact", "onset=step1")
    assert "To decide: which precision does training run in? Run the one that is true:" in result.output
    for answer in ("fp16", "bf16", "fp32", "fp8"):
        assert f"nanproof diagnose --fact loss=nan --fact onset=step1 --fact precision={answer}\n" in result.output
    assert "nanproof diagnose --fact loss=nan --fact onset=step1 --fact precision=fp16" in result.output
    assert result.output.startswith("Possible cause: ")
    assert result.exit_code == 1


def test_benign_is_exit_0_and_says_so() -> None:
    result = run("--fact", "recovers", "--fact", "grad-norm-leads")
    assert result.output.startswith("No problem found (benign, ")
    assert "it recovers by itself" in result.output
    assert result.exit_code == 0


def test_json_is_what_the_issue_says(tmp_path: Path) -> None:
    described = {
        "framework": "own loop",
        "model": "CRNN",
        "symptoms": "CTC loss inf for short crops",
        "flags": ["loss-nan"],
        "onset": "data-length-dependent",
        "series": [],
        "precision": {"mode": None},
        "training": {},
        "hardware": None,
        "confirmed_cause": "hidden",
    }
    (tmp_path / "e.json").write_text(json.dumps(described))
    result = run("--json", "--evidence", tmp_path / "e.json")
    data = json.loads(result.stdout, parse_constant=lambda word: pytest.fail(f"{word} is not JSON"))
    first = data["causes"][0]
    assert {"name", "confidence", "evidence", "against", "fix"} <= set(first)
    assert first["name"] == "ctc-infeasible"
    assert data["commands"][0] == "nanproof explain ctc-infeasible"
    assert first["evidence"]
    assert isinstance(data["missing"], list)
    assert data["notes"] == ["ignored: confirmed_cause (not a field of evidence)"]
    assert result.exit_code == 1


def test_the_wreck_of_the_issue(tmp_path: Path) -> None:
    runs.scheduler_run(tmp_path)
    result = run(tmp_path)
    told = " ".join(result.output.split())
    assert "In force lr 0.000492 (train.log) ! not 0.0001 (configs/config.py:31)" in told
    assert "step 200: resumed at step 200" in told
    assert "ause: the resumed scheduler or optimizer state overrides your learning rate" in told
    assert "train.log: lr 4.92e-04 from step 201 on; config: 1e-4 (configs/config.py:31)" in told
    assert result.exit_code == 1
    assert len(result.output.splitlines()) <= 30
    full = " ".join(run(tmp_path, "--full").output.split())
    assert "! log train.log: text, 299 rows, steps 1 to 299, dead" in full
    assert "✓ checkpoint ckpt/epoch_28.pth: healthy" in full
    assert "✗ environment none found" in full


def test_markdown_and_html_hold_the_same_and_are_harmless(tmp_path: Path) -> None:
    evil = "<script>alert(1)</script>|`x`\x1b[2J"
    (tmp_path / "e.json").write_text(
        json.dumps({"symptoms": f"nan with padding {evil} masked", "flags": ["only-with-padding"]})
    )
    markdown = run("--markdown", "--evidence", tmp_path / "e.json").output
    page = run("--html", "--evidence", tmp_path / "e.json").output
    text = run("--evidence", tmp_path / "e.json").output
    assert "## 1. every entry of a softmax row is masked (`masked-row`, " in markdown
    assert page.startswith("<!doctype html>")
    assert "(masked-row, " in page
    for shown in (markdown, page, text):
        assert "<script>" not in shown
        assert "\x1b" not in shown
    assert "http" not in page
    assert "src=" not in page


def test_names_of_files_cannot_paint_the_terminal(tmp_path: Path) -> None:
    runs.loop_log(tmp_path / "a\x1b[31mred.log", steps=100, broke=80)
    assert "\x1b" not in run(tmp_path).output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "no path given"),
        (("--fact", "=3"), "--fact '=3' cannot be used"),
        (("--fact", "lr=1", "--fact", "lr=2"), "--fact 'lr=2' cannot be used"),
        (("--fact", "hue=blue"), "no fact is called 'hue'"),
        (("nowhere",), "nowhere does not exist"),
        (("--evidence", "nowhere.json"), "nowhere.json cannot be read"),
    ],
)
def test_wrong_usage_is_one_sentence_and_exit_2(arguments: tuple[str, ...], message: str) -> None:
    result = run(*arguments)
    assert message in result.output
    assert "Traceback" not in result.output
    assert result.exit_code == 2


# ---------------------------------------------------------------- before a resume


def project(folder: Path, *, lr: str = "5.0e-4", code: str = "import torch\n\nmodel = torch.nn.Linear(2, 2)\n") -> None:
    (folder / "config.yaml").write_text(f"lr: {lr}\nepochs: 3\ndata_path: data\n")
    (folder / "train.py").write_text(code)
    (folder / "data").mkdir()
    (folder / "data" / "x.csv").write_text("a,b\n1,2\n3,4\n")


def test_go(tmp_path: Path) -> None:
    project(tmp_path)
    runs.save(tmp_path / "ckpt" / "step_200.pt")
    result = run(tmp_path, "--before-resume", tmp_path / "ckpt" / "step_200.pt")
    assert result.exit_code == 0, result.output
    assert "✗" not in result.output
    for point in ("config", "code", "resources", "checkpoint", "data"):
        assert f"✓ {point}" in result.output
    assert "GO: safe to resume from step_200.pt" in result.output


@pytest.mark.parametrize(
    ("bad", "lr", "code", "data", "reason"),
    [
        ("parameter", "5.0e-4", "", "", "NaN"),
        ("", "1.0e-4", "", "", "config says 0.0001"),
        ("", "5.0e-4", "def broken(:\n", "", "is not Python"),
        (
            "",
            "5.0e-4",
            "import torch\n\n\ndef f(p, y):\n    return torch.log(torch.sigmoid(p)).mean() * y\n",
            "",
            "NP206",
        ),
        ("", "5.0e-4", "", "a,b\n1,nan\n", "NaN"),
    ],
)
def test_no_go(tmp_path: Path, bad: str, lr: str, code: str, data: str, reason: str) -> None:
    project(tmp_path, lr=lr)
    if code:
        (tmp_path / "train.py").write_text(code)
    if data:
        (tmp_path / "data" / "x.csv").write_text(data)
    runs.save(tmp_path / "ckpt" / "step_200.pt", bad=bad)
    result = run(tmp_path, "--before-resume", tmp_path / "ckpt" / "step_200.pt")
    assert result.exit_code == 1
    assert any(line.startswith("✗") and reason in line for line in result.output.splitlines()), result.output
    assert "NO-GO: " in result.output


def test_what_was_not_checked_is_said(tmp_path: Path) -> None:
    (tmp_path / "p").mkdir()
    (tmp_path / "p" / "notes.txt").write_text("nothing\n")
    runs.save(tmp_path / "step_200.pt")
    result = run(tmp_path / "p", "--before-resume", tmp_path / "step_200.pt", "--json")
    data = json.loads(result.stdout)
    assert data["go"] is True
    unknown = {c["point"] for c in data["checks"] if c["verdict"] == "unknown"}
    assert unknown == {"config", "code", "checkpoint", "data"}


def test_several_checkpoints_are_refused(tmp_path: Path) -> None:
    for step in (100, 200):
        runs.save(tmp_path / f"step_{step}.pt", steps=step)
    result = run("--before-resume", tmp_path)
    assert "holds 2 checkpoints, not one" in result.output
    assert result.exit_code == 2


def test_the_page_shows_what_is_printed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sessions of docs/diagnose.md, run again; free disk and memory are this machine's own."""
    page = (Path(__file__).parents[2] / "docs" / "diagnose.md").read_text()
    sessions = re.findall(r"```text\n\$ nanproof diagnose (.*?)\n(.*?)\n```", page, re.S)
    runs.scheduler_run(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    assert len(sessions) == 3
    for arguments, shown in sessions:
        printed = run(*arguments.split()).output
        kept = [[x for x in text.strip().splitlines() if "resources" not in x] for text in (printed, shown)]
        assert kept[0] == kept[1]
