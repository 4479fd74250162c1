"""Repairs: all or none, again until nothing is left, never worse than before."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from linting.toys import BOTH, BROKEN, NEEDY, OLD, RISKY, STUBBORN, checked, repaired, toy
from nanproof import errors
from nanproof.linting.inspection import Inspection
from nanproof.linting.rule import Change

TORCH = "import torch\n"


def test_each_edit_of_the_text_and_no_other_byte() -> None:
    text = TORCH + "a = old(1)\r\n\tb = 'ü'  # old(2)\r\nc = old( 3 )"
    text = text.replace("\t", "")
    fixed = repaired("\ufeff" + text, OLD)
    assert fixed.new == ("\ufeff" + text.replace("old(1)", "new(1)").replace("old( 3 )", "new( 3 )")).encode()
    assert [(f.code, f.line) for f in fixed.repaired] == [("NP901", 2), ("NP901", 4)]
    assert fixed.after.problems == ()
    assert fixed.compiles


def test_nothing_to_do_is_byte_identical() -> None:
    fixed = repaired(TORCH + "x = 1\r\r\n")
    assert fixed.new == fixed.old
    assert not fixed.changed


def test_overlapping_repairs_come_one_after_the_other() -> None:
    fixed = repaired(TORCH + "outer(outer(outer(old(x))))", BOTH, OLD)
    assert fixed.new.decode() == TORCH + "inner(inner(inner(new(x))))"
    assert len(fixed.repaired) == 4


def test_it_ends_after_ten_rounds() -> None:
    """Each round repairs the outermost of twelve; two are left, and the next run goes on."""
    text = TORCH + "outer(" * 12 + "x" + ")" * 12
    first = repaired(text, BOTH)
    assert first.new.count(b"inner") == 10
    assert first.compiles
    second = repaired(first.new, BOTH)
    assert second.new == (TORCH + "inner(" * 12 + "x" + ")" * 12).encode()


def test_a_fix_that_does_not_compile_is_withdrawn_alone() -> None:
    fixed = repaired(TORCH + "a = old(1)\nb = broken(2)\nc = old(3)\n", OLD, BROKEN)
    assert fixed.new.decode() == TORCH + "a = new(1)\nb = broken(2)\nc = new(3)\n"
    assert [p.finding.code for p in fixed.after.problems] == ["NP902"]


def test_a_fix_that_leaves_its_finding_is_withdrawn() -> None:
    fixed = repaired(TORCH + "a = stubborn(1) + old(2)\n", STUBBORN, OLD)
    assert fixed.new.decode() == TORCH + "a = stubborn(1) + new(2)\n"


def test_code_that_does_not_compile_can_still_be_repaired() -> None:
    """It parses, but `return` stands outside a function; that is not ours to refuse."""
    fixed = repaired(TORCH + "return old(1)\n", OLD)
    assert fixed.new.decode() == TORCH + "return new(1)\n"
    assert not fixed.compiles


def test_unsafe_only_when_asked() -> None:
    text = TORCH + "risky(1); old(2)\n"
    assert repaired(text, RISKY, OLD).new.decode() == TORCH + "risky(1); new(2)\n"
    assert repaired(text, RISKY, OLD, unsafe=True).new.decode() == TORCH + "tame(1); new(2)\n"


def test_an_import_that_several_need_comes_once() -> None:
    fixed = repaired(TORCH + "a = needy(1)\nb = needy(2)\n", NEEDY)
    assert fixed.new.decode() == TORCH + "import math\na = math.sqrt(1)\nb = math.sqrt(2)\n"


def test_all_edits_of_a_finding_or_none() -> None:
    """The second edit of each collides with the other finding's: first the one, then the other, never half of both."""

    def edits(node: ast.Call, module: object) -> tuple[Change, ...]:
        start, end = module.span(node)  # type: ignore[attr-defined]
        return Change(start=start, end=start + 3, text="new"), Change(start=end - 1, end=end, text=f", {start})")

    pair = toy("NP901", "old", edits)
    fixed = repaired(TORCH + "old(old(1))\n", pair)
    assert fixed.new.decode() == TORCH + "new(new(1, 17), 13)\n"


@pytest.mark.parametrize(
    ("text", "safe"),
    [
        ("old(  # why\n  1)", False),
        ("old(1)  # why", True),
        ("old('# no comment')", False),
        ("old(\n  1)", True),
    ],
)
def test_a_fix_that_deletes_a_comment_is_unsafe(text: str, safe: bool) -> None:
    rule = toy("NP901", "old", lambda node, module: (module.replace(node, "new(1)"),))
    [problem] = checked(TORCH + text, rule).problems
    assert problem.finding.edits
    assert problem.finding.safe is safe


def test_a_fix_that_keeps_the_comment_is_safe() -> None:
    rule = toy("NP901", "old", lambda node, module: (module.replace(node, "new(  # why\n  1)"),))
    assert checked(TORCH + "old(  # why\n  1)", rule).problems[0].finding.safe


def test_an_encoding_that_cannot_say_it_has_no_fix() -> None:
    rule = toy("NP901", "old", lambda node, module: (module.replace(node, "'日本'"),))
    [problem] = checked(b"# coding: latin-1\nimport torch\nold(1)\n", rule).problems
    assert problem.finding.edits == ()
    assert not problem.finding.safe


def test_inserted_lines_share_an_end() -> None:
    """A fix before a statement and one inside it do not overlap."""
    before = toy("NP901", "old", lambda n, m: (m.insert_before(m.statement(n), "first()"), m.replace(n.func, "new")))
    fixed = repaired(TORCH + "if x:\r\n    y = old(needy(2))\r\n", before, NEEDY)
    assert fixed.new.decode() == (TORCH + "import math\nif x:\r\n    first()\n    y = new(math.sqrt(2))\r\n")


def test_the_fixed_text_is_a_fixed_point() -> None:
    text = TORCH + "a = old(needy(outer(1)))\nif a: old(2); risky(3)\n"
    once = repaired(text, unsafe=True)
    twice = repaired(once.new, unsafe=True)
    assert once.new != once.old
    assert twice.new == once.new
    assert twice.repaired == ()


def test_a_file_edited_meanwhile_is_not_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "a.py"
    path.write_text(TORCH + "y = torch.log(torch.sigmoid(x))\n")
    run = Inspection([path])
    fixed = [f for _, f in run.fix(unsafe=False) if f is not None]
    path.write_text("# mine now\n")
    with pytest.raises(errors.UsageError, match=r"a\.py was edited since it was read; nothing was written"):
        run.apply(fixed, why="lint --fix")
    assert path.read_text() == "# mine now\n"
    assert not (tmp_path / ".nanproof").exists()


def test_notebooks_are_repaired_too(tmp_path: Path) -> None:
    data = b'{"cells": [{"cell_type": "code", "source": ["import torch\\n", "%time\\n", "old(1)"]}], "nbformat": 4}'
    fixed = repaired(data, OLD, path=str(tmp_path / "a.ipynb"))
    assert fixed.new == data.replace(b"old(1)", b"new(1)")
    assert fixed.compiles


def test_the_comment_of_an_eps_goes_with_it() -> None:
    from nanproof.linting.catalogue import all_rules

    rule = next(r for r in all_rules() if r.code == "NP214")
    text = "import torch\n\n\ndef f(x, y):\n    return x / (y.clamp(min=1) + 1e-8)  # avoid division by zero\n"
    fixed = repaired(text, rule)
    assert fixed.new.decode().splitlines()[-1] == "    return x / (y.clamp(min=1))"
    other = repaired(text.replace("avoid division by zero", "the mean of a row"), rule)
    assert other.new.decode().splitlines()[-1].endswith("# the mean of a row")


def test_no_finfo_of_a_mask_of_whole_numbers() -> None:
    """`torch.finfo` raises for an int64 tensor: a fix must not write it there."""
    from nanproof.linting.catalogue import all_rules

    rule = next(r for r in all_rules() if r.code == "NP217")
    head = "import torch\nscaler = torch.cuda.amp.GradScaler()\n\n\n"
    text = (
        head
        + "def f(x, attention_mask):\n    m = attention_mask.masked_fill(attention_mask == 0, -1e9)\n    return m + x\n"
    )
    [problem] = checked(text, rule).problems
    assert problem.finding.edits == ()
    scores = text.replace("m = attention_mask.masked", "s = x @ x.T\n    m = s.masked")
    [problem] = checked(scores, rule).problems
    assert "torch.finfo(s.dtype).min" in problem.finding.edits[0].text
