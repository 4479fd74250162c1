"""`nanproof lint --lsp`: findings, rule pages and quick fixes in an editor, over standard input and output.

Files are linted as they stand in the editor, with the rest of their project as it lies on the disk.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlparse

from .. import __version__
from ..errors import UsageError
from .catalogue import everything
from .document import Unreadable, open_document
from .engine import Checked, Problem, mentions_torch
from .inspection import Inspection
from .tree import line_starts

if TYPE_CHECKING:
    from pygls.lsp.server import LanguageServer


def serve() -> int:
    """Run until the editor closes the connection."""
    make_server().start_io()
    return 0


def make_server() -> LanguageServer:
    """The server with its features; not started."""
    try:
        from lsprotocol import types
        from pygls.lsp.server import LanguageServer
    except ImportError:
        raise UsageError("the language server needs pygls", hint="pip install 'nanproof[lsp]'") from None
    server = LanguageServer("nanproof", __version__)
    found: dict[str, Checked] = {}

    def look(uri: str, text: str) -> None:
        found[uri] = checked = lint_text(path_of(uri), text)
        items = [_diagnostic(p, text, types) for p in checked.problems]
        server.text_document_publish_diagnostics(types.PublishDiagnosticsParams(uri=uri, diagnostics=items))

    @server.feature(types.TEXT_DOCUMENT_DID_OPEN)
    def opened(params: types.DidOpenTextDocumentParams) -> None:
        look(params.text_document.uri, params.text_document.text)

    @server.feature(types.TEXT_DOCUMENT_DID_CHANGE)
    def changed(params: types.DidChangeTextDocumentParams) -> None:
        uri = params.text_document.uri
        look(uri, server.workspace.get_text_document(uri).source)

    @server.feature(types.TEXT_DOCUMENT_DID_CLOSE)
    def closed(params: types.DidCloseTextDocumentParams) -> None:
        found.pop(params.text_document.uri, None)
        server.text_document_publish_diagnostics(
            types.PublishDiagnosticsParams(uri=params.text_document.uri, diagnostics=[])
        )

    @server.feature(types.TEXT_DOCUMENT_HOVER)
    def hover(params: types.HoverParams) -> types.Hover | None:
        uri = params.text_document.uri
        text = server.workspace.get_text_document(uri).source
        for problem in found.get(uri, Checked(path="")).problems:
            span = _range(problem.span, text, types)
            if _inside(params.position, span):
                page = next(r.topic.markdown() for r in everything() if r.code == problem.finding.code)
                content = types.MarkupContent(kind=types.MarkupKind.Markdown, value=page)
                return types.Hover(contents=content, range=span)
        return None

    @server.feature(types.TEXT_DOCUMENT_CODE_ACTION)
    def actions(params: types.CodeActionParams) -> list[types.CodeAction]:
        uri = params.text_document.uri
        text = server.workspace.get_text_document(uri).source
        result = []
        for problem in found.get(uri, Checked(path="")).problems:
            span = _range(problem.span, text, types)
            if not problem.changes or span.end < params.range.start or params.range.end < span.start:
                continue
            edits = [
                types.TextEdit(range=_range((c.start, c.end), text, types), new_text=c.text) for c in problem.changes
            ]
            safety = "safe" if problem.finding.safe else "changes behavior"
            result.append(
                types.CodeAction(
                    title=f"{problem.finding.code}: {problem.finding.help or 'fix'} ({safety})",
                    kind=types.CodeActionKind.QuickFix,
                    diagnostics=[_diagnostic(problem, text, types)],
                    edit=types.WorkspaceEdit(changes={uri: edits}),
                    is_preferred=problem.finding.safe,
                )
            )
        return result

    return server


def path_of(uri: str) -> Path:
    """
    >>> str(path_of("file:///home/me/my%20run/train.py"))
    '/home/me/my run/train.py'
    """
    return Path(unquote(urlparse(uri).path))


def lint_text(path: Path, text: str) -> Checked:
    """A file as an editor holds it, with the settings and the files of its folder."""
    data = text.encode()
    if path.suffix != ".py" or not mentions_torch(data):
        return Checked(path=str(path))
    try:
        open_document(str(path), data)
        run = Inspection([path.parent if path.parent.is_dir() else path])
    except (Unreadable, UsageError):
        return Checked(path=str(path))
    return run.linter.data(path, data)


def _diagnostic(problem: Problem, text: str, types: Any) -> Any:
    finding = problem.finding
    words = finding.message + (f"\n{finding.help}" if finding.help else "")
    return types.Diagnostic(
        range=_range(problem.span, text, types),
        message=words,
        code=finding.code,
        source="nanproof",
        severity=types.DiagnosticSeverity.Information if finding.info else types.DiagnosticSeverity.Warning,
    )


def _range(span: tuple[int, int], text: str, types: Any) -> Any:
    """A span as lines and UTF-16 units, both from 0, as editors count."""
    starts = line_starts(text)

    def place(offset: int) -> Any:
        line = max(i for i, s in enumerate(starts) if s <= offset)
        return types.Position(line=line, character=len(text[starts[line] : offset].encode("utf-16-le")) // 2)

    return types.Range(start=place(span[0]), end=place(span[1]))


def _inside(position: Any, span: Any) -> bool:
    return bool(span.start <= position <= span.end)
