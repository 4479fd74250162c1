"""Score on the labeled set: how often nanproof and its peers name the line that broke the step.

    python scripts/locate_score.py                  # each program, expected and got, then the table
    python scripts/locate_score.py --only log       # programs whose name contains "log"
    python scripts/locate_score.py --write          # also put the table into docs/locate.md

A line is right when it is marked ``# BAD`` in the program; a bad leaf is right when its name is. A tool that says
nothing, or fails itself, is not right. On healthy programs anything it says is a false alarm.
"""

from __future__ import annotations

import argparse
import io
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from support.programs import FOLDER, Program, load, module_of, quietly, run  # noqa: E402

PAGE = ROOT / "docs" / "locate.md"
BEGIN, END = "<!-- score: begin -->", "<!-- score: end -->"
SIDES = ("forward", "backward", "leaf")


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What a tool said about one program; nothing at all when it did not notice."""

    alarm: bool = False
    file: str = ""
    line: int = 0
    module: str | None = None
    leaf: str = ""
    failed: str = ""
    """Why the tool itself failed."""
    location: Any = None
    """nanproof's own answer, for the details."""

    @property
    def place(self) -> str:
        return self.leaf or (f"{Path(self.file).name}:{self.line}" if self.line else self.failed or "nothing")


Tool = Callable[[Program], Answer]


def ask_nanproof(program: Program) -> Answer:
    import nanproof

    model, batch, step = program.make()
    found = nanproof.locate(step, model=model, batch=batch)
    if not found.reproduced:
        return Answer(location=found)
    root = {type(m).__name__ for m in (model, getattr(model, "_orig_mod", model))}
    module = re.sub(r"(^|\.)_orig_mod", "", found.module or "")
    return Answer(
        alarm=True,
        file=str(found.file or ""),
        line=found.line or 0,
        leaf=str(found.leaf or ""),
        module="" if module in root else module,  # the model itself has no path: its class is as good a name
        location=found,
    )


def ask_anomaly_mode(program: Program) -> Answer:
    """The innermost line of the user's in the forward traceback that it warns with."""
    model, batch, step = program.make()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            with torch.autograd.detect_anomaly():
                step(model, batch).backward()
        except RuntimeError as error:
            if "returned nan values" not in str(error):
                raise
        else:
            return Answer()
    for warning in caught:
        text = str(warning.message)
        if "Traceback of forward call that caused the error" in text:
            frames = [(f, int(n)) for f, n in re.findall(r'File "([^"]+)", line (\d+)', text) if str(FOLDER) in f]
            return Answer(alarm=True, file=frames[-1][0], line=frames[-1][1]) if frames else Answer(alarm=True)
    return Answer(alarm=True)


def ask_transformers(program: Program) -> Answer:
    """The last module that DebugUnderflowOverflow prints, and the weight if it says that one is bad."""
    from transformers.debug_utils import DebugUnderflowOverflow

    model, batch, step = program.make()
    debug = DebugUnderflowOverflow(model)
    printed = io.StringIO()
    with redirect_stdout(printed):
        try:
            step(model, batch).backward()
        except ValueError as error:
            if "inf/nan detected" not in str(error):
                raise
        else:
            return Answer()
    module, leaf = "", ""
    for line in printed.getvalue().splitlines():
        if line.startswith(debug.prefix + " ") and "***" not in line:
            module, leaf = line[len(debug.prefix) + 1 :].rsplit(" ", 1)[0], ""
        elif {"nan", "inf"} & set(line.split()[:2]) and not re.search(r"(input|output)(\[\d+\])*$", line):
            leaf = f"parameter {module}.{line.split()[-1]}"
    return Answer(alarm=True, module=re.sub(r"(^|\.)_orig_mod", "", module), leaf=leaf)


def ask_debug_mode(program: Program) -> Answer:
    """The first operation with a bad output that torch's DebugMode records, asked through its dispatch hook."""
    from torch.utils._debug_mode import DebugMode

    def finite(_function: Any, _types: Any, _args: Any, _kwargs: Any, result: Any) -> dict[str, bool] | None:
        # forward-mode AD has tensors without memory: reading one would end the process
        tensors = [t for t in tree_leaves(result) if isinstance(t, Tensor) and not t.is_meta and not t._is_zerotensor()]
        bad = [t for t in tensors if t.is_floating_point() and not t.is_sparse and not t.isfinite().all()]
        return {"bad": True} if bad else None

    model, batch, step = program.make()
    with DebugMode(record_stack_trace=True) as mode, DebugMode.dispatch_hooks(record_hook=finite):
        step(model, batch).backward()
    for call in mode.operators:
        if (getattr(call, "record", None) or {}).get("bad"):
            trace = (getattr(call, "fwd_stack_trace", "") or "") or (call.stack_trace or "")
            frames = [(f, int(n)) for f, n in re.findall(r'File "([^"]+)", line (\d+)', trace) if str(FOLDER) in f]
            return Answer(alarm=True, file=frames[-1][0], line=frames[-1][1]) if frames else Answer(alarm=True)
    return Answer()


def ask_forward_hooks(program: Program) -> Answer:
    """The first module with an output that is not finite: the checker that everyone writes once."""
    model, batch, step = program.make()
    found: list[str] = []

    def watch(name: str) -> Callable[[nn.Module, Any, Any], None]:
        def hook(_: nn.Module, _args: Any, out: Any) -> None:
            tensors = [t for t in tree_leaves(out) if isinstance(t, Tensor) and not t.is_nested and not t.is_sparse]
            if not all(t.isfinite().all() for t in tensors):
                found.append(name)

        return hook

    for name, module in model.named_modules():
        module.register_forward_hook(watch(re.sub(r"(^|\.)_orig_mod", "", name)))
    step(model, batch).backward()
    return Answer(alarm=True, module=found[0]) if found else Answer()


TOOLS: dict[str, Tool] = {
    "nanproof.locate": ask_nanproof,
    "torch detect_anomaly": ask_anomaly_mode,
    "torch DebugMode with isfinite": ask_debug_mode,
    "transformers DebugUnderflowOverflow": ask_transformers,
    "forward hooks with isfinite": ask_forward_hooks,
}
NAMES_LINES = ("nanproof.locate", "torch detect_anomaly", "torch DebugMode with isfinite")
NAMES_MODULES = ("nanproof.locate", "transformers DebugUnderflowOverflow", "forward hooks with isfinite")
NAMES_LEAVES = ("nanproof.locate", "transformers DebugUnderflowOverflow")


def available() -> dict[str, Tool]:
    """nanproof only when it can locate, transformers only when it is installed."""
    tools = dict(TOOLS)
    import nanproof

    if not callable(getattr(nanproof, "locate", None)):
        del tools["nanproof.locate"]
    try:
        import transformers  # noqa: F401
    except ImportError:
        del tools["transformers DebugUnderflowOverflow"]
    return tools


def side(program: Program) -> str:
    """Where a program is counted; a value from outside counts where it shows first."""
    if program.phase[0] != "outside":
        return program.phase[0]
    return "backward" if run(program).loss_finite else "forward"


def line_right(program: Program, answer: Answer) -> bool:
    if program.phase[0] == "leaf":
        return leaf_right(program, answer)
    return Path(answer.file).name == program.file.name and answer.line in program.bad


def leaf_right(program: Program, answer: Answer) -> bool:
    return any(re.match(rf"{re.escape(name)}(?![\w.])", answer.leaf) for name in program.leaf)


def index_right(program: Program, answer: Answer) -> bool:
    """Whether the numbers after the name are the index, however they are punctuated."""
    if program.index is None or not leaf_right(program, answer):
        return False
    name = max((n for n in program.leaf if answer.leaf.startswith(n)), key=len)
    found = re.search(r"\[([\d, ]+)\]|\(([\d, ]+)\)", answer.leaf[len(name) :])
    return found is not None and tuple(map(int, re.findall(r"\d+", found.group()))) == program.index


@dataclass
class Tally:
    """Right answers of one tool, with the number of questions."""

    right: dict[str, int] = field(default_factory=dict)
    asked: dict[str, int] = field(default_factory=dict)

    def count(self, what: str, right: bool) -> None:
        self.asked[what] = self.asked.get(what, 0) + 1
        self.right[what] = self.right.get(what, 0) + right

    def show(self, what: str) -> str:
        return f"{self.right.get(what, 0)} of {self.asked.get(what, 0)}"


@contextmanager
def undisturbed() -> Iterator[None]:
    """A tool that leaves a dispatch mode or anomaly mode behind must not spoil the next one."""
    torch.compiler.reset()
    with quietly():
        yield
    assert not torch.is_anomaly_enabled()


def ask(tool: Tool, program: Program) -> Answer:
    try:
        with undisturbed():
            return tool(program)
    except Exception as error:  # a tool that fails has no answer; its own fault is shown
        return Answer(failed=f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[:100])


def details(program: Program, answer: Answer, tally: Tally) -> str:
    """One line on nanproof's answer, counted part by part."""
    found = answer.location
    expected = program.leaf[0] if program.leaf else f"{program.file.name}:{'/'.join(map(str, sorted(program.bad)))}"
    if found is None or not answer.alarm:
        parts = dict.fromkeys(("phase", "mechanism", "verified"), False)
        said = answer.place
    else:
        parts = {
            "phase": found.phase in program.phase,
            "mechanism": found.mechanism in program.mechanism,
            "verified": bool(found.verified),
        }
        said = f"{answer.place} {found.phase} {found.mechanism}{' verified' if found.verified else ''}"
    right = line_right(program, answer)
    tally.count("line", right)
    tally.count("wrong but verified", parts["verified"] and not right)
    if program.also or len(program.bad) > 1:
        del parts["verified"]  # healing one of several origins does not heal the step
    for part, good in parts.items():
        tally.count(part, good)
    if program.index is not None:
        tally.count("index", index_right(program, answer))
    if program.also:
        lines = {origin.line for origin in found.also} if found is not None and answer.alarm else set()
        tally.count("other origins", program.also <= lines)
    wanted = f"{expected} {'|'.join(program.phase)} {'|'.join(program.mechanism)}"
    mark = "ok   " if right and all(parts.values()) else "line " if right else "WRONG"
    return f"{mark} {program.name}\n        expected {wanted}\n        got      {said}"


def score(programs: list[Program], tools: dict[str, Tool]) -> dict[str, Tally]:
    tallies = {name: Tally() for name in tools}
    for program in programs:
        where = "" if program.healthy else side(program)
        module = None if program.healthy else module_of(program)
        for name, tool in tools.items():
            answer, tally = ask(tool, program), tallies[name]
            if program.healthy:
                tally.count("false alarms", answer.alarm)
                if name == "nanproof.locate" and (answer.alarm or answer.failed):
                    print(f"ALARM {program.name}\n        got      {answer.place}")
                continue
            tally.count(f"{where} lines", line_right(program, answer))
            if module is not None and where != "leaf":
                tally.count(f"{where} modules", answer.alarm and answer.module == module)
            if answer.failed:
                tally.count("failed", True)
            if name == "nanproof.locate":
                print(details(program, answer, tally))
    return tallies


def table(tallies: dict[str, Tally]) -> str:
    head = ("", "forward lines", "backward lines", "forward modules", "backward modules", "bad leaves", "false alarms")
    rows = [head, ("---",) * len(head)]
    for name, tally in tallies.items():
        lines = [tally.show(f"{s} lines") if name in NAMES_LINES else "–" for s in SIDES[:2]]
        modules = [tally.show(f"{s} modules") if name in NAMES_MODULES else "–" for s in SIDES[:2]]
        leaves = tally.show("leaf lines") if name in NAMES_LEAVES else "–"
        rows.append((f"`{name}`", *lines, *modules, leaves, tally.show("false alarms")))
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def write(text: str) -> None:
    from nanproof.files import write_atomic

    page = PAGE.read_text() if PAGE.exists() else ""
    if BEGIN not in page or END not in page:
        sys.exit(f"docs/{PAGE.name} has no {BEGIN} … {END} to write the table into")
    before, after = page.split(BEGIN)[0], page.split(END, 1)[1]
    write_atomic(PAGE, f"{before}{BEGIN}\n{text}\n{END}{after}")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", default="", metavar="NAME", help="programs whose name contains NAME")
    parser.add_argument("--write", action="store_true", help="put the table into docs/locate.md")
    options = parser.parse_args()
    if options.only and options.write:
        parser.error("--write needs all programs: leave out --only")
    torch.set_num_threads(1)
    tallies = score([p for p in load() if options.only in p.name], available())
    ours = tallies.get("nanproof.locate")
    if ours is None:
        print("nanproof.locate is not there yet: only its peers were asked")
    else:
        parts = ("line", "phase", "mechanism", "verified", "wrong but verified", "index", "other origins")
        print("\nnanproof.locate: " + ", ".join(f"{part} {ours.show(part)}" for part in parts if part in ours.asked))
    failures = {name: tally.right["failed"] for name, tally in tallies.items() if "failed" in tally.right}
    for name, count in failures.items():
        print(f"{name} itself failed on {count} programs")
    print("\n" + table(tallies))
    if options.write:
        write(table(tallies))
    return 0


if __name__ == "__main__":
    sys.exit(main())
