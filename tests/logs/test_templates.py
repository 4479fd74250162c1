"""Lines of a known shape are read as if each were the first: with templates and without, a log says the same."""

from __future__ import annotations

import random
import re

import pytest

from logs.reading import as_plain, read_bytes
from logs.samples import CASES
from nanproof.logs.grammars import GRAMMARS
from nanproof.logs.templates import Templates

_DIGITS = re.compile(r"(?<![A-Za-z_#.\d@/-])\d+(?:\.\d+)?(?![A-Za-z_\d%])")


def _varied(text: str, seed: int) -> str:
    """The lines of a log many times, with other numbers of the same and of other forms, some of them NaN."""
    dice = random.Random(seed)
    lines = text.splitlines(keepends=True)

    def other(match: re.Match[str]) -> str:
        word = match[0]
        if "." not in word:
            return str(max(0, int(word[-15:]) + dice.randint(0, 9)))
        return dice.choice([f"{dice.random() * 9:.4f}", "0.5", "12.", f"{dice.random():.2e}", "3", "nan"])

    return "".join(line if i < 1 else _DIGITS.sub(other, line) for i in range(12) for line in lines)


def _without(monkeypatch: pytest.MonkeyPatch, data: bytes, chunk: int | None = None) -> dict[str, object]:
    with monkeypatch.context() as patched:
        patched.setattr(Templates, "find", lambda self, line: None)
        return as_plain(read_bytes(data, chunk=chunk))


@pytest.mark.parametrize("name", CASES)
def test_every_sample_reads_the_same(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    for seed in range(3):
        data = _varied(CASES[name][0], seed).encode()
        assert as_plain(read_bytes(data)) == _without(monkeypatch, data)
        assert as_plain(read_bytes(data, chunk=1_000)) == _without(monkeypatch, data, 1_000)


def test_every_layout_reads_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    for seed, grammar in enumerate(GRAMMARS):
        data = _varied(grammar.sample + "\n", seed).encode()
        assert as_plain(read_bytes(data)) == _without(monkeypatch, data), grammar.name


def test_layouts_side_by_side_read_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    data = _varied("".join(g.sample + "\n" for g in GRAMMARS) + "".join(c[0] for c in CASES.values()), 1).encode()
    assert as_plain(read_bytes(data)) == _without(monkeypatch, data)


def test_repeated_lines_are_not_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Almost every line of a repetitive log is read through its template."""
    found: list[bool] = []
    find = Templates.find
    monkeypatch.setattr(Templates, "find", lambda self, line: found.append((r := find(self, line)) is not None) or r)
    lines = [f"iter {i}: loss {i % 7 / 3:.4f}, time {i * 1.5:.2f}ms\nworker {i % 5} is up\n" for i in range(2_000)]
    series = read_bytes("".join(lines).encode())
    assert series.loss is not None
    assert len(series.loss) == 2_000
    assert found.count(False) < 20
