"""Nothing reaches the terminal but through `nanproof.text`, and nothing from a file is obeyed by it."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import nanproof
from nanproof.text import lines, plain
from support.incidents import make_incident

SRC = Path(nanproof.__file__).parent
# The rooms whose files run as part of a training script of their own, and the one that prints.
OWN = ("text.py", "cases/", "run/", "guard/")

HOSTILE = "w\x1b]0;OWNED\x07\x1b]52;c;b3duZWQ=\x07\x1b[2J\x1b[31m\x9b31m\u202eevil\u200b\x08\x7f"


PRINTERS = """
print pprint input click.echo click.secho click.style click.echo_via_pager Console rich.print
rich.console.Console os.write
"""


def _writes(tree: ast.AST) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            stream = name.startswith(("sys.stdout.", "sys.stderr.")) and name.endswith(("write", "writelines"))
            if stream or name in PRINTERS.split():
                yield node.lineno, name


def test_only_the_printer_prints() -> None:
    allowed = {
        ("cli/lint.py", "sys.stdout.buffer.write"),  # the user's own code, repaired, bytes for bytes
        ("files.py", "os.write"),  # files on disk
        ("cli/__init__.py", "sys.stderr.write"),  # "error: interrupted", while the printer is still being loaded
    }
    found = [
        f"{where}:{line} {name}"
        for path in sorted(SRC.rglob("*.py"))
        if not (where := path.relative_to(SRC).as_posix()).startswith(OWN)
        for line, name in _writes(ast.parse(path.read_bytes()))
        if (where, name) not in allowed
    ]
    assert found == []


def _is_tame(text: str) -> bool:
    return not any(c in text for c in "\x1b\x07\x08\x7f\x9b\u202e\u200b\u2066\ufeff\r\x0b\x0c\x00")


@given(st.text(alphabet=st.characters()))
def test_plain_text_has_no_character_that_acts(text: str) -> None:
    shown = plain(text)
    assert shown.isprintable() or shown == ""
    assert "\n" not in shown
    assert _is_tame(lines(text))
    assert plain(shown) == shown


def _project(folder: Path) -> None:
    """A checkpoint, a log, a config, code and an incident, with hostile names wherever a name can stand."""
    torch.save({HOSTILE: torch.full((4, 4), float("nan")), "step": 3}, folder / "model.pt")
    (folder / f"b{HOSTILE.replace('/', '')}.pt").write_bytes(b"rubbish")
    record = {"step": 1, "loss": float("nan"), HOSTILE: 2.0}
    (folder / "log.jsonl").write_text("".join(json.dumps({**record, "step": i}) + "\n" for i in range(5)))
    (folder / "train.py").write_text(
        f"import torch\n# {HOSTILE[:9]}\nx = torch.log(torch.softmax(y, -1))  # {HOSTILE!r}\n"
    )
    (folder / "config.yaml").write_text(json.dumps({"lr": 1e-3, HOSTILE: "fp16", "fp16": True, "bf16": True}))
    make_incident(folder / "runs" / "a", 3, file=HOSTILE, function=HOSTILE, op=HOSTILE, why=HOSTILE, code=[HOSTILE])
    (folder / "runs" / "a" / "steps.jsonl").write_text(json.dumps({"step": 1, "loss": 1.0, HOSTILE: 1.0}) + "\n")


VERBS = (
    ["scan", "."], ["scan", "model.pt", "--policy", "weights-only"], ["lint", "train.py"],
    ["lint", "--diff", "train.py"],
    ["lint", f"gone{HOSTILE}.py"], ["harden", "config.yaml"], ["diagnose", "."], ["diagnose", "log.jsonl"],
    ["locate", "runs/a/incidents/000003"], ["watch", "--once", "runs/a"], ["watch", "--once", "log.jsonl"],
    ["report", "log.jsonl", "--out", "report.md"], ["explain", HOSTILE], ["smoke", f"gone{HOSTILE}.py"],
    ["rollout", f"gone{HOSTILE}.yaml"], ["case", HOSTILE], ["run", f"gone{HOSTILE}.py"],
)  # fmt: skip


@pytest.mark.parametrize("ascii_only", [False, True], ids=["utf8", "ascii"])
def test_no_verb_lets_a_name_out_of_a_file_act(tmp_path: Path, ascii_only: bool) -> None:
    _project(tmp_path)
    code = """
        import io, json, sys
        from nanproof.cli import main
        for arguments in json.loads(sys.stdin.read()):
            sys.argv = ["nanproof", *arguments]
            try:
                main()
            except SystemExit as end:
                sys.stdout.flush()
                print("\\n<<end>>", json.dumps(arguments), end.code, flush=True)
    """
    import textwrap

    run = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], input=json.dumps(VERBS), capture_output=True, cwd=tmp_path,
        timeout=600, text=True, encoding="utf-8", errors="surrogateescape",
        env=os.environ | {"PYTHONIOENCODING": "ascii:strict" if ascii_only else "utf-8", "COLUMNS": "120"},
    )  # fmt: skip
    assert run.stdout.count("<<end>>") == len(VERBS), run.stderr[-2000:]
    for part in (*run.stdout.split("\n<<end>>"), *run.stderr.split("\n")):
        assert _is_tame(part), part[:2000]
        assert "Traceback" not in part
        assert "UnicodeEncodeError" not in part
    assert "OWNED" in run.stdout
    assert " 130" not in run.stdout


def test_a_terminal_gets_our_colors_and_no_others(tmp_path: Path) -> None:
    import pty

    _project(tmp_path)
    main, side = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "nanproof", "scan", "model.pt"], stdout=side, stderr=side, stdin=side, cwd=tmp_path,
        env=os.environ | {"TERM": "xterm"},
    )  # fmt: skip
    process.wait(timeout=600)
    os.close(side)
    shown = b""
    while True:
        try:
            piece = os.read(main, 1 << 16)
        except OSError:
            break
        if not piece:
            break
        shown += piece
    os.close(main)
    assert b"\x1b[31mCORRUPT" in shown
    assert b"\x1b]" not in shown
    assert b"\x1b[2J" not in shown
    assert shown.count(b"\x1b") == 2 * shown.count(b"\x1b[0m")
