"""Nothing reaches the terminal but through `nanproof.text`, and nothing from a file is obeyed by it."""

from __future__ import annotations

import ast
import json
import os
import random
import subprocess
import sys
import unicodedata
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import nanproof
from nanproof.text import lines, plain
from support.forked import run_python
from support.incidents import make_incident

SRC = Path(nanproof.__file__).parent
# The one that prints, and programs of their own that are only shown as examples.
OWN = ("text.py", "cases/")

HOSTILE = "w\x1b]0;OWNED\x07\x1b]52;c;b3duZWQ=\x07\x1b[2J\x1b[31m\x9b31m\u202eevil\u200b\x08\x7f"
# Characters that act on a terminal, or on how a line is read, and the beginnings and ends of sequences.
ACTING = [
    *map(chr, range(1, 32)),
    *map(chr, range(0x7F, 0xA0)),
    *"\u061c\u200b\u200e\u200f\u2028\u2029\u202a\u202e\u2066\u2069",
    "\ufeff",
    "\ufff9",
    "\U000e0041",
    "\x1b[2J",
    "\x1b[8m",
    "\x1b]8;;http://x\x07",
    "\x1bP$q\x1b\\",
    "\x9b31m",
]


def hostile_name(seed: int) -> str:
    """One way to be hostile, other than `HOSTILE`; can be the name of a file and of a module."""
    rng = random.Random(seed)
    parts = [*rng.choices(ACTING, k=12), *rng.choices(["[red]", "[/]", "%s", "{0}", "é", "→", "名", " "], k=4), "OWNED"]
    rng.shuffle(parts)
    return "w" + "".join(parts).replace("/", "").replace(".", "")


PRINTERS = """
print pprint input click.echo click.secho click.style click.echo_via_pager Console rich.print
rich.console.Console os.write logging.StreamHandler logging.basicConfig logging.warning logging.error warnings.warn
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
        ("run/console.py", "logging.StreamHandler"),  # with the filter of the printer
        ("run/launcher.py", "sys.stderr.write"),  # what the user's own program said as it ended
        ("run/startup/sitecustomize.py", "sys.stderr.write"),  # where nanproof itself cannot be imported
        ("cli/lint.py", "sys.stdout.buffer.write"),  # the user's own code, repaired, bytes for bytes
        ("files.py", "os.write"),  # files on disk
        ("locating/apart.py", "os.write"),  # a pipe between a replay and its child process
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
    return all(c in "\n\t" or unicodedata.category(c) not in ("Cc", "Cf", "Cs", "Zl", "Zp") for c in text)


@given(st.text(alphabet=st.characters()))
def test_plain_text_has_no_character_that_acts(text: str) -> None:
    shown = plain(text)
    assert shown.isprintable() or shown == ""
    assert "\n" not in shown
    assert _is_tame(lines(text))
    assert plain(shown) == shown


def _project(folder: Path, name: str = HOSTILE) -> None:
    """A checkpoint, a log, a config, code and an incident, with hostile names wherever a name can stand."""
    torch.save({name: torch.full((4, 4), float("nan")), "step": 3}, folder / "model.pt")
    (folder / f"b{name.replace('/', '')}.pt").write_bytes(b"rubbish")
    record = {"step": 1, "loss": float("nan"), name: 2.0}
    (folder / "log.jsonl").write_text("".join(json.dumps({**record, "step": i}) + "\n" for i in range(5)))
    (folder / "train.py").write_text(
        f"import torch\n# {HOSTILE[:9]}\nx = torch.log(torch.softmax(y, -1))  # {name!r}\n"
    )
    (folder / "config.yaml").write_text(json.dumps({"lr": 1e-3, name: "fp16", "fp16": True, "bf16": True}))
    (folder / "plan.yaml").write_text(json.dumps({"stages": [{"name": name, "gate": name}], name: [name]}))
    (folder / "program.py").write_text(PROGRAM.format(name=name))
    make_incident(folder / "runs" / "a", 3, file=name, function=name, op=name, why=name, code=[name])
    (folder / "runs" / "a" / "steps.jsonl").write_text(json.dumps({"step": 1, "loss": 1.0, name: 1.0}) + "\n")


PROGRAM = """
import torch

torch.manual_seed(0)
model = torch.nn.Sequential()
model.add_module({name!r}.replace(".", ""), torch.nn.Linear(4, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(5):
    x = torch.randn(8, 4)
    loss = model(x).pow(2).mean()
    if step == 3:
        loss = (model(x) * 0).sqrt().mean()  # finite, with gradients that are not
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


def verbs(name: str) -> list[list[str]]:
    """Every verb, given what `_project` made and things that are not there."""
    return [
        [],
        ["scan", "."],
        ["scan", "model.pt", "--policy", "weights-only"],
        ["scan", "model.pt", "--against", "model.pt"],
        ["scan", f"gone{name}"],
        ["lint", "train.py"],
        ["lint", "--diff", "train.py"],
        ["lint", f"gone{name}.py"],
        ["harden", "config.yaml"],
        ["harden", f"gone{name}.yaml"],
        ["diagnose", "."],
        ["diagnose", "log.jsonl"],
        ["diagnose", "."],
        ["locate", "runs/a/incidents/000003"],
        ["locate", f"gone{name}"],
        ["watch", "--once", "runs/a"],
        ["watch", "--once", "log.jsonl"],
        ["watch", "--once", f"gone{name}"],
        ["report", "log.jsonl", "--out", "report.md"],
        ["explain", name],
        ["smoke", f"gone{name}.py"],
        ["smoke", "program.py", "--steps", "5"],
        ["rollout", f"gone{name}.yaml"],
        ["rollout", "plan.yaml"],
        ["case", name],
        ["cure", "--", "python", f"gone{name}.py"],
        ["cure", f"gone{name}"],
        ["cure", "--undo"],
        ["run", f"gone{name}.py"],
        ["run", "--run-dir", "runs/b", "program.py"],
        ["locate", "runs/b"],
        ["watch", "--once", "runs/b"],
        ["report", "runs/b", "--out", "b.md"],
    ]


def test_every_verb_is_tried() -> None:
    from nanproof.cli.shell import nanproof

    assert {words[0] for words in verbs("x") if words} == set(nanproof.list_commands(None))


RUN_ALL = """
import json, sys
from nanproof.cli import main
encoding, errors = sys.argv[1].split(":")
for stream in (sys.stdout, sys.stderr):  # what PYTHONIOENCODING does at the start of a process
    stream.reconfigure(encoding=encoding, errors=errors if stream is sys.stdout else "backslashreplace")
for arguments in json.loads(sys.argv[2]):
    sys.argv = ["nanproof", *arguments]
    try:
        main()
    except SystemExit as end:
        sys.stdout.flush()
        print("\\n<<end>>", json.dumps(arguments), end.code, flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "encoding"),
    [(HOSTILE, "utf-8:strict"), (HOSTILE, "ascii:strict"), (hostile_name(0), "utf-8:strict")],
    ids=["utf8", "ascii", "drawn"],
)
def test_no_verb_lets_a_name_out_of_a_file_act(tmp_path: Path, name: str, encoding: str) -> None:
    _project(tmp_path, name)
    every = verbs(name)
    environment = os.environ | {"PYTHONIOENCODING": encoding, "COLUMNS": "120"}
    given = ("-c", RUN_ALL, encoding, json.dumps(every))
    run = run_python(*given, cwd=tmp_path, environment=environment, apart=True)
    assert run.stdout.count("<<end>>") == len(every), run.stderr[-2000:]
    for part in (*run.stdout.split("\n<<end>>"), *run.stderr.split("\n")):
        assert _is_tame(part), part[:2000]
        assert "Traceback" not in part
        assert "UnicodeEncodeError" not in part
    assert "OWNED" in run.stdout
    assert "OWNED" in run.stderr  # what the guard says of a module
    assert " 130" not in run.stdout


def test_what_the_guard_logs_is_cleaned_for_any_handler(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = torch.nn.Sequential()
    model.add_module(HOSTILE, torch.nn.Linear(2, 2))
    guard = nanproof.Guard(model, torch.optim.SGD(model.parameters(), lr=0.1), run_dir=tmp_path / "run")
    with caplog.at_level("INFO", logger="nanproof"):
        guard.step(lambda: (model(torch.ones(1, 2)) * 0).sqrt().mean())
        guard.close()
    assert "OWNED" in caplog.text
    assert all(_is_tame(record.getMessage()) for record in caplog.records)


def test_a_terminal_gets_our_colors_and_no_others(tmp_path: Path) -> None:
    import pty

    _project(tmp_path)
    main, side = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "nanproof", "scan", "model.pt"],
        stdout=side,
        stderr=side,
        stdin=side,
        cwd=tmp_path,
        env=os.environ | {"TERM": "xterm"},
    )
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
