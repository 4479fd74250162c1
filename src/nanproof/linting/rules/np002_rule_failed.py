"""NP002: a rule that fails says so instead of passing for silent."""

from __future__ import annotations

from ..rule import Rule

RULE = Rule(
    code="NP002",
    name="rule-failed",
    what="Says that a rule of nanproof itself failed on a file. The other rules have looked at it.",
    why="""A rule that stops half-way has not found the file to be clean. The finding names the rule and the error, so
that it can be reported.""",
    bad="",
    good="import torch\n",
    false_alarm="It never is one, but a mistake in nanproof: `--ignore` the rule that it names for now.",
    nodes=(),
    check=lambda node, module: iter(()),
)
