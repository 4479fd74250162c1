"""The rules as such: their examples, their pages, their fixtures, and fixes that end."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from nanproof.linting.catalogue import all_rules, everything, is_default
from nanproof.linting.document import compiles
from nanproof.linting.engine import Linter
from nanproof.linting.fix import fix
from nanproof.linting.rule import Rule
from nanproof.linting.settings import Settings, choose_rules

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))
import score_lint

RULES = [r for r in all_rules() if not r.code.startswith("NP0")]
EVERY = choose_rules(["ALL"], [])
DEFAULT = choose_rules([], [])


def found(text: str, *rules: Rule, path: str = "example.py") -> list[str]:
    problems = Linter([], rules, Settings(info=True)).data(Path(path), text.encode()).problems
    return [p.finding.code for p in problems]


def ids(rule: Rule) -> str:
    return rule.code


def test_there_are_rules() -> None:
    assert len(RULES) >= 35  # the catalogue has 45; ten of them are about configs
    assert len({r.code for r in RULES}) == len({r.name for r in RULES}) == len(RULES)


@pytest.mark.parametrize("rule", RULES, ids=ids)
def test_the_rule_is_well_made(rule: Rule) -> None:
    assert re.fullmatch(r"NP[1-9]\d\d", rule.code)
    assert re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", rule.name)
    for words in (rule.what, rule.why, rule.false_alarm):
        assert len(words.strip()) > 30
    if rule.fix != "none":
        assert rule.fix_note
    assert rule.nodes


@pytest.mark.parametrize("rule", RULES, ids=ids)
def test_its_bad_example_is_found_by_this_rule_and_no_other(rule: Rule) -> None:
    assert set(found(rule.bad, *{r.code: r for r in (*DEFAULT, rule)}.values())) == {rule.code}


@pytest.mark.parametrize("rule", RULES, ids=ids)
def test_its_good_example_is_clean(rule: Rule) -> None:
    assert compiles(rule.good)
    assert found(rule.good, rule) == []


@pytest.mark.parametrize("rule", [r for r in RULES if r.miss], ids=ids)
def test_its_recorded_miss_is_missed(rule: Rule) -> None:
    assert compiles(rule.miss)
    assert found(rule.miss, rule) == []


@pytest.mark.parametrize("rule", [r for r in RULES if r.fix != "none"], ids=ids)
def test_its_fix_repairs_the_bad_example(rule: Rule) -> None:
    """Of the kind that the rule promises; the finding is gone, the result compiles and stays as it is."""
    linter = Linter([], [rule], Settings(info=True))
    fixed = fix(linter, Path("example.py"), rule.bad.encode(), unsafe=rule.fix == "unsafe")
    assert fixed.changed
    assert fixed.after.problems == ()
    assert fixed.compiles
    assert not fix(linter, Path("example.py"), fixed.new, unsafe=True).changed


@pytest.mark.parametrize("rule", [r for r in RULES if r.fix == "none"], ids=ids)
def test_a_rule_without_fix_offers_none(rule: Rule) -> None:
    problems = Linter([], [rule], Settings(info=True)).data(Path("example.py"), rule.bad.encode()).problems
    assert all(p.finding.edits == () for p in problems)


def test_a_good_example_of_one_rule_is_clean_for_the_default_rules() -> None:
    """What a page tells users to write instead must not be found fault with by another page."""
    wrong = {r.code: codes for r in RULES if (codes := found(r.good, *DEFAULT))}
    assert wrong == {}


# --- fixtures ---------------------------------------------------------------------------------------------------------

FIXTURES = score_lint.fixtures()


def test_every_rule_has_a_fixture_with_both_kinds_of_lines() -> None:
    marked = {code for path in FIXTURES for codes in score_lint.marks(path.read_text()).values() for code in codes}
    assert {r.code for r in RULES} - marked == set()


@pytest.mark.parametrize("path", FIXTURES, ids=lambda p: p.stem)
def test_a_fixture_has_its_findings_and_no_others(path: Path) -> None:
    result = score_lint.score(path)
    assert (sorted(result.false), sorted(result.missed)) == ([], [])


def test_precision_and_recall_over_all_fixtures() -> None:
    total = score_lint.total(FIXTURES)
    assert total.precision >= 0.95
    assert total.recall >= 0.84  # infos count as missed


@pytest.mark.parametrize("path", FIXTURES, ids=lambda p: p.stem)
def test_fixing_a_fixture_ends_and_compiles(path: Path) -> None:
    data = path.read_bytes()
    linter = Linter([], EVERY, Settings(info=True))
    once = fix(linter, path, data, unsafe=True)
    assert once.compiles
    assert fix(linter, path, once.new, unsafe=True).new == once.new
    safe = fix(linter, path, data)
    assert fix(linter, path, safe.new).new == safe.new
    assert all(f.safe for f in safe.repaired)


# --- public code ------------------------------------------------------------------------------------------------------


def test_judgments_are_facts_about_places() -> None:
    """Repository, commit, path, line, rule, verdict: enough to read each again."""
    found = score_lint.judgments()
    assert len(found) >= 300
    assert {j.verdict for j in found} == set(score_lint.VERDICTS)
    assert {j.today for j in found} - {""} == {"shown", "info", "gone"}  # "" where there is no checkout any more
    assert all(re.fullmatch(r"[0-9a-f]{40}", j.commit) and j.line > 0 for j in found)
    assert {j.rule for j in found} <= {r.code for r in everything()}
    rounds = {j.repo: j.round for j in found}
    assert all(rounds[j.repo] == j.round for j in found)  # a repository is linted for the first time once


def test_a_rule_that_is_seldom_right_is_off_by_default() -> None:
    found = [j for j in score_lint.judgments() if j.today == "shown"]
    default = {r.code for r in everything() if is_default(r)}
    for code in {j.rule for j in found} & default:
        own = [j.verdict for j in found if j.rule == code]
        assert own.count("true") / len(own) >= 0.7, code


def test_the_page_has_the_precision_of_the_judgments() -> None:
    assert score_lint.precision_text() in score_lint.PAGE.read_text(encoding="utf-8")
