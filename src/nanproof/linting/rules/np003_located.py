"""NP003: a line that `nanproof locate` has proved to be the origin of an incident, and that no rule covers."""

from __future__ import annotations

from ..rule import Rule

RULE = Rule(
    code="NP003",
    name="located",
    what="Shows the lines that `nanproof locate` found to be the origin of an incident in a run below the linted "
    "folder, with the mechanism, where no rule has found them.",
    why="The step was played again and the value was born here. That there is no rule for it does not make it less "
    "true. The finding goes when the line changes, or when the incident's folder is removed.",
    bad="",
    good="",
    false_alarm="The incident was caused by a bad batch or a broken checkpoint, and the line is right.",
    nodes=(),
    check=lambda node, module: iter(()),
)
