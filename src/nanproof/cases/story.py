"""The story of a case, stage by stage: a run dies, is read, guarded, located, repaired and compared.

Every stage is a command that a user would type. It runs in a process of its own and prints what it prints.
"""

from __future__ import annotations

import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from .. import files
from .catalogue import Case

Tell = Callable[[str], None]
REPORT = "report.html"
FIRST, LAST = 30, 8
"""How many lines of a training are shown; those between are kept, and counted on the screen."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """One command, and how it ends when all is as it should be."""

    title: str
    words: tuple[str, ...]
    ends: tuple[int, ...] = (0,)
    """Exit codes that are right here: nanproof says with 1 that it found something."""
    trains: bool = False

    @property
    def typed(self) -> str:
        """The command as a user types it."""
        python = [sys.executable, "-m"]
        words = list(self.words)
        if words[:2] == python:
            words = words[2:] if words[2] == "nanproof" else ["python", *words[1:]]
        return shlex.join(words)


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """A stage that was run."""

    stage: Stage
    code: int
    lines: tuple[str, ...]

    @property
    def ok(self) -> bool:
        return self.code in self.stage.ends


def tell_story(case: Case, out: Path, *, seed: int, tell: Tell) -> list[Told]:
    """Run the stages in order, each as soon as the one before it has ended as it should."""
    told: list[Told] = []
    for number, stage in enumerate(stages(case, out, seed), start=1):
        tell(f"\n{number}. {stage.title}\n   $ {stage.typed}")
        told.append(run_stage(stage, tell))
        if not told[-1].ok:
            tell(f"   ended with {told[-1].code}, not {' or '.join(map(str, stage.ends))}: the story ends here")
            break
    return told


def stages(case: Case, out: Path, seed: int) -> Iterator[Stage]:
    """The stages; later ones look at what earlier ones left."""
    python, nanproof = (sys.executable, "-m"), (sys.executable, "-m", "nanproof")
    code = copy_code(case, out / "code")

    def program(config: str, name: str) -> tuple[str, ...]:
        named = ("--config-name", config, "--seed", str(seed), "--out", str(out / name))
        return (f"{case.module}.train", *named)

    yield Stage(
        title="The original trains, unguarded, and dies", words=(*python, *program("original", "original")), trains=True
    )
    yield Stage(
        title="Which of its checkpoints is still good?",
        words=(*nanproof, "scan", str(out / "original" / "checkpoints")),
        ends=(0, 1),
    )
    yield Stage(title="Why did it die?", words=(*nanproof, "diagnose", str(out / "original")), ends=(1,))
    guard = out / "guard"
    yield Stage(
        title="The same program again, unmodified, under the guard",
        words=(*nanproof, "run", "--run-dir", str(guard), "-m", *program("original", "guarded")),
        ends=(0, 66),
        trains=True,
    )
    yield Stage(
        title="Which operation broke, and is that proved?",
        words=(*nanproof, "locate", str(guard), "--step", case.step),
        ends=(1,),
    )
    yield Stage(
        title="What lint would repair in its code",
        words=(*nanproof, "lint", "--unsafe-fixes", "--diff", str(code)),
        ends=(0, 1),
    )
    facts = tuple(word for fact in (f"cause={case.cause}", *case.facts) for word in ("--fact", fact))
    yield Stage(
        title="What the config should say instead",
        words=(*nanproof, "harden", str(code / "configs" / "original.yaml"), "--diff", *facts),
        ends=(0, 1),
    )
    yield Stage(title="The stable variant trains", words=(*python, *program("stable", "stable")), trains=True)
    yield Stage(
        title="Both curves on one page",
        words=(*nanproof, "report", str(out / "original"), str(out / "stable"), "-o", str(out / REPORT)),
    )


def copy_code(case: Case, to: Path) -> Path:
    """The original as its user has it: in a folder of his own, where it can be changed, and before it was healed."""
    for source in sorted(case.folder.rglob("*")):
        ours = "stable" in source.stem or source.stem in ("__init__", "claims", "rollout")
        if source.suffix in (".py", ".yaml") and not ours:
            target = to / source.relative_to(case.folder)
            files.make_folder(target.parent)
            files.write_atomic(target, source.read_bytes())
    return to


def run_stage(stage: Stage, tell: Tell) -> Told:
    """Run one command and pass on what it prints."""
    lines: list[str] = []
    with subprocess.Popen(stage.words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as child:
        assert child.stdout is not None
        for line in child.stdout:
            lines.append(line.rstrip("\n"))
            if not stage.trains or len(lines) <= FIRST:
                tell(f"   {lines[-1]}")
    rest = lines[FIRST:] if stage.trains else []
    if len(rest) > LAST:
        tell(f"   … {len(rest) - LAST} lines more …")
    for line in rest[-LAST:]:
        tell(f"   {line}")
    return Told(stage=stage, code=child.returncode, lines=tuple(lines))
