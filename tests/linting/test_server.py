"""The language server, spoken to by a real client over standard input and output."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from lsprotocol import types
from pygls.lsp.client import LanguageClient

TEXT = """import torch


def loss(x, y):
    ö = y  # a letter of two bytes
    return -torch.log(torch.sigmoid(x)).mean() + ö
"""


async def _session(
    folder: Path,
) -> tuple[list[types.Diagnostic], types.Hover | None, list[types.CodeAction], list[int]]:
    client = LanguageClient("editor", "1")
    published: asyncio.Queue[types.PublishDiagnosticsParams] = asyncio.Queue()

    @client.feature(types.TEXT_DOCUMENT_PUBLISH_DIAGNOSTICS)
    def told(params: types.PublishDiagnosticsParams) -> None:
        published.put_nowait(params)

    await client.start_io(sys.executable, "-m", "nanproof", "lint", "--lsp")
    uri = (folder / "train.py").as_uri()
    await client.initialize_async(types.InitializeParams(capabilities=types.ClientCapabilities()))
    client.initialized(types.InitializedParams())
    document = types.TextDocumentItem(uri=uri, language_id="python", version=1, text=TEXT)
    client.text_document_did_open(types.DidOpenTextDocumentParams(text_document=document))
    first = await asyncio.wait_for(published.get(), 60)
    where = types.TextDocumentIdentifier(uri=uri)
    spot = types.Position(line=5, character=15)
    hover = await client.text_document_hover_async(types.HoverParams(text_document=where, position=spot))
    wanted = types.CodeActionParams(
        text_document=where, range=types.Range(start=spot, end=spot), context=types.CodeActionContext(diagnostics=[])
    )
    actions = await client.text_document_code_action_async(wanted)
    assert actions
    chosen = [a for a in actions if isinstance(a, types.CodeAction)]
    assert chosen[0].edit
    assert chosen[0].edit.changes
    new = _applied(TEXT, list(chosen[0].edit.changes[uri]))
    change = types.TextDocumentContentChangeWholeDocument(text=new)
    client.text_document_did_change(
        types.DidChangeTextDocumentParams(
            text_document=types.VersionedTextDocumentIdentifier(uri=uri, version=2), content_changes=[change]
        )
    )
    second = await asyncio.wait_for(published.get(), 60)
    await client.shutdown_async(None)
    client.exit(None)
    await asyncio.wait_for(client.stop(), 30)
    compile(new, "train.py", "exec")
    return list(first.diagnostics), hover, chosen, [len(second.diagnostics)]


def _applied(text: str, edits: list[types.TextEdit]) -> str:
    lines = text.splitlines(keepends=True)
    for edit in sorted(edits, key=lambda e: (e.range.start.line, e.range.start.character), reverse=True):
        begin, end = edit.range.start, edit.range.end
        assert begin.line == end.line
        line = lines[begin.line]
        lines[begin.line] = line[: begin.character] + edit.new_text + line[end.character :]
    return "".join(lines)


def test_an_editor_sees_findings_pages_and_fixes(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import torch\n")  # the editor's text is newer than the disk's
    diagnostics, hover, actions, left = asyncio.run(_session(tmp_path))
    assert [(d.code, d.range.start.line, d.range.start.character) for d in diagnostics] == [("NP206", 5, 12)]
    assert hover is not None
    assert isinstance(hover.contents, types.MarkupContent)
    assert "NP206" in hover.contents.value
    assert actions[0].is_preferred
    assert left == [0]
