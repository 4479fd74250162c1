"""The checks as JUnit XML, which every CI system shows."""

from __future__ import annotations

from xml.etree import ElementTree as xml

from .checks import SmokeReport


def junit(report: SmokeReport, title: str) -> str:
    """One test suite with one case for each check."""
    failed = sum(c.result == "FAIL" for c in report.checks)
    suite = xml.Element("testsuite", name=title, tests=str(len(report.checks)), failures=str(failed))
    for check in report.checks:
        case = xml.SubElement(suite, "testcase", classname="nanproof.smoke", name=check.name)
        if check.result == "FAIL":
            xml.SubElement(case, "failure", message=_plain(check.reason))
        else:
            xml.SubElement(case, "system-out").text = _plain(check.reason)
    return xml.tostring(suite, encoding="unicode", xml_declaration=True) + "\n"


def _plain(text: str) -> str:
    """XML has no words for control characters, not even escaped."""
    return "".join(c if c.isprintable() else "?" for c in text)
