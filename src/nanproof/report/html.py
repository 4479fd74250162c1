"""The page of `nanproof watch --web` as one file: its data, its script and its styles inside, no network needed.

A content security policy in the file lets only its own script run, known by its hash; data stands in a block that
browsers never execute.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
from collections.abc import Sequence
from typing import Any

from ..files import write_atomic
from ..records import to_json
from ..watch import history
from ..watch.compare import compare
from ..watch.runs import Run
from ..watch.server import MODULES, page_file
from ..watch.why import Why, facts_of

_IMPORT = re.compile(r"^import \{(.*?)\} from \"\./(\w+)\.js\";\n", re.M)
_EXPORT = re.compile(r"^export (?:async )?(?:function|class|const) (\w+)", re.M)
_LINKS = re.compile(r'<link rel="stylesheet"[^>]*>\n|<script [^>]*></script>\n')


def write_html(runs: Sequence[Run], out: str | os.PathLike[str], note: str = "", *, causes: bool = True) -> None:
    """Write the page of some runs, as they are now, into one file; without ``causes`` none of them is diagnosed."""
    write_atomic(out, page(runs, note, causes=causes))


def page(runs: Sequence[Run], note: str = "", *, causes: bool = True) -> str:
    """The file's text."""
    script = f"{_text('vendor/uPlot.iife.min.js')}\n{_bundle()}"
    style = f"{_text('vendor/uPlot.min.css')}\n{_text('style.css')}"
    policy = (
        f"default-src 'none'; script-src '{_hash(script)}'; style-src '{_hash(style)}'; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )
    data = json.dumps(to_json(_data(runs, note, causes)), allow_nan=False).replace("<", "\\u003c")
    head = f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n<style>{style}</style>\n</head>'
    foot = (
        f'<script type="application/json" id="data">{data}</script>\n<script type="module">{script}</script>\n</body>'
    )
    return _LINKS.sub("", _text("index.html")).replace("</head>", head).replace("</body>", foot)


def _text(name: str) -> str:
    return page_file(name).decode()


def _bundle() -> str:
    """The modules of the page one after the other, each a function that returns what it exports."""
    text = "window.uPlot = uPlot;\n" + "\n".join(map(_module, MODULES))
    assert "</script" not in text
    return text


def _module(name: str) -> str:
    source = _IMPORT.sub(lambda m: f"const {{{m[1]}}} = {m[2]}_js;\n", _text(name))
    exports = ", ".join(m[1] for m in _EXPORT.finditer(source))
    body = _EXPORT.sub(lambda m: m[0].removeprefix("export "), source)
    return f"const {name.removesuffix('.js')}_js = (() => {{\n{body}\nreturn {{ {exports} }};\n}})();"


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _data(runs: Sequence[Run], note: str, causes: bool) -> dict[str, Any]:
    data: dict[str, Any] = {"runs": [], "points": {}, "incidents": {}, "facts": {}, "note": note}
    for run in runs:
        run.poll()
        data["runs"].append(run.told())
        data["points"][run.id] = base64.b64encode(history.encode(run.series, width=5000, more=run.foreseen())).decode()
        data["incidents"] |= {i["id"]: run.incident(i["id"]) for i in run.incidents()}
        known = None if causes else Why()
        data["facts"][run.id] = facts_of(run.home, run.state(), run.incidents(), known)
    data["compared"] = compare(*runs) if len(runs) == 2 else None
    return data
