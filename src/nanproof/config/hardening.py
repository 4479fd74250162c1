"""A stable variant of a config: every change with its reason, nothing changed without one.

hardening = harden("config.yaml", facts={"cause": "lr-too-high"})
print(hardening.diff)
hardening.save()          # config_stable.yaml, beside the original
hardening.apply()         # or in place, with undo
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from .. import journal
from ..errors import UsageError
from .case import DEFAULTS, Case
from .dialect import SECTIONS
from .edits import CannotEdit, format_of, set_value
from .evidence import Fact, Facts
from .ladder import TOP, advice, climb
from .literals import write
from .loading import SHELL
from .marks import Mark, mark
from .meaning import VOCABULARY, concepts_of
from .overrides import parse_override
from .project import Project
from .proposals import Proposal, Refusal
from .remedies import remedies
from .shellfile import flag_of
from .source import Source
from .value import Plain, Value, as_number, show


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One setting that is different in the stable variant: before, after, why."""

    key: str
    before: Plain
    """None when the setting was not written; ``default`` then says what was in force."""
    after: Plain
    why: str
    evidence: tuple[str, ...]
    mark: Mark
    remark: str
    """Why it is marked."""
    default: Plain = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Left:
    """Something that was considered and not changed."""

    what: str
    why: str
    mark: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardening:
    """The stable variant, not yet written anywhere."""

    path: str
    changes: tuple[Change, ...]
    left: tuple[Left, ...]
    next: tuple[str, ...]
    before: str
    after: str

    @property
    def beside(self) -> Path:
        """Where the variant goes by default: ``config_stable.yaml``."""
        path = Path(self.path)
        return path.with_name(f"{path.stem}_stable{path.suffix}")

    @property
    def diff(self) -> str:
        """The difference in unified form; '' when there is none."""
        lines = difflib.unified_diff(
            self.before.splitlines(keepends=True), self.after.splitlines(keepends=True), self.path, str(self.beside)
        )
        return "".join(line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in lines)

    def save(self, out: str | Path | None = None) -> Path:
        """Write the variant beside the original, which stays untouched; `undo` takes it back."""
        target = Path(out) if out is not None else self.beside
        if target.resolve() == Path(self.path).resolve():
            raise UsageError(
                f"{target} is the original", hint="give another name, or use --apply to change it in place"
            )
        self._write(target)
        return target

    def apply(self) -> Path:
        """Change the original in place; `undo` restores its exact bytes."""
        self._write(Path(self.path))
        return Path(self.path)

    def _write(self, target: Path) -> None:
        changes = [f"{c.key}: {show(c.before)} -> {show(c.after)}" for c in self.changes]
        details = {"config": str(Path(self.path).resolve()), "changes": changes}
        home = journal.home_of(Path(self.path))
        if not target.resolve().is_relative_to(home.resolve()):
            home = journal.home_of(target)  # a journal keeps to its own project
        seen = {Path(self.path): self.before.encode()} if target == Path(self.path) else {}
        journal.apply({target: self.after.encode()}, home=home, why=f"harden {self.path}", details=details, seen=seen)


def undo(path: str | Path) -> tuple[Path, ...]:
    """Take back the last hardening of a config: exact bytes, or the variant removed."""
    home = journal.home_of(Path(path))
    named = str(Path(path).resolve())
    done = [a for a in journal.applications(home) if a.details.get("config") == named]
    if not done:
        raise UsageError(f"no hardening of {path} is left to undo", hint="run it where the config was hardened")
    return journal.undo(home, done[-1].id)


def harden(
    config: str | Path,
    *,
    set: Mapping[str, Plain] | Iterable[str] = (),
    facts: Mapping[str, Plain] | Iterable[Fact] = (),
    project: Project | None = None,
    conservative: bool = False,
    escalate: int | None = None,
) -> Hardening:
    """Work out a stable variant of a config. Nothing is written until `Hardening.save` or `Hardening.apply`.

    ``set`` are changes that are wanted in any case, as a mapping or as words like ``lr=5e-5``. ``facts`` are what is
    known of the run (see `nanproof.config.evidence.KNOWN`). Without evidence nothing else is changed, unless
    ``conservative`` or ``escalate`` (1 to 5) ask for the classic ladder.
    """
    if escalate is not None and not 1 <= escalate <= TOP:
        raise UsageError(f"there is no level {escalate}", hint=f"--escalate takes 1 to {TOP}")
    known = Facts.of(facts)
    Source.read(config)  # what is no file is said before the project is read
    around = (project if project is not None else Project.around(Path(config))).with_facts(known.plain())
    case = Case.of(str(Path(config)), around, known)
    asked = [_asked(case, words) for words in _words(set)]
    taken = {p.key for p in asked}
    level = escalate if escalate is not None else 0 if conservative else None
    answers = [*asked, *remedies(case), *(climb(case, level) if level is not None else ())]
    builder = _Builder(case)
    low, rate = case.meaning.number("min_lr"), next((as_number(p.after) for p in asked if _is(p, "lr")), None)
    if low is not None and rate is not None and low >= rate and not any(_is(p, "min_lr") for p in asked):
        builder.leave(Left(what="min_lr", why=f"it is {low:g}, not below the new rate {rate:g}: set it too"))
    for answer in answers:
        if isinstance(answer, Refusal):
            if answer.what not in map(_label, taken):
                builder.leave(Left(what=answer.what, why=answer.why, mark=answer.mark))
        elif answer.asked or answer.key not in taken:
            taken.add(answer.key)
            builder.make(answer)
    builder.tell_the_rest()
    return builder.finish(tuple(advice(case, level)) if level is not None else ())


def _words(set: Mapping[str, Plain] | Iterable[str]) -> list[tuple[str, Plain]]:
    if isinstance(set, Mapping):
        return list(set.items())
    changes = [parse_override(word) for word in set]
    for change in changes:
        if change.kind not in ("set", "add", "force") or isinstance(change.value, dict):
            raise UsageError(f"{change.text!r} is not one setting", hint="write key=value: optimizer.lr=5e-5")
    return [(change.key, change.value) for change in changes]


def _asked(case: Case, words: tuple[str, Plain]) -> Proposal:
    """A change that the user wants, with the key that is meant."""
    key, after = words
    several = [k for k in case.settings.values if k.endswith(f".{key}")]
    held = case.settings.find(key)
    if held is None and Path(case.path).suffix.lower() in SHELL:
        flag = flag_of(Source.read(case.path).text, key)
        held = case.settings.find(flag.replace("-", "_")) if flag else None
    if held is None and len(several) > 1:
        raise UsageError(f"{key} may mean {', '.join(several[:4])}", hint="give the whole key")
    held = held or (case.value(key) if key in VOCABULARY else None)
    if held is None:
        _refuse_unknown(case, key)
        _refuse_other_name(case, key)
        named = case.key(key) if key in VOCABULARY else None
        tool = f"{case.dialect}." if case.dialect in ("accelerate", "deepspeed") else ""
        key = named or f"{tool}{key}"
    else:
        key = held.key
    return Proposal(key=key, after=after, why="asked for", asked=True)


def _refuse_unknown(case: Case, key: str) -> None:
    """A key that neither the config nor any trainer knows is a typo."""
    if key in VOCABULARY or concepts_of(key) or not len(case.settings):
        return
    known = [*case.settings.values, *(n for names in VOCABULARY.values() for n in names)]
    close = difflib.get_close_matches(key, known, n=1, cutoff=0.6)
    near = close or difflib.get_close_matches(key.rpartition(".")[2], known, n=1, cutoff=0.6)
    parent = key.rpartition(".")[0]
    if parent and any(k.startswith(f"{parent}.") for k in case.settings.values) and not near:
        return  # a new key in a section that exists
    hint = f"did you mean {near[0]}?" if near else "give a key that the config sets"
    raise UsageError(f"{case.path} has no key {key!r}", hint=hint)


def _refuse_other_name(case: Case, key: str) -> None:
    """A key for what the config sets under another name would be read by nobody, or fight with it."""
    for concept, _ in concepts_of(key)[:1]:
        held = case.value(concept)
        if held is not None and held.path == case.path:
            raise UsageError(
                f"{case.path} has no key {key!r}: it sets {_label(held.key)} ({held.where})",
                hint=f"did you mean {_label(held.key)}?",
            )
    if case.dialect == "deepspeed" and not any(key.startswith(section) for section in SECTIONS):
        raise UsageError(
            f"DeepSpeed reads no key {key!r} from {case.path}", hint=f"its sections are {', '.join(SECTIONS)}"
        )


def _is(proposal: Proposal, concept: str) -> bool:
    return concept in {c for c, _ in concepts_of(proposal.key)}


class _Builder:
    """Makes the changes one by one; what cannot be made is left with the reason."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.source = self.original = Source.read(case.path)
        self.changes: list[Change] = []
        self.left: list[Left] = []

    def leave(self, left: Left) -> None:
        if left not in self.left:
            self.left.append(left)

    def make(self, proposal: Proposal) -> None:
        held = _own(self.case, proposal.key) or self.case.settings.get(proposal.key)
        if held is not None and write(proposal.after, format_of(self.case.path), held.text) == held.text:
            self.leave(Left(what=_label(proposal.key), why=f"it is {show(held.value)} already ({held.where})"))
            return
        worth, remark = mark(self.case, proposal)
        if worth == "dead" and not proposal.asked:
            self.leave(Left(what=_label(proposal.key), why=f"{proposal.why}, but {remark}", mark="dead"))
            return
        try:
            self.source = set_value(self.source, _here(self.case, proposal.key), proposal.after)
        except CannotEdit as error:
            if proposal.asked:  # what was asked for is done, or refused aloud
                raise
            where = f" (its value stands in {held.where})" if held is not None and held.path != self.case.path else ""
            self.leave(Left(what=_label(proposal.key), why=f"{proposal.why}, but {error.message}{where}"))
            return
        default = next((DEFAULTS.get(self.case.dialect, {}).get(c) for c, _ in concepts_of(proposal.key)), None)
        self.changes.append(
            Change(
                key=_label(proposal.key),
                before=_before(held, proposal.after),
                after=proposal.after,
                why=proposal.why,
                evidence=proposal.evidence,
                mark=worth,
                remark=remark,
                default=default if held is None else None,
            )
        )

    def tell_the_rest(self) -> None:
        """What the checks found and no remedy took up, dead settings above all."""
        told = {c.key for c in self.changes} | {left.what for left in self.left}
        for finding in self.case.findings:
            here = (finding.path, finding.line, finding.column)
            value = next((v for v in self.case.settings if (v.path, v.line, v.column) == here), None)
            if value is None or told & {value.label, "precision"}:
                continue
            self.leave(Left(what=value.label, why=finding.message, mark="dead" if finding.code == "NP710" else ""))

    def finish(self, steps: tuple[str, ...]) -> Hardening:
        return Hardening(
            path=self.case.path,
            changes=tuple(self.changes),
            left=tuple(self.left),
            next=steps,
            before=self.original.whole,
            after=self.source.whole,
        )


def _before(held: Value | None, after: Plain) -> Plain:
    """What stood there; the text of it when only the way of writing changes."""
    if held is None:
        return None
    return held.text if held.value == after else held.value


def _label(key: str) -> str:
    """The key as it stands in its file."""
    return key.removeprefix("deepspeed.").removeprefix("accelerate.")


def _own(case: Case, key: str) -> Value | None:
    """What the config itself says, whoever overrides it."""
    return next((v for v in reversed(case.settings.history.get(key, ())) if v.path == case.path), None)


def _here(case: Case, key: str) -> str:
    """The key in the config itself. What another file of a Hydra config says is overridden from the main one."""
    held = case.settings.get(key)
    if held is None or _own(case, key) is not None:
        return key
    if not _comes_last(case):
        raise CannotEdit(
            f"{held.where} decides it, and the defaults list puts that after this file",
            hint=f"override it on the command line: {key}=…",
        )
    return key


def _comes_last(case: Case) -> bool:
    """Whether the main config has the last word over its defaults list."""
    from .hydra import defaults_of
    from .loading import tree_of

    if not case.path.endswith((".yaml", ".yml")):
        return False
    lines = list(defaults_of(tree_of(Source.read(case.path))))
    return "_self_" not in lines or lines[-1] == "_self_"
