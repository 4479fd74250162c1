"""A run and all its files as one body of evidence."""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from ..checkpoint.config import differences
from ..checkpoint.report import ScanReport
from ..config.launch import read_launch
from ..config.project import Project
from ..config.value import Value
from ..files import file_bytes, file_text
from ..logs import Series
from ..logs.readers.notebook import read_notebook
from ..logs.timeline import timeline
from .diagnosis import Looked, Moment
from .evidence import Fact
from .sources.checkpoints import Began, read_checkpoints, restored_rate
from .sources.code import read_code
from .sources.code_signs import signs_of
from .sources.configs import Config, find_configs, read_configs
from .sources.data import read_data
from .sources.environment import read_environment
from .sources.in_force import (
    CODE,
    COMMAND,
    CONFIG,
    LOG,
    RUN_CONFIG,
    InForce,
    Setting,
    head_of,
    interpret,
    plain_value,
    read_header,
    read_python,
    read_settings,
    read_versions_in,
)
from .sources.incidents import read_incidents
from .sources.logs import rate_in_force, read_logs
from .sources.part import Part, join, name_in, shorten
from .sources.places import Places, find_places
from .sources.typed import of_its_script, shown_commands
from .useless import find_useless

T = TypeVar("T")
MAX_CODE = 300
Tree = tuple[str, ast.AST, str]
"""A file of code: its name, what was parsed, and its text."""
_MILESTONES = ("milestones", "lr_steps", "lr_milestones", "decay_steps")


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Everything that the files of a run say."""

    places: Places
    part: Part
    in_force: InForce
    configs: tuple[Config, ...] = ()
    series: tuple[Series, ...] = ()
    reports: tuple[ScanReport, ...] = ()
    project: Project = field(default_factory=Project)
    """The code, parsed, if there is a config that it may read."""


def read_run(paths: Sequence[str | os.PathLike[str]], *, gpu: str = "") -> Run:
    """Read all that is there. ``gpu`` is what the user said about it."""
    places = of_its_script(find_places(paths))
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

    trees = list(_trees(places))
    nothing = Part()
    no_configs: list[Config] = []
    no_facts: list[Fact] = []
    no_series: tuple[Part, tuple[Series, ...]] = (nothing, ())
    no_reports: tuple[Part, tuple[ScanReport, ...]] = (nothing, ())
    configs = attempt("config", no_configs, lambda: find_configs(places.configs, root, _runs(places)))
    every = next((v.number for c in configs for v in c.settings if v.name == "logging_steps" and v.number), None)
    logs, series = attempt("log", no_series, lambda: read_logs(places.logs, root, every, places.earlier))
    found = list(places.checkpoints)
    checkpoints, reports = attempt(
        "checkpoint", no_reports, lambda: read_checkpoints(found, _broke_at(series), _began(series))
    )
    environment = attempt("environment", nothing, lambda: read_environment(places.environment, root))
    incidents = attempt("incident", nothing, lambda: read_incidents(places.incidents, root))
    header = attempt("log", no_facts, lambda: list(_versions(places)))
    empty = InForce.of(())
    force = attempt("settings", empty, lambda: InForce.of(_settings(places, trees, configs, series, environment)))
    card = force.get("gpu")
    gpu = gpu or _gpu(environment, incidents) or (str(card.value) if card is not None else "")
    project = attempt("code", Project(), lambda: Project.read(*places.code) if configs else Project())
    settings = attempt(
        "config",
        nothing,
        lambda: read_configs(
            configs, project, root, gpu=gpu, parameters=_parameters(reports), facts=_known_of_checkpoint(reports)
        ),
    )
    force = _decided(settings, force)
    settings = _without(settings, force)
    code = attempt("code", nothing, lambda: read_code([*places.code, *places.notebooks], root))
    signs = attempt("code", no_facts, lambda: list(_signs(trees)))
    data = attempt("data", nothing, lambda: read_data(places.data, root))
    resumed = any(f.name == "resumed" for p in (logs, settings) for f in p.facts)
    rates = attempt("log", no_facts, lambda: compare_rates(configs, series, reports, root, resumed=resumed))
    if resumed and not any(f.name.startswith("lr-") for f in rates):
        rates += attempt("log", no_facts, lambda: list(_overridden(force)))
    useless = attempt("log", nothing, lambda: find_useless(series, root))
    looked = Part(looked=(*failed, *_absent(places, configs)), notes=places.notes)
    unscaled = attempt("code", no_facts, lambda: list(_unscaled(trees, force)))
    facts = [*_ordered(force, signs), *header, *signs, *rates, *unscaled]
    compared = Part(facts=tuple(facts))
    parts = join(logs, incidents, checkpoints, settings, code, environment, data, compared, useless, looked)
    return Run(
        places=places,
        part=parts,
        in_force=force,
        configs=tuple(configs),
        series=series,
        reports=reports,
        project=project,
    )


def _ordered(force: InForce, signs: Sequence[Fact]) -> Iterator[Fact]:
    """The facts of what was in force; silence of training code that was read means fp32 weights and compute."""
    yield from force.facts()
    if any(f.name == "half-weights" for f in signs) and not force.master_weights:
        half = next(f for f in signs if f.name == "half-weights")
        yield Fact(name="weights", value="fp16", where=half.where, words=half.words)


_CTC = re.compile(
    r"(?i)\b(?:criterion|loss(?:_?(?:fn|type|name))?|objective)\W{1,4}\w*ctc\w*|\bctc_?loss\b|\bCTCCriterion"
)
_CASTS = re.compile(r"autocast|\bhalf\(\)|(?<![a-z])amp(?![a-z])|GradScaler|float16|(?<![a-z])[bf]p?16(?!\d)")
_SCALES = re.compile(r"(?i)\.scale\(|scale_loss|(?<!grad)scaler\(|accelerat|deepspeed|lightning|\bTrainer\b|apex")


def _unscaled(trees: Sequence[Tree], force: InForce) -> Iterator[Fact]:
    """A loop under fp16 autocast that never scales its loss; the dtype may come from a config."""
    precision = force.get("precision")
    if precision is None or not str(precision.value).startswith("fp16"):
        return
    loops = [(name, text) for name, _, text in trees if ".backward(" in text and "autocast" in text]
    if not loops or any(_SCALES.search(text) for _, _, text in trees):
        return
    made = any("GradScaler(" in text for _, _, text in trees)
    scaler = "the GradScaler never scales the loss" if made else "no GradScaler in the code"
    yield Fact(name="no-scaler", where=loops[0][0], words=f"fp16 ({precision.where}) under autocast, and {scaler}")


def _decided(part: Part, force: InForce) -> InForce:
    """Where settings contradict each other, the precision table knows which of them wins."""
    clash = any(f.name == "config-check" and f.value in ("NP701", "NP702") for f in part.facts)
    wins = [f for f in part.facts if f.name == "precision"]
    if not (clash and wins):
        return force
    chosen = Setting(concept="precision", value=str(wins[0].value), where=wins[0].where, rank=-1)
    return InForce.of((chosen, *force.settings))


def _without(part: Part, force: InForce) -> Part:
    """The facts of configs that the table of what was in force does not already give."""
    known = {f.name for f in force.facts()} - {"no-bf16"}
    facts = tuple(f for f in part.facts if f.name not in known or f.name in ("config-check", "no-scaler"))
    return Part(facts=facts, looked=part.looked, moments=part.moments, notes=part.notes, tables=part.tables)


def _settings(
    places: Places, trees: Sequence[Tree], configs: Sequence[Config], series: Sequence[Series], environment: Part
) -> Iterator[Setting]:
    root = places.root
    logged = rate_in_force(series, root)
    if logged is not None:
        yield Setting(concept="lr", value=logged.rate, where=logged.log, rank=LOG)
    texts = [Path(log.path) for log in places.logs if log.format.startswith("text")]
    others = [
        f for f in (places.root.iterdir() if places.root.is_dir() else ()) if f.suffix in (".txt", ".log", ".out")
    ]
    for path in dict.fromkeys([*texts, *others]):
        if path.is_file():
            yield from read_header(head_of(path), name_in(root, path))
    for path in places.notebooks:
        yield from read_header(read_notebook(file_bytes(path)).printed, name_in(root, path))
    for source in shown_commands(places):
        for value in read_launch(source).values:
            yield from interpret(value.key, value.value, source.path, COMMAND)
    for log in places.logs:
        if log.format == "mlflow" and (Path(log.path) / "params").is_dir():
            for file in sorted((Path(log.path) / "params").iterdir())[:500]:
                yield from interpret(file.name, plain_value(file_text(file)), name_in(root, file), RUN_CONFIG)
    runs = _runs(places)
    for config in configs:
        if config.kind == "python":
            continue
        rank = COMMAND if config.kind == "shell" else RUN_CONFIG if config.path.parent in runs else CONFIG
        yield from read_settings(config.settings, config.name, root, rank)
    for fact in environment.facts:
        if fact.name == "gpu":
            yield Setting(concept="gpu", value=str(fact.value), where=fact.where, rank=LOG)
        if fact.name == "version-torch":
            yield Setting(concept="torch", value=str(fact.value), where=fact.where, rank=CONFIG)
    yield from _of_code(trees)


def _of_code(trees: Sequence[Tree]) -> Iterator[Setting]:
    """What the code sets; nothing that several scripts set differently, since nobody knows which of them ran."""
    found: list[tuple[bool, Setting]] = []
    casts = False
    for name, tree, text in trees:
        trains = ".backward(" in text and ".step(" in text
        own = [*read_python(tree, name), *_autocasts(tree, name)]
        found += [(trains, setting) for setting in own]
        casts = casts or _CASTS.search(text) is not None
    told: dict[str, dict[str, set[str]]] = {}
    for trains, setting in found:
        if trains:
            told.setdefault(setting.concept, {}).setdefault(setting.where.partition(":")[0], set()).add(setting.shown)
    apart = {concept for concept, of in told.items() if len({frozenset(shown) for shown in of.values()}) > 1}
    yield from (setting for trains, setting in found if not trains or setting.concept not in apart)
    if not casts and any(".backward(" in text and ".step(" in text for _, _, text in trees):
        yield Setting(concept="precision", value="fp32", where="code", rank=9)


def _autocasts(tree: ast.AST, name: str) -> Iterator[Setting]:
    """autocast and GradScaler say in which precision a loop computes."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        callee = ast.unparse(node.func).rpartition(".")[2]
        where = f"{name}:{node.lineno}"
        shown = ast.unparse(node)
        if "enabled=False" in shown.replace(" ", ""):
            continue
        if callee == "autocast" and "cpu" not in shown:
            kind = "bf16" if "bfloat16" in shown else "fp16"
            if "dtype" in shown and "float16" not in shown and "half" not in shown:
                continue  # the dtype is a variable: the config says which
            yield Setting(concept="precision", value=kind, where=where, rank=CODE)
        elif callee == "GradScaler":
            yield Setting(concept="precision", value="fp16", where=where, rank=CODE)


def _trees(places: Places) -> Iterator[Tree]:
    for path in sorted([*places.code, *places.notebooks])[:MAX_CODE]:
        try:
            notebook = path.suffix == ".ipynb"
            small = notebook or path.stat().st_size < (1 << 20)
            text = file_text(path, errors="replace") if small else ""
            text = read_notebook(text.encode()).code if notebook else text
            tree = ast.parse(text)
        except (OSError, SyntaxError, ValueError, RecursionError):
            continue
        yield name_in(places.root, path), tree, text


def _signs(trees: Sequence[Tree]) -> Iterator[Fact]:
    found = [fact for name, tree, text in trees for fact in signs_of(tree, text, name)]
    empty = any("to_empty(" in text or "init_empty_weights" in text for _, _, text in trees)
    for fact in found:
        if fact.name == "left-out-of-init":  # matters only where memory is all that a parameter starts from
            yield from [Fact(name="raw-parameters", where=fact.where, words=fact.words)] if empty else []
        else:
            yield fact


def _versions(places: Places) -> Iterator[Fact]:
    for log in places.logs[:4]:
        if log.format.startswith("text"):
            head, name = head_of(Path(log.path)), name_in(places.root, log.path)
            yield from read_versions_in(head, name)
            if (named := _CTC.search(head)) is not None:
                words = f"“{named[0]}”"
                yield Fact(
                    name="about", value="ctc", where=f"{name}:{head.count(chr(10), 0, named.start()) + 1}", words=words
                )


def _began(series: Sequence[Series]) -> Began | None:
    for one in series:
        loss = one.loss
        if loss is None or not len(loss):
            continue
        loaded = " ".join(e.text for e in one.events if e.kind == "resume")
        return Began(finite=not bool(loss.bad[0]) and bool(loss.bad.any()), loaded=loaded)
    return None


def _broke_at(series: Sequence[Series]) -> int | None:
    """The first step with a bad loss or gradient, in the newest log that shows one; rows are no steps."""
    for one in (s for s in series if s.unit != "row"):
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
        ("log", places.logs),
        ("config", configs),
        ("checkpoint", places.checkpoints),
        ("code", [*places.code, *places.notebooks]),
        ("environment", places.environment),
    )
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
    configs: Sequence[Config],
    series: Sequence[Series],
    reports: Sequence[ScanReport],
    root: Path,
    *,
    resumed: bool = False,
) -> list[Fact]:
    """The learning rate in the log, in the checkpoints and in the config.

    A schedule never goes above the configured rate, so a higher one in the log was not configured. What a checkpoint
    would restore counts as evidence when the log shows that it did. Of several configs the highest rate counts.
    """
    written = [(c.lr.number, c.lr) for c in configs if c.lr is not None and c.lr.number is not None and c.lr.number > 0]
    if not written:
        return []
    rate, value = max(written, key=lambda pair: pair[0])
    where = shorten(value.where, root)
    facts = [Fact(name="lr-wanted", value=rate, where=where)]
    late = any(s.unit == "epoch" and s.segments and s.segments[0].first_step > 1 for s in series)
    facts += _off_schedule(configs, series, rate, root) if resumed or late else ()
    logged = rate_in_force(series, root)
    if logged is None or logged.rate <= 1.05 * rate:
        return facts
    words = f"{logged.log}: lr {logged.rate:.2e} from step {logged.since:,} on; config: {value.text} ({where})"
    other = [r for r in reports if any(d.setting == "lr" for d in differences(r.settings, {"lr": rate}))]
    restored = resumed or logged.resumed or bool(other)
    name = "lr-in-force" if restored else "lr-above-config"
    facts.append(Fact(name=name, value=logged.rate, where=logged.log, words=words))
    for report in other:
        place = f"checkpoint {report.name}"
        found = restored_rate(report) or 0.0
        facts.append(Fact(name="lr-in-checkpoint", value=found, where=place, words=f"{place}: {_restores(report)}"))
    return facts


def _overridden(force: InForce) -> Iterator[Fact]:
    """A resumed run that prints another rate than its command line asks for."""
    told = {s.rank: s for s in reversed(force.settings) if s.concept == "lr" and isinstance(s.value, float)}
    printed, asked = told.get(LOG), told.get(COMMAND)
    if printed is not None and asked is not None and float(printed.value) > 1.05 * float(asked.value) > 0:
        words = f"lr {printed.shown} ({printed.where}); the command line asks for {asked.shown} ({asked.where})"
        yield Fact(name="lr-in-force", value=float(printed.value), where=printed.where, words=words)


def _off_schedule(configs: Sequence[Config], series: Sequence[Series], base: float, root: Path) -> Iterator[Fact]:
    """A rate that falls where the config has no milestone, or did not fall where it has one."""
    steps = [(v, m) for c in configs for v in c.settings for m in _milestones(v)]
    first = min((m for _, m in steps), default=0)
    for one in series:
        if one.lr is None or not steps:
            continue
        rate = one.lr.only(~one.lr.bad)
        where = name_in(root, one.source)
        for value, milestone in steps if one.unit == "step" else ():
            before, after = rate.values[rate.steps < milestone][-3:], rate.values[rate.steps > milestone][:3]
            if len(before) == len(after) == 3 and len({*before.tolist(), *after.tolist()}) == 1:
                words = f"lr stays at {before[0]:g} across step {milestone:,}, a milestone ({_short(value, root)})"
                yield Fact(name="lr-in-force", value=float(before[0]), where=where, words=words)
                return
        passed = [(v, m) for v, m in steps if one.unit == "epoch" and len(rate) and m < rate.steps[0]]
        if passed and base and rate.values[0] >= 0.99 * base:
            value, milestone = passed[-1]
            words = f"lr is still {rate.values[0]:g} at epoch {rate.steps[0]:,}, after milestone {milestone:,}"
            where_set = f" ({_short(value, root)})"
            yield Fact(name="lr-in-force", value=float(rate.values[0]), where=where, words=words + where_set)
            return
        drops = [i for i in range(1, len(rate)) if rate.values[i] <= 0.51 * rate.values[i - 1]]
        # an epoch is never shorter than a step: before the first milestone in either unit nothing may fall
        early = [i for i in drops if 1 < rate.steps[i] < 0.95 * first < 10 * rate.steps[-1]]
        if early and len(drops) <= 5:
            i, value = early[0], steps[0][0]
            fell = f"lr falls from {rate.values[i - 1]:g} to {rate.values[i]:g} at {one.unit} {rate.steps[i]:,}"
            words = f"{fell}; the config lowers it first at {first:,} ({_short(value, root)})"
            yield Fact(name="lr-in-force", value=float(rate.values[i]), where=where, words=words)
            return


def _milestones(value: Value) -> Iterator[int | float]:
    """Where a setting lowers the rate."""
    given = value.value if isinstance(value.value, tuple) else (value.value,)
    listed = value.name in _MILESTONES or (value.name == "steps" and isinstance(value.value, tuple))
    if listed or (value.name == "step_size" and value.number and value.number > 1):
        yield from (m for m in given if isinstance(m, int | float) and not isinstance(m, bool))


def _short(value: Value, root: Path) -> str:
    return shorten(value.where, root)


def _restores(report: ScanReport) -> str:
    told = report.settings
    named = (
        ("scheduler.base_lrs", told.base_lr),
        ("max_lr", told.max_lr),
        ("initial_lr", told.initial_lr),
        ("lr", told.lr),
    )
    return ", ".join([f"{label} = {value:g}" for label, value in named if value is not None][:2])


def order_moments(moments: Sequence[Moment]) -> tuple[Moment, ...]:
    """By step, as far as they tell one; the others at the end."""

    def key(moment: Moment) -> tuple[bool, int]:
        digits = "".join(c for c in moment.when if c.isdigit())
        return (not digits, int(digits[:18]) if digits else 0)

    return tuple(sorted(moments, key=key))
