"""Stage after stage, with fall-backs; what is done is kept, so that a rollout goes on after a kill."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from pathlib import Path

from ... import files
from ...errors import FormatError, NanproofError, UsageError
from ...files import file_bytes
from ...records import from_json, to_json
from .attempt import Tell, attempt
from .gates import Gate, judge
from .plan import Plan, Stage

STATE = "rollout.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class StageResult:
    """One attempt at a stage."""

    name: str
    attempt: int
    passed: bool
    run_dir: str
    setting: Mapping[str, str] = field(default_factory=dict)
    gates: tuple[Gate, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """The rollout so far; the same record is kept on disk."""

    plan: str
    digest: str
    stages: tuple[StageResult, ...] = ()
    """Every attempt that ended, in order."""
    total: int = 0

    @property
    def passed(self) -> frozenset[str]:
        return frozenset(s.name for s in self.stages if s.passed)

    @property
    def ok(self) -> bool:
        return len(self.passed) == self.total


def roll_out(plan: Plan, *, restart: bool = False, tell: Callable[[str, str], None] | None = None) -> Result:
    """Run the stages that have not passed yet, one after the other; stop at the first that fails for good.

    ``tell(stage, words)`` hears about progress. With ``restart`` an earlier rollout of this plan is forgotten.
    """
    files.make_folder(plan.out)
    with files.Lock(plan.out):
        result = _before(plan, restart)
        for stage in plan.stages:
            if stage.name in result.passed:
                continue
            result = _stage(plan, stage, result, partial(tell or _silent, stage.name))
            if stage.name not in result.passed:
                break
    return result


def _silent(stage: str, words: str) -> None: ...


def _before(plan: Plan, restart: bool) -> Result:
    """Where an earlier rollout of the same plan stopped."""
    fresh = Result(plan=plan.name, digest=plan.digest, total=len(plan.stages))
    path = plan.out / STATE
    if restart or not path.exists():
        return fresh
    try:
        kept = from_json(Result, json.loads(file_bytes(path)))
    except (ValueError, NanproofError) as error:
        raise FormatError(f"{path} is no state of a rollout: {error}", hint="add --restart to start over") from None
    if kept.digest != plan.digest:
        raise UsageError("the plan changed since this rollout began", hint="add --restart to start over")
    return kept


def _stage(plan: Plan, stage: Stage, result: Result, tell: Tell) -> Result:
    """All attempts at one stage. A stage that failed before is tried again from its first attempt."""
    tries = 1 + (stage.on_fail.retry if stage.on_fail else 0)
    done = sum(s.name == stage.name for s in result.stages)
    for number in range(tries):
        fall_back = stage.on_fail if number and stage.on_fail else None
        setting, env = (fall_back.set, fall_back.env) if fall_back else ({}, {})
        run_dir = _free(plan.out / f"{plan.stages.index(stage) + 1}-{_slug(stage.name)}")
        ended = attempt(plan, stage, run_dir, setting, env, tell)
        gates = judge(stage, ended.series, ended.incidents, ended.complaint)
        passed = all(g.open for g in gates)
        one = StageResult(
            name=stage.name,
            attempt=done + number + 1,
            passed=passed,
            run_dir=str(run_dir),
            setting={**setting, **env},
            gates=gates,
        )
        result = Result(plan=result.plan, digest=result.digest, stages=(*result.stages, one), total=result.total)
        files.write_atomic(plan.out / STATE, json.dumps(to_json(result), indent=2))
        if passed:
            break
    return result


def _free(path: Path) -> Path:
    """A folder that no attempt has used: one that was killed half-way is kept as it is."""
    numbered = (path.with_name(f"{path.name}-{n}") for n in count(1))
    return next(p for p in numbered if not p.exists())


def _slug(name: str) -> str:
    return re.sub(r"[^\w.-]+", "-", name)[:40].strip("-.") or "stage"


def summary(result: Result, plan: Plan) -> str:
    """The rollout as Markdown: a table of attempts, and why each gate was open or not."""
    lines = [f"# Rollout of {plan.name}", "", "| stage | attempt | settings | result |", "|---|---|---|---|"]
    for s in result.stages:
        setting = ", ".join(f"{k}={v}" for k, v in s.setting.items()) or "as planned"
        lines.append(f"| {s.name} | {s.attempt} | {setting} | {'passed' if s.passed else 'failed'} |")
    waiting = [s.name for s in plan.stages if s.name not in {r.name for r in result.stages}]
    lines += [f"| {name} | – | – | not run |" for name in waiting]
    for s in result.stages:
        lines += ["", f"## {s.name}, attempt {s.attempt}", ""]
        lines += [f"- {'open' if g.open else '**closed**'}: {g.name}: {g.reason}" for g in s.gates]
        lines += [f"- run: `{Path(s.run_dir).name}`"]
    return "\n".join(lines) + "\n"
