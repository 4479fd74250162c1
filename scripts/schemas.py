"""The shape of what each command prints with --json: docs/schemas is generated from it, tests hold outputs to it."""

from typing import Any, NotRequired, TypedDict

from nanproof.cases.compare import Comparison as CaseComparison
from nanproof.cases.story import Told
from nanproof.checkpoint.report import SeriesReport
from nanproof.config.hardening import Change
from nanproof.cure.outcome import Outcome as Cure
from nanproof.diagnosing.before_resume import Check as ResumeCheck
from nanproof.diagnosing.data.report import DataReport
from nanproof.diagnosing.diagnosis import Diagnosis
from nanproof.journal import Application
from nanproof.location import Location
from nanproof.records import Finding
from nanproof.run.launcher import Outcome as Run
from nanproof.run.rollout.engine import Result as Rollout
from nanproof.run.rollout.plan import Stage
from nanproof.run.smoke.checks import Check as SmokeCheck
from nanproof.run.smoke.trial import Trial
from nanproof.schema import schema_of
from nanproof.watch.compare import Comparison as RunComparison
from nanproof.watch.glance import Glance


class Here(TypedDict):
    """Bare ``nanproof``."""

    run: str
    state: str
    kind: str
    next: str
    loss: NotRequired[str]
    incidents: NotRequired[str]
    cause: NotRequired[str]


class Named(TypedDict):
    name: str
    title: str


class Resume(TypedDict):
    """``diagnose --before-resume``."""

    checkpoint: str
    checks: list[ResumeCheck]
    go: bool


class Page(TypedDict):
    """A rule, a config check or a cause."""

    name: str
    title: str
    sections: dict[str, str]


class Format(TypedDict):
    """A floating-point format."""

    format: str
    also_called: str
    max: float
    smallest_normal: float
    smallest_subnormal: float
    machine_eps: float
    safe_eps: float
    exp_overflows_above: float
    has_inf: bool
    has_nan: bool


class Topics(TypedDict):
    """``explain`` without a name: everything that it can explain."""

    formats: list[Format]
    topics: list[Named]


class Hardened(TypedDict):
    path: str
    written: str | None
    changes: list[Change]
    left: list[Any]
    next: list[str]
    diff: str


class Undone(TypedDict):
    undone: list[str]


class Lint(TypedDict):
    files: int
    findings: list[Finding]
    repairs: NotRequired[list[Any]]
    application: NotRequired[Application | None]


class Count(TypedDict):
    code: str
    name: str
    count: int
    safe_fixes: int


class Statistics(TypedDict):
    """``lint --statistics``."""

    files: int
    statistics: list[Count]


class Patch(TypedDict):
    """``lint --diff``."""

    diff: str
    repaired: list[Any]


class State(TypedDict):
    name: str
    state: str


class Report(TypedDict):
    wrote: str
    runs: list[State]
    compared: NotRequired[RunComparison]


class Scan(TypedDict):
    series: SeriesReport
    config: NotRequired[dict[str, list[str]]]
    moved: NotRequired[list[Any]]


class Smoke(TypedDict):
    ok: bool
    checks: list[SmokeCheck]
    trial: Trial


class Address(TypedDict):
    """``watch --web``."""

    address: str


OUTPUTS: dict[str, Any] = {
    "nanproof": Here,
    "case": list[Named] | list[Told] | CaseComparison,
    "cure": Cure | Undone,
    "diagnose": Diagnosis | Resume | DataReport | Smoke,
    "explain": Page | Format | Topics,
    "harden": Hardened | Undone,
    "lint": Lint | Statistics | Patch,
    "locate": Location,
    "report": Report,
    "rollout": Rollout | list[Stage],
    "run": Run,
    "scan": Scan,
    "smoke": Smoke,
    "watch": list[Glance] | Address,
}
"""Every command that has --json, and what it prints; with options that change it, one of several shapes."""


def schemas() -> dict[str, dict[str, Any]]:
    """The schemas by file name."""
    titles = {verb: "nanproof --json" if verb == "nanproof" else f"nanproof {verb} --json" for verb in OUTPUTS}
    return {f"{verb}.json": schema_of(kind, titles[verb], printed=True) for verb, kind in OUTPUTS.items()}
