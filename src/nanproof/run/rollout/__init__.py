"""Scaling a training up in stages, each let through by gates.

from nanproof.run.rollout import load_plan, roll_out

result = roll_out(load_plan("plan.yaml"))
result.ok, [stage.name for stage in result.stages if not stage.passed]
"""

from .engine import Result, StageResult, roll_out
from .plan import Plan, Stage
from .reading import load_plan

__all__ = ["Plan", "Result", "Stage", "StageResult", "load_plan", "roll_out"]
