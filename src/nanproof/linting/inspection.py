"""One run over files that belong together: lint them, repair them in place or beside, and look again at the result."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from .. import journal
from ..errors import UsageError
from ..files import file_bytes
from ..records import Finding
from .beside import beside, copies
from .cache import Cache
from .configs import ConfigFile, Configs, fix_config, open_shown
from .discover import CONFIGS, SUFFIXES, find_files
from .document import Unreadable
from .engine import Checked, Linter, mentions_torch
from .fix import Fixed, fix
from .located import CODE as LOCATED
from .located import origins, with_origins
from .settings import choose_rules, settings_for

STDIN = Path("<stdin>")


@dataclass(frozen=True, slots=True, kw_only=True)
class Repair:
    """One finding that was repaired, and what a look at the file afterwards says."""

    finding: Finding
    path: str
    """Where the repaired text is: the file itself, or the copy beside it."""
    applied: bool
    gone: bool
    compiles: bool
    compiled: bool = True
    """Whether it did before."""

    @property
    def verified(self) -> bool:
        return self.applied and self.gone and (self.compiles or not self.compiled)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The result of repairs that were written."""

    application: journal.Application
    written: tuple[Path, ...]
    repairs: tuple[Repair, ...]
    after: tuple[Checked, ...]
    """The repaired files, or their copies, linted again."""


class Inspection:
    """What ``nanproof lint`` does with the paths that it was given."""

    def __init__(
        self,
        paths: Iterable[str | os.PathLike[str]],
        *,
        select: Iterable[str] = (),
        ignore: Iterable[str] = (),
        exclude: Iterable[str] = (),
        gitignore: bool = True,
        stdin: bytes | None = None,
        stdin_name: Path | None = None,
        cache: bool = False,
        info: bool = False,
    ) -> None:
        named = [Path(p) for p in paths]
        self.stdin, self._stdin_name = stdin, stdin_name or STDIN
        around = named if stdin is None else []
        settings = settings_for(around or ([stdin_name] if stdin_name else []))
        chosen, dropped = tuple(select) or settings.select, (*settings.ignore, *ignore)
        rules = choose_rules(chosen, dropped)
        self._info = info or settings.info
        self._located = origins(around) if any(r.code == LOCATED for r in rules) else {}
        shown = self._info or bool(self._located)  # where an incident was located, what is possible did happen
        settings = replace(settings, exclude=(*settings.exclude, *exclude), info=shown)
        found = find_files(around, settings, (*SUFFIXES, *CONFIGS), gitignore=gitignore)
        self._sources = [f for f in found if f.suffix not in CONFIGS]
        self.linter = Linter(self._sources, rules, settings)
        code = [f for f in self._sources if f.suffix == ".py"]
        self._configs = Configs([f for f in found if f.suffix in CONFIGS], code, settings, chosen, dropped)
        self.home = journal.home_of(_common(around))
        keep = cache and stdin is None
        self._cache = Cache(self.home, self._sources, (r.code for r in rules), settings) if keep else None

    @property
    def files(self) -> Sequence[Path]:
        """What is linted: code, notebooks, and configs that are about training."""
        return [self._stdin_name] if self.stdin is not None else [*self._sources, *self._configs.files]

    def lint(self) -> Iterator[Checked]:
        """Each file, linted."""
        if self.stdin is not None:
            name = self._stdin_name
            yield self.linter.data(name, self.stdin) if mentions_torch(self.stdin) else Checked(path=str(name))
        else:
            for checked in self._each():
                yield with_origins(checked, self._located, info=self._info) if self._located else checked
            yield from self._configs.lint()

    def _each(self) -> Iterator[Checked]:
        """Each source, linted; those that the cache knows to be clean are not read."""
        cache = self._cache
        if cache is None:
            yield from self.linter.run(self._sources)
            return
        clean = []
        known = {p for p in self._sources if cache.is_clean(p)}
        fresh = self.linter.run([p for p in self._sources if p not in known])
        for path in self._sources:
            checked = Checked(path=str(path)) if path in known else next(fresh)
            clean += [path] if not checked.problems else []
            yield checked
        cache.write(clean)

    def fix(self, *, unsafe: bool) -> Iterator[tuple[Checked, Fixed | None]]:
        """Each file, linted, with its repair in memory if there is one."""
        for checked in self.lint():
            fixed = self._fix(checked, unsafe) if checked.document is not None else None
            yield (fixed.after, fixed) if fixed and fixed.changed else (checked, None)

    def _fix(self, checked: Checked, unsafe: bool) -> Fixed | None:
        assert checked.document is not None
        if isinstance(checked.document, ConfigFile):
            return fix_config(checked)
        if not any(p.finding.edits and (p.finding.safe or unsafe) for p in checked.problems):
            return None
        return fix(self.linter, Path(checked.path), checked.document.data, unsafe=unsafe)

    def apply(self, fixed: Sequence[Fixed], *, why: str) -> Outcome:
        """Write the repairs into the files, and look again."""
        changed, seen = {f.path: f.new for f in fixed}, {f.path: f.old for f in fixed}
        application = journal.apply(changed, home=self.home, why=why, details=_details(fixed), seen=seen)
        return self._outcome(application, fixed, {f.path: f.path for f in fixed}, changed)

    def apply_beside(self, fixed: Sequence[Fixed]) -> Outcome:
        """Write the repairs into copies, with the files that import them, and look again."""
        new = copies({f.path: f.new for f in fixed}, self._sources)
        for target in new:
            if target.exists():
                hint = "move it away, or take the run that made it back with nanproof lint --undo"
                raise UsageError(f"{target} exists already; nothing was written", hint=hint)
        application = journal.apply(new, home=self.home, why="lint --beside", details=_details(fixed))
        return self._outcome(application, fixed, {f.path: beside(f.path) for f in fixed}, new)

    def _outcome(
        self,
        application: journal.Application,
        fixed: Sequence[Fixed],
        targets: Mapping[Path, Path],
        expected: Mapping[Path, bytes],
    ) -> Outcome:
        """Read back what was written: is it there, does it compile, are the findings gone?"""
        repairs: list[Repair] = []
        after: list[Checked] = []
        configs = self._configs.instead(targets[f.path] for f in fixed if f.path in self._configs.files)
        again = {c.path: c for c in configs.lint()} if configs.files else {}
        for one in fixed:
            target = targets[one.path]
            data = file_bytes(target)
            if one.path in self._configs.files:
                checked = again.get(str(target), Checked(path=str(target)))
            else:
                checked = self.linter.data(target, data, like=one.path)
            after.append(checked)
            same = Repair(
                finding=one.repaired[0],
                path=str(target),
                applied=data == expected[target],
                gone=len(checked.problems) == len(one.after.problems),
                compiles=_compiles(target, data),
                compiled=one.path in self._configs.files or _compiles(one.path, one.old),
            )
            repairs += [replace(same, finding=f) for f in one.repaired]
        return Outcome(application=application, written=tuple(expected), repairs=tuple(repairs), after=tuple(after))


def _compiles(path: Path, data: bytes) -> bool:
    try:
        return open_shown(str(path), data).compiles()
    except Unreadable:
        return False


def _common(paths: Sequence[Path]) -> Path:
    places = [str(p.absolute()) for p in paths] or [str(Path.cwd())]
    return Path(os.path.commonpath(places))


def _details(fixed: Sequence[Fixed]) -> dict[str, object]:
    return {"repaired": [f"{r.code} {r.path}:{r.line}" for f in fixed for r in f.repaired]}
