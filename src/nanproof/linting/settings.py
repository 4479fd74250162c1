"""What to lint with: `[tool.nanproof.lint]` of pyproject.toml, and rules chosen by code, beginning of a code, or name.

[tool.nanproof.lint]
select = ["ALL"]
ignore = ["NP2", "clip-order"]
exclude = ["third_party", "*_pb2.py"]

[tool.nanproof.lint.per-file-ignores]
"tests/*" = ["NP201"]
"""

from __future__ import annotations

import difflib
import fnmatch
import os
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import UsageError
from ..files import file_text
from .catalogue import all_checks, all_rules, everything, is_default
from .rule import Rule

if TYPE_CHECKING:
    from ..config.check import Check

KEYS = ("select", "ignore", "exclude", "per-file-ignores", "info")
WHERE = "[tool.nanproof.lint]"


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Selectors and patterns as they were written; paths are relative to ``root``."""

    root: Path = field(default_factory=Path.cwd)
    select: tuple[str, ...] = ()
    ignore: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    per_file_ignores: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    info: bool = False
    """Whether findings are shown that nothing in the code says to happen."""

    def excludes(self, path: Path) -> bool:
        return any(self._matches(path, pattern) for pattern in self.exclude)

    def ignored_in(self, path: Path) -> frozenset[str]:
        """The codes that per-file-ignores switch off for a file."""
        selectors = [
            s for pattern, those in self.per_file_ignores.items() if self._matches(path, pattern) for s in those
        ]
        return frozenset(rule.code for rule in everything() if any(_names(s, rule) for s in selectors))

    def _matches(self, path: Path, pattern: str) -> bool:
        """A pattern matches the whole path below the root, one folder or file name, or everything in a folder."""
        full = path.resolve() if path.exists() else path.absolute()
        root = self.root.resolve()
        relative = full.relative_to(root) if full.is_relative_to(root) else full
        wanted = pattern.rstrip("/").removeprefix("./")
        if any(fnmatch.fnmatch(part, wanted) for part in relative.parts):
            return True
        ways = [relative, *relative.parents]
        return any(fnmatch.fnmatch(way.as_posix(), wanted) for way in ways if way.parts)


def choose_rules(select: Iterable[str], ignore: Iterable[str]) -> tuple[Rule, ...]:
    """The rules to run: those on by default unless ``select`` names others, less those in ``ignore``.

    The beginning of a code ("NP2") stands for the rules on by default that have it; a rule that is off by default is
    switched on by its whole code, its name, or ALL.
    """
    chosen, dropped = list(select), list(ignore)
    for selector in [*chosen, *dropped]:
        _refuse_unknown(selector)
    return tuple(r for r in all_rules() if _is_chosen(r, chosen, dropped))


def choose_checks(select: Iterable[str], ignore: Iterable[str]) -> frozenset[str]:
    """The codes of the checks of configs to run, chosen in the same way."""
    chosen, dropped = list(select), list(ignore)
    return frozenset(c.code for c in all_checks() if _is_chosen(c, chosen, dropped))


def _is_chosen(rule: Rule | Check, select: list[str], ignore: list[str]) -> bool:
    if any(_names(s, rule) for s in ignore):
        return False
    if not select or rule.code.startswith("NP0"):  # what could not be linted is said whatever is selected
        return is_default(rule)
    return any(_names(s, rule) and (is_default(rule) or _exactly(s, rule)) for s in select)


def _names(selector: str, rule: Rule | Check) -> bool:
    return selector.upper() == "ALL" or rule.code.startswith(selector.upper()) or selector.lower() == rule.name


def _exactly(selector: str, rule: Rule | Check) -> bool:
    return selector.upper() in ("ALL", rule.code) or selector.lower() == rule.name


def _refuse_unknown(selector: str) -> None:
    if selector.strip() and any(_names(selector, rule) for rule in all_rules()):
        return
    if selector.strip() and any(_names(selector, check) for check in all_checks()):
        return
    known = [w for rule in everything() for w in (rule.code, rule.name)]
    close = difflib.get_close_matches(selector, known, n=1, cutoff=0.5)
    hint = f"did you mean {close[0]}?" if close else "give a code (NP301), its beginning (NP3), a name, or ALL"
    raise UsageError(f"no rule is called {selector!r}", hint=hint)


def settings_for(paths: Sequence[Path]) -> Settings:
    """The settings for files that are linted together: those of the folder that holds them all."""
    places = [p.absolute() if p.is_dir() else p.absolute().parent for p in paths] or [Path.cwd()]
    return load_settings(Path(os.path.commonpath(places)))


def load_settings(start: Path) -> Settings:
    """The settings of the nearest pyproject.toml with a nanproof section, at ``start`` or above."""
    folder = start.absolute() if start.is_dir() else start.absolute().parent
    for place in (folder, *folder.parents):
        file = place / "pyproject.toml"
        if not file.is_file():
            continue
        try:
            table = tomllib.loads(file_text(file)).get("tool", {}).get("nanproof", {}).get("lint")
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise UsageError(f"{file} is not TOML: {error}", hint="correct it, then run again") from None
        except OSError as error:
            raise UsageError(
                f"{file} cannot be read: {error.strerror}", hint="make it readable, then run again"
            ) from None
        if table is not None:
            return _read(table, file)
    return Settings(root=folder)


def _read(table: Any, file: Path) -> Settings:
    if not isinstance(table, dict):
        raise UsageError(f"{WHERE} in {file} must be a table", hint='for example select = ["NP2"]')
    for key in table:
        if key not in KEYS:
            close = difflib.get_close_matches(key, KEYS, n=1)
            raise UsageError(
                f"{WHERE} in {file} has no setting {key!r}",
                hint=f"did you mean {close[0]}?" if close else f"settings are {', '.join(KEYS)}",
            )
    ignores = table.get("per-file-ignores", {})
    if not isinstance(ignores, dict):
        raise UsageError(f"per-file-ignores in {file} must be a table", hint='for example "tests/*" = ["NP2"]')
    if not isinstance(table.get("info", False), bool):
        raise UsageError(f"info in {file} must be true or false", hint="for example info = true")
    settings = Settings(
        root=file.parent,
        select=_strings(table.get("select", []), "select", file),
        ignore=_strings(table.get("ignore", []), "ignore", file),
        exclude=_strings(table.get("exclude", []), "exclude", file),
        per_file_ignores={k: _strings(v, "per-file-ignores", file) for k, v in ignores.items()},
        info=table.get("info", False),
    )
    for selector in [s for those in settings.per_file_ignores.values() for s in those]:
        _refuse_unknown(selector)
    return settings


def _strings(value: Sequence[Any], key: str, file: Path) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(v, str) for v in value):
        raise UsageError(f"{key} in {file} must be a list of strings", hint=f'for example {key} = ["NP2"]')
    return tuple(value)
