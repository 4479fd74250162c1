"""Findings in SARIF 2.1.0, the format that code-scanning services read."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from .. import __version__
from ..records import Finding
from .catalogue import everything
from .notebook import file_place

SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"


def sarif(findings: Sequence[Finding]) -> dict[str, Any]:
    """One run with all rules that found something, and their results."""
    used = [rule for rule in everything() if any(f.code == rule.code for f in findings)]
    index = {rule.code: i for i, rule in enumerate(used)}
    rules = [
        {
            "id": rule.code,
            "name": rule.name,
            "shortDescription": {"text": rule.name.replace("-", " ")},
            "fullDescription": {"text": rule.what.strip()},
            "help": {"text": rule.why.strip(), "markdown": rule.topic.markdown()},
        }
        for rule in used
    ]
    driver = {"name": "nanproof", "version": __version__, "rules": rules}
    results = [_result(f, index[f.code]) for f in findings]
    return {"$schema": SCHEMA, "version": "2.1.0", "runs": [{"tool": {"driver": driver}, "results": results}]}


def _result(finding: Finding, rule: int) -> dict[str, Any]:
    path, _, cell = finding.path.partition(":cell ")
    artifact = {"uri": _uri(path)}
    words = finding.message + (f". {finding.help}" if finding.help else "")
    place: dict[str, Any] = {"artifactLocation": artifact}
    _, line, column = file_place(finding)
    place["region"] = {"startLine": line, "startColumn": column}
    if cell:
        words = f"{words} (cell {cell}, line {finding.line})"
    result: dict[str, Any] = {
        "ruleId": finding.code,
        "ruleIndex": rule,
        "level": "note" if finding.info else "error",
        "message": {"text": words},
        "locations": [{"physicalLocation": place}],
    }
    if finding.edits:
        replacements = [
            {
                "deletedRegion": {"byteOffset": edit.start, "byteLength": edit.end - edit.start},
                "insertedContent": {"text": edit.text},
            }
            for edit in finding.edits
        ]
        safety = "safe" if finding.safe else "unsafe"
        change = {"artifactLocation": artifact, "replacements": replacements}
        result["fixes"] = [{"description": {"text": f"{safety} fix"}, "artifactChanges": [change]}]
    return result


def _uri(path: str) -> str:
    """Relative to where it was run, if it is below; as services match it against the repository."""
    here, full = Path.cwd(), Path(path).absolute()
    return quote(full.relative_to(here).as_posix() if full.is_relative_to(here) else full.as_posix())
