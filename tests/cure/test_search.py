"""The order in which a search tries things, with results that are written down here instead of trained."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from nanproof.cure.command import read_command
from nanproof.cure.metric import Metric
from nanproof.cure.pool import Heard
from nanproof.cure.search import Plan, Search
from nanproof.cure.surface import read_surface
from nanproof.cure.trial import Bench, Ran, Trial


class OnlyOnItsOwnSeed:
    """A program that every change cures on the seed it has, and on no other."""

    def run(self, bench: Bench, trials: Sequence[Trial], deadline: float, heard: Heard) -> list[Ran]:
        return [self.one(t) for t in trials]

    def one(self, trial: Trial) -> Ran:
        original = not trial.change.edits
        value = 0.95 if trial.seed is None else 0.5
        return Ran(
            name=trial.change.name,
            slug=trial.slug,
            seed=trial.seed,
            horizon=trial.horizon,
            end="died" if original else "finished",
            exit_code=0,
            steps=100,
            died_at=10 if original else None,
            skipped=0,
            spikes=0,
            best_loss=1.0,
            loss=0.1,
            step_seconds=0.1,
            seconds=1.0,
            metric=None if original else Metric(name="accuracy", value=value, chance=0.1, target=0.9),
            opening="a" if original else "b",
        )


def test_what_fails_on_other_seeds_is_no_cure_and_each_seed_counts_once(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import yaml\nconfig = yaml.safe_load(open('config.yaml'))\n")
    (tmp_path / "config.yaml").write_text("seed: 0\nmax_steps: 100\nlr: 2.0\n")
    surface = read_surface(read_command(["python", "train.py"]), tmp_path)
    outcome = Search(surface, Plan(out=tmp_path / "out"), OnlyOnItsOwnSeed()).run()
    assert outcome.answer == "alive, learning"
    tried = [line for line in outcome.lines if len(line.trials) > 1]
    assert tried
    for line in tried:
        assert len(set(line.trials)) == len(line.trials) <= len(outcome.seeds)


class SinglesOnlyOnTheirOwnSeed(OnlyOnItsOwnSeed):
    """A program that one change cures on the seed it has, and two on all."""

    def one(self, trial: Trial) -> Ran:
        ran = super().one(trial)
        pair = " + " in trial.change.name
        return replace(ran, metric=Metric(name="accuracy", value=0.95, chance=0.1, target=0.9)) if pair else ran


def test_pairs_are_tried_where_single_changes_fail_on_other_seeds(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import yaml\nconfig = yaml.safe_load(open('config.yaml'))\n")
    (tmp_path / "config.yaml").write_text("seed: 0\nmax_steps: 100\nlr: 2.0\ngrad_clip: 5.0\n")
    surface = read_surface(read_command(["python", "train.py"]), tmp_path)
    search = Search(surface, Plan(out=tmp_path / "out"), SinglesOnlyOnTheirOwnSeed())
    outcome = search.run()
    assert outcome.answer == "cured"
    assert " + " in outcome.winner
    runs = [line for line in outcome.lines if line.change.name == "original"]
    assert [len(set(line.trials)) == len(line.trials) for line in runs] == [True] * len(runs)


class LuckyAndSteady(OnlyOnItsOwnSeed):
    """A program that no change cures: one learns best on the seed it has, another on the worst of three."""

    def one(self, trial: Trial) -> Ran:
        ran = super().one(trial)
        lucky = trial.change.name == "lr/2"
        value = (0.8 if trial.seed is None else 0.2) if lucky else 0.7 if trial.change.name == "lr/10" else 0.5
        return ran if ran.metric is None else replace(ran, metric=replace(ran.metric, value=value))


def test_where_nothing_cures_the_best_is_the_one_whose_worst_seed_is_the_best(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import yaml\nconfig = yaml.safe_load(open('config.yaml'))\n")
    (tmp_path / "config.yaml").write_text("seed: 0\nmax_steps: 100\nlr: 2.0\n")
    surface = read_surface(read_command(["python", "train.py"]), tmp_path)
    outcome = Search(surface, Plan(out=tmp_path / "out"), LuckyAndSteady()).run()
    assert (outcome.answer, outcome.winner) == ("alive, learning", "lr/10")
    assert outcome.line is not None
    assert outcome.line.values == "0.700, 0.700, 0.700"


class OneOverflowAndOneRate(OnlyOnItsOwnSeed):
    """A program that dies at the right learning rate, too, unless its gradients are clipped."""

    def one(self, trial: Trial) -> Ran:
        ran, name = super().one(trial), trial.change.name
        if name == "lr/10":
            return replace(ran, end="died", died_at=60, metric=None)
        if ran.metric is None:
            return ran
        cured = "clip" in name and "lr/10" in name
        return replace(ran, metric=replace(ran.metric, value=0.95 if cured else 0.5 if "lr" in name else 0.4))


def test_a_change_that_ends_the_overflow_is_tried_with_every_learning_rate(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import yaml\nconfig = yaml.safe_load(open('config.yaml'))\n")
    (tmp_path / "config.yaml").write_text("seed: 0\nmax_steps: 100\nlr: 2.0\ngrad_clip: 5.0\n")
    surface = read_surface(read_command(["python", "train.py"]), tmp_path)
    outcome = Search(surface, Plan(out=tmp_path / "out"), OneOverflowAndOneRate()).run()
    assert outcome.answer == "cured"
    assert {"lr/10", "clip/10"} == set(str(outcome.winner).split(" + "))
    assert outcome.told.endswith("on 3 seeds")
