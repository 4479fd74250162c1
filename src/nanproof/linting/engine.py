"""The linter itself: a file is read once and walked once, and every rule sees the nodes that it asked for."""

from __future__ import annotations

import ast
import functools
import re
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath

from ..collector import without_collector
from ..records import Finding
from .document import Document, Shown, Unreadable, open_document, read_bytes, refuse_wide
from .edit import IMPOSSIBLE
from .program import Program
from .project import TORCH, FileFacts, ProjectFacts
from .rule import Change, Found, Rule
from .settings import Settings
from .source import Module
from .suppress import file_silenced, silenced
from .tree import line_starts

NOT_LINTED, RULE_FAILED = "NP001", "NP002"
_COMMENT = re.compile(r"#[^\r\n]*")


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """A finding with what is needed to show it."""

    finding: Finding
    span: tuple[int, int] = (0, 0)
    """Where it stands in the text of its document."""
    changes: tuple[Change, ...] = ()
    """Its edits, in places of the text."""
    about: tuple[int, int] | None = None
    """Where the operation behind it stands."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """One file after linting; the document is kept only if there is something to show."""

    path: str
    document: Shown | None = None
    problems: tuple[Problem, ...] = ()


class Linter:
    """Lints files that belong together: what one of them says about scalers or ranks holds for those it works with."""

    def __init__(self, files: Sequence[Path], rules: Sequence[Rule], settings: Settings) -> None:
        self._rules = {rule.code: rule for rule in rules}
        self._settings = settings
        self._program = Program(files)

    def run(self, files: Iterable[Path]) -> Iterator[Checked]:
        """Lint one file after the other."""
        with without_collector():
            for path in files:
                yield self.file(path)

    def file(self, path: Path) -> Checked:
        name = str(path)
        try:
            data = read_bytes(path)
            refuse_wide(data)
            if not mentions_torch(data):
                return Checked(path=name)
            return self.data(path, data)
        except Unreadable as problem:
            return Checked(path=name, problems=tuple(self._not_linted(name, problem)))

    def data(self, path: Path, data: bytes, *, like: Path | None = None) -> Checked:
        """Lint these bytes as the contents of a file; of a copy, with the settings and facts of its original."""
        name, path = str(path), like or path
        try:
            document = open_document(name, data)
        except Unreadable as problem:
            return Checked(path=name, problems=tuple(self._not_linted(name, problem)))
        ignored = self._settings.ignored_in(path) if self._settings.per_file_ignores else frozenset()
        rules = [r for r in self._rules.values() if r.code not in ignored]
        tree = self._program.parsed(path, data)
        elsewhere = functools.partial(self._program.trains, path)
        problems = tuple(examine(document, rules, lambda own: self._program.facts(path, own), tree, elsewhere))
        if not self._settings.info:
            problems = tuple(p for p in problems if not p.finding.info)
        return Checked(path=name, document=document if problems else None, problems=problems)

    def _not_linted(self, name: str, problem: Unreadable) -> Iterator[Problem]:
        if NOT_LINTED in self._rules:
            yield Problem(finding=_not_linted(name, problem.line, problem.column, problem))


def mentions_torch(data: bytes) -> bool:
    return any(word in data for word in TORCH)


def examine(
    document: Document,
    rules: Iterable[Rule],
    facts: Callable[[FileFacts], ProjectFacts] | None = None,
    tree: ast.Module | None = None,
    elsewhere: Callable[[str], bool | None] | None = None,
) -> list[Problem]:
    """What the rules find in one document, in the order of the text; its tree is parsed unless it is given."""
    active = list(rules)
    if "ignore-file" in document.text:
        active = [r for r in active if not file_silenced(document.text, r.code, r.name)]
    codes = {r.code for r in active}
    problems = [_gap(document, offset, problem) for offset, problem in document.failures()]
    try:
        module = Module(document.text, tree or document.parse(), document.path, facts)
    except Unreadable as problem:
        return [_gap(document, 0, problem)] if NOT_LINTED in codes else []
    if module.foreign:
        return []
    if elsewhere is not None:
        module.trained_elsewhere = elsewhere
    problems = problems if NOT_LINTED in codes else []
    seen: dict[str, bool] = {}
    for rule in active:
        for word in rule.words:
            if word not in seen:
                seen[word] = word in module.text
            if seen[word]:
                break
        if not rule.words or seen[word]:
            problems += _apply(rule, module, document, tell=RULE_FAILED in codes)
    module.__dict__.clear()  # its caches point back at it; without this a long run would wait for the collector
    return sorted(_one_per_hazard(problems), key=lambda p: (p.span, p.finding.code))


_SPECIFIC = ("NP201", "NP225", "NP224", "NP206", "NP209", "NP210", "NP211", "NP213", "NP205", "NP203", "NP204", "NP227")
"""Of several findings about one operation, the first of these is shown."""


def _one_per_hazard(problems: list[Problem]) -> list[Problem]:
    best: dict[tuple[int, int], tuple[bool, int]] = {}
    ranks = {id(p): (p.finding.info, _SPECIFIC.index(p.finding.code)) for p in problems if p.finding.code in _SPECIFIC}
    for p in problems:
        if p.about is not None and id(p) in ranks:
            best[p.about] = min(best.get(p.about, ranks[id(p)]), ranks[id(p)])
    return [p for p in problems if p.about not in best or best[p.about] == ranks.get(id(p))]


def _gap(document: Document, offset: int, problem: Unreadable) -> Problem:
    """That a document, or the part of it that begins at ``offset``, could not be parsed."""
    starts = line_starts(document.text[offset:])
    at = offset + starts[min(problem.line, len(starts)) - 1] + problem.column - 1
    path, line, column = document.locate(min(at, len(document.text)))
    return Problem(finding=_not_linted(path, line, column, problem), span=(at, at + 1))


def _apply(rule: Rule, module: Module, document: Document, *, tell: bool) -> list[Problem]:
    """What one rule finds; a rule that fails says so in a finding and costs nobody else's."""
    problems: dict[tuple[object, ...], Problem] = {}
    try:
        for node in _wanted(rule, module):
            for found in rule.check(node, module):
                if not _silenced(found, rule, module):
                    problem = _problem(found, rule, module, document)
                    problems.setdefault((problem.span, problem.finding.message), problem)
    except Exception as error:
        if tell:
            place = traceback.extract_tb(error.__traceback__)[-1]
            words = f"{type(error).__name__}: {error} ({PurePath(place.filename).name}:{place.lineno})"
            finding = Finding(
                code=RULE_FAILED,
                path=document.path,
                line=1,
                column=1,
                message=f"rule {rule.code} failed on this file: {words}",
                help=f"the other rules went on; report this, or leave the rule out with --ignore {rule.code}",
            )
            problems[(RULE_FAILED,)] = Problem(finding=finding)
    return list(problems.values())


@functools.cache
def _in_order(names: frozenset[str]) -> tuple[str, ...]:
    return tuple(sorted(names))


def _wanted(rule: Rule, module: Module) -> Iterator[ast.AST]:
    for kind in rule.nodes:
        if kind is ast.Div:
            yield from module.divisions
        elif kind is ast.Call and rule.calls:
            for name in _in_order(rule.calls):
                yield from module.calls_by_name.get(name, ())
        else:
            yield from module.nodes(kind)


def _problem(found: Found, rule: Rule, module: Module, document: Document) -> Problem:
    span = _span(found.node, module)
    changes = tuple(c for c in found.edits if c.text or c.start != c.end or c is IMPOSSIBLE)
    edits = [document.edit(c.start, c.end, c.text) if c is not IMPOSSIBLE else None for c in changes]
    whole = tuple(e for e in edits if e is not None)
    if len(whole) < len(edits):
        changes, whole = (), ()
    safe = bool(changes) and found.safe and not any(_drops_comment(module.text, c) for c in changes)
    path, line, column = document.locate(span[0])
    finding = Finding(
        code=rule.code,
        path=path,
        line=line,
        column=column,
        message=found.message,
        help=found.help,
        edits=whole,
        safe=safe,
        info=found.info,
    )
    about = _span(found.about, module) if found.about is not None else None
    return Problem(finding=finding, span=span, changes=changes, about=about)


def _span(node: ast.AST, module: Module) -> tuple[int, int]:
    """Where a node stands; of one in an f-string, the whole string."""
    if not hasattr(node, "lineno"):
        return (0, 0)
    if module.in_string(node):
        node = [p for p in module.parents(node) if isinstance(p, ast.JoinedStr)][-1]
    return module.span(node)


def _drops_comment(text: str, change: Change) -> bool:
    """Whether a change would delete a comment; a # in a string counts as well, which errs on the careful side."""
    return not change.comment and any(
        c.rstrip() not in change.text for c in _COMMENT.findall(text[change.start : change.end])
    )


def _silenced(found: Found, rule: Rule, module: Module) -> bool:
    node = found.node
    if not hasattr(node, "lineno"):
        return False
    first, last = node.lineno, node.end_lineno or node.lineno  # type: ignore[attr-defined]
    statement = module.statement(node)
    if not hasattr(statement, "body"):
        last = statement.end_lineno or last
    elif node is statement:
        last = first
    return silenced(module.line, first, last, rule.code, rule.name)


def _not_linted(path: str, line: int, column: int, problem: Unreadable) -> Finding:
    return Finding(
        code=NOT_LINTED,
        path=path,
        line=line,
        column=column,
        message=f"not linted: {problem.message}",
        help="it was left alone; correct it, or leave it out with exclude",
    )
