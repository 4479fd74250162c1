"""A run that broke: all its files as one body of evidence."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from ..checkpoint.config import differences
from ..checkpoint.report import ScanReport
from ..logs import Series
from ..logs.timeline import timeline
from .diagnosis import Looked, Moment
from .evidence import Fact
from .sources.checkpoints import read_checkpoints, restored_rate
from .sources.code import read_code
from .sources.configs import Config, find_configs, read_configs
from .sources.environment import read_environment
from .sources.incidents import read_incidents
from .sources.logs import rate_in_force, read_logs
from .sources.part import Part, join
from .sources.places import Places, find_places
from .useless import find_useless

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Wreck:
    """Everything that the files of a run say."""

    places: Places
    part: Part
    configs: tuple[Config, ...] = ()
    series: tuple[Series, ...] = ()
    reports: tuple[ScanReport, ...] = ()


def read_wreck(paths: Sequence[str | os.PathLike[str]], *, gpu: str = "") -> Wreck:
    """Read all that is there. ``gpu`` is what the user said about it."""
    places = find_places(paths)
    root = places.root
    failed: list[Looked] = []

    def attempt(what: str, default: T, function: Callable[[], T]) -> T:
        """One kind of evidence less is no reason to give none: a reader that fails is said on the check-list."""
        try:
            return function()
        except Exception as error:
            words = f"nanproof failed to read it ({type(error).__name__}: {error}); please report that"
            failed.append(Looked(mark="✗", what=what, found=words))
            return default

    nothing = Part()
    no_configs: list[Config] = []
    no_facts: list[Fact] = []
    no_series: tuple[Part, tuple[Series, ...]] = (nothing, ())
    no_reports: tuple[Part, tuple[ScanReport, ...]] = (nothing, ())
    configs = attempt("config", no_configs, lambda: find_configs(places.configs, root, _runs(places)))
    every = next((v.number for c in configs for v in c.settings if v.name == "logging_steps" and v.number), None)
    logs, series = attempt("log", no_series, lambda: read_logs(places.logs, root, every))
    found = list(places.checkpoints)
    checkpoints, reports = attempt("checkpoint", no_reports, lambda: read_checkpoints(found, _broke_at(series)))
    environment = attempt("environment", nothing, lambda: read_environment(places.environment, root))
    incidents = attempt("incident", nothing, lambda: read_incidents(places.incidents, root))
    gpu = gpu or _gpu(environment, incidents)
    settings = attempt("config", nothing, lambda: read_configs(
        configs, places.code, root, gpu=gpu, parameters=_parameters(reports), facts=_known_of_checkpoint(reports)
    ))  # fmt: skip
    code = attempt("code", nothing, lambda: read_code(places.code, root))
    rates = attempt("log", no_facts, lambda: compare_rates(configs, series, reports, root))
    useless = attempt("log", nothing, lambda: find_useless(series, root))
    looked = Part(looked=(*failed, *_absent(places, configs)), notes=places.notes)
    compared = Part(facts=tuple(rates))
    parts = join(logs, incidents, checkpoints, settings, code, environment, compared, useless, looked)
    return Wreck(places=places, part=parts, configs=tuple(configs), series=series, reports=reports)


def _broke_at(series: Sequence[Series]) -> int | None:
    """The first step with a bad loss or gradient, in the newest log that shows one."""
    for one in series:
        wrong = timeline(one).of("nonfinite", "hidden-nan")
        if wrong:
            return min(m.step for m in wrong)
    return None


def _runs(places: Places) -> list[Path]:
    """The folders that logs lie in, or are."""
    return [path if path.is_dir() else path.parent for path in (Path(log.path) for log in places.logs)]


def _absent(places: Places, configs: Sequence[Config]) -> list[Looked]:
    """What there was none of: unknown is not clean."""
    kinds = (
        ("log", places.logs), ("config", configs), ("checkpoint", places.checkpoints), ("code", places.code),
        ("environment", places.environment),
    )  # fmt: skip
    return [Looked(mark="✗", what=what, found="none found") for what, found in kinds if not found]


def _gpu(*parts: Part) -> str:
    return next((str(f.value) for p in parts for f in p.facts if f.name == "gpu"), "")


def _parameters(reports: Sequence[ScanReport]) -> int | None:
    """The number of parameters, from the newest checkpoint that has any."""
    for report in reversed(reports):
        total = 0
        for tensor in report:
            if tensor.role == "parameter":
                count = 1
                for n in tensor.shape:
                    count *= n
                total += count
        if total:
            return total
    return None


def _known_of_checkpoint(reports: Sequence[ScanReport]) -> dict[str, object]:
    for report in reversed(reports):
        rate = restored_rate(report)
        if rate is not None:
            return {"checkpoint_lr": rate, "checkpoint": report.name}
    return {}


def compare_rates(
    configs: Sequence[Config], series: Sequence[Series], reports: Sequence[ScanReport], root: Path
) -> list[Fact]:
    """The learning rate in the log, in the checkpoints and in the config.

    A schedule never goes above the configured rate, so a higher one in the log was not configured. What a checkpoint
    would restore counts as evidence when the log shows that it did. Of several configs the highest rate counts.
    """
    written = [(c.lr.number, c.lr) for c in configs if c.lr is not None and c.lr.number is not None and c.lr.number > 0]
    if not written:
        return []
    rate, value = max(written, key=lambda pair: pair[0])
    where = value.where.replace(f"{root}/", "")
    facts = [Fact(name="lr-wanted", value=rate, where=where)]
    logged = rate_in_force(series, root)
    if logged is None or logged.rate <= 1.05 * rate:
        return facts
    words = f"{logged.log}: lr {logged.rate:.2e} from step {logged.since:,} on; config: {value.text} ({where})"
    other = [r for r in reports if any(d.setting == "lr" for d in differences(r.settings, {"lr": rate}))]
    restored = logged.resumed or bool(other)
    name = "lr-in-force" if restored else "lr-above-config"
    facts.append(Fact(name=name, value=logged.rate, where=logged.log, words=words))
    for report in other:
        place = f"checkpoint {report.name}"
        found = restored_rate(report) or 0.0
        facts.append(Fact(name="lr-in-checkpoint", value=found, where=place, words=f"{place}: {_restores(report)}"))
    return facts


def _restores(report: ScanReport) -> str:
    told = report.settings
    named = (
        ("scheduler.base_lrs", told.base_lr), ("max_lr", told.max_lr), ("initial_lr", told.initial_lr), ("lr", told.lr)
    )  # fmt: skip
    return ", ".join([f"{label} = {value:g}" for label, value in named if value is not None][:2])


def order_moments(moments: Sequence[Moment]) -> tuple[Moment, ...]:
    """By step, as far as they tell one; the others at the end."""

    def key(moment: Moment) -> tuple[bool, int]:
        digits = "".join(c for c in moment.when if c.isdigit())
        return (not digits, int(digits[:18]) if digits else 0)

    return tuple(sorted(moments, key=key))
