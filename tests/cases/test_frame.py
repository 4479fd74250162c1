"""The verb, the catalogue, the judging of advice, and the story as a whole."""

from __future__ import annotations

import dataclasses
import json
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from diagnosing.typed import commands_of, complaint
from nanproof import diagnose
from nanproof.cases import find, find_all
from nanproof.cases.claims import Judgement, Runs, judge_by_fate
from nanproof.cases.compare import Comparison, Judged, claims_table, variants_table
from nanproof.cases.page import make_page
from nanproof.cases.result import Result
from nanproof.cases.story import Stage, stages
from nanproof.cli.case import command
from nanproof.cli.explain import command as explain
from support.trainings import Story, Train

pytestmark = pytest.mark.slow

RUN = Result(
    case="radiodiff",
    config="original",
    seed=0,
    steps=100,
    first_bad_step=51,
    skipped=0,
    loss=float("nan"),
    metric="m",
    value=0.0,
    chance=0.25,
    target=0.6,
    questions=1000,
    first_activation=1.0,
    largest_activation=1e5,
    bad_parameters=3,
    bad_buffers=0,
    lr=0.1,
    seconds=1.0,
    cpu_seconds=1.0,
    digest="a",
)


def test_the_list() -> None:
    told = CliRunner().invoke(command, [])
    assert told.exit_code == 0
    for name in ("mm-ldlm", "radiodiff", "lora-sft", "restran-mhc"):
        assert name in told.output
    listed = json.loads(CliRunner().invoke(command, ["--json"]).stdout)
    assert [c["name"] for c in listed] == [c.name for c in find_all()]


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        (["radiodif", "--story"], "did you mean radiodiff?"),
        (["radiodiff"], "choose one of --variant, --story and --compare"),
        (["radiodiff", "--story", "--compare"], "choose one of --variant, --story and --compare"),
        (["radiodiff", "--variant", "stable", "--page", "x.md"], "--page writes what --compare finds"),
        (["radiodiff", "--variant", "stable", "--config-name", "original"], "name different configs"),
    ],
)
def test_wrong_words_get_one_sentence(words: list[str], answer: str) -> None:
    told = CliRunner().invoke(command, words)
    assert told.exit_code == 2
    assert answer in told.output
    assert "Traceback" not in told.output


def test_a_folder_that_is_used_is_not_used_again(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("x")
    told = CliRunner().invoke(command, ["radiodiff", "--story", "--out", str(tmp_path)])
    assert told.exit_code == 2
    assert "is not empty" in told.output


class Tried:
    """Runs that are over: what a change makes of seed 0, and of the other seeds."""

    seed = 0

    def __init__(self, changed: Result, others: Sequence[Result] = (), log: str = "b") -> None:
        self._runs = {"original": RUN, "changed": changed}
        self._logs = {"original": ["a"], "changed": [log]}
        self._others = others

    def result(self, config: str, *overrides: str) -> Result:
        return self._runs[config]

    def losses(self, config: str, *overrides: str) -> list[str]:
        return self._logs[config]

    def elsewhere(self) -> list[Tried]:
        return [Tried(other) for other in self._others]


GOOD = dataclasses.replace(RUN, first_bad_step=None, bad_parameters=0, digest="b", value=0.9, loss=0.1)
LATER = dataclasses.replace(RUN, first_bad_step=90, digest="b")


@pytest.mark.parametrize(
    ("tried", "verdict", "words"),
    [
        (Tried(RUN, log="a"), "inert", "bit for bit"),
        (Tried(RUN), "inert", "dies at step 51, without it dies at step 51"),
        (Tried(LATER), "inert", "dies at step 90"),
        (Tried(GOOD, [GOOD, GOOD]), "helped", "finite at 3 seeds: m 0.90, 0.90, 0.90"),
        (Tried(GOOD, [GOOD, dataclasses.replace(LATER, seed=2)]), "inert", "dies at step 90 at seed 2"),
        (Tried(dataclasses.replace(GOOD, value=0.25)), "harmful", "finite but dead"),
        (Tried(dataclasses.replace(GOOD, bad_parameters=2)), "harmful", "hides it"),
    ],
)
def test_advice_is_judged_by_what_becomes_of_the_run(tried: Any, verdict: str, words: str) -> None:
    judged = judge_by_fate(tried, "changed")
    assert judged.verdict == verdict
    assert words in judged.measured


@pytest.mark.parametrize("case", find_all(), ids=lambda case: case.name)
def test_what_a_case_says_of_itself_exists(case) -> None:
    for name in case.code:
        assert (case.folder / name).is_file()
    for variant in ("original", "advised", "stable"):
        assert (case.folder / "configs" / f"{variant}.yaml").is_file()
    assert CliRunner().invoke(explain, [case.cause]).exit_code == 0
    assert 4 <= len(case.changes) <= 9
    assert len(case.claims) >= 6
    for requirement in case.requirements:
        for part in requirement.shown_by.split(" ; "):
            words = part.split()
            assert words[0] in ("nanproof", "python", "pytest", "torchrun") or "=" in words[0], part
            if words[0] == "pytest":
                path, _, test = words[1].partition("::")
                text = (Path(__file__).parents[2] / path).read_text()
                assert f"def {test.split('[')[0]}(" in text if test else text, part


def test_a_page_holds_every_table() -> None:
    case = find("radiodiff")
    judged = tuple(
        Judged(
            advice=c.advice,
            before=c.before,
            after=c.after,
            why=c.why,
            judgement=Judgement(verdict="inert", measured="so"),
        )
        for c in case.claims
    )
    results = tuple(dataclasses.replace(RUN, config=name) for name in ("original", "advised", "stable"))
    page = make_page(case, Comparison(case=case.name, seed=0, results=results, judged=judged))
    for names, rows in (variants_table(results), claims_table(judged)):
        assert all(name in page for name in names)
        assert all(row[0].replace("|", "\\|") in page for row in rows)
    assert all(f"**{r.number}**" in page for r in case.requirements)


def test_runs_are_trained_once(tmp_path: Path) -> None:
    told: list[str] = []
    runs = Runs(find("radiodiff"), tmp_path, 0, told.append)
    first = runs.folder("original", "training.steps=2")
    assert runs.folder("original", "training.steps=2") == first
    assert len(told) == 1
    assert runs.result("original", "training.steps=2").steps == 2


def test_stages_are_commands_that_a_user_types(tmp_path: Path) -> None:
    typed = [stage.typed for stage, _ in zip(stages(find("radiodiff"), tmp_path, 0), range(3), strict=False)]
    assert typed[0].startswith("python -m nanproof.cases.radiodiff.train")
    assert typed[1].startswith("nanproof scan")
    assert typed[2].startswith("nanproof diagnose")


@pytest.mark.parametrize(
    ("case", "trained"),
    [
        ("radiodiff", {}),
        ("radiodiff", {"policy": "default"}),
        ("lora-sft", {"steps": 5}),
        ("mm-ldlm", {}),
        ("restran-mhc", {}),
    ],
)
def test_every_command_that_diagnose_prints(
    case: str, trained: dict[str, Any], train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In copies of the trained folders, as harden writes a file; shared pages are read in tests/diagnosing."""
    found = train(case, **trained)
    shutil.copytree(found.guard if "policy" in trained else found.folder, tmp_path / "run")
    monkeypatch.chdir(tmp_path)
    printed = [c for c in commands_of(diagnose("run")) if " explain " not in c]
    assert printed or case == "mm-ldlm"
    assert [said for c in printed if (said := complaint(c))] == []


def test_the_verb_tells_the_stages_until_one_does_not_end_as_it_should(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With stages that take no time; the real ones are run in `test_the_story`."""

    def stage(title: str, code: str, trains: bool = False) -> Stage:
        return Stage(title=title, words=(sys.executable, "-c", code), trains=trains)

    made = [stage("one", "for i in range(60): print(i)", trains=True), stage("two", "exit(3)"), stage("three", "")]
    monkeypatch.setattr("nanproof.cases.story.stages", lambda *_: iter(made))
    told = CliRunner().invoke(command, ["radiodiff", "--story", "--out", str(tmp_path / "out")])
    assert told.exit_code == 1
    assert "1. one" in told.output
    assert "29\n   … 22 lines more …\n   52\n" in told.output
    assert "ended with 3, not 0: the story ends here" in told.output
    assert "three" not in told.output


def test_the_story(story: Story) -> None:
    """What `nanproof case --story` shows: every stage ends as it should, and says what it is there to say."""
    case = find("radiodiff")
    folder, told = story()
    assert [t["ok"] for t in told] == [True] * 9
    texts = [t["said"] for t in told]
    assert texts[0].splitlines()[-1].startswith("died")
    assert "CORRUPT" in texts[1]
    assert next(line for line in texts[2].splitlines() if line.startswith("Cause:")).find(f"({case.cause},") > 0
    assert "→ skip" in texts[3]
    assert f"{case.mechanism} in" in texts[4]
    assert "verified" in texts[4]
    assert any(line.startswith("+") for text in texts[5:7] for line in text.splitlines())
    assert texts[7].splitlines()[-1].startswith("trained")
    page = (folder / "report.html").read_text()
    assert "original" in page
    assert "stable" in page
