"""Hooks of the docs site (mkdocs.yml): pages from the root, links to source files, tabs, and no external assets.

The pages read well on their own, so nothing in them is written for the site: links lead to real files, and
sections between ``<!-- tabs -->`` and ``<!-- /tabs -->`` are ordinary sections that the site shows as tabs.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parent.parent
FROM_ROOT = ("ARCHITECTURE.md", "CHANGELOG.md", "CONTRIBUTING.md")
LINK = re.compile(r"(!?)\[((?:[^\]\[]|\[[^\]]*\])*)\]\(([^)\s]+)\)")
ASSET = re.compile(r"""<(?:script|img|link|iframe|source)\b[^>]*?\b(?:src|href)=["']?((?:https?:)?//[^"'\s>]+)""")


def on_files(files: Files, config: Any) -> Files:
    for name in FROM_ROOT:
        files.append(File.generated(config, name, abs_src_path=str(ROOT / name)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    folder = "." if page.file.src_uri in FROM_ROOT else posixpath.join("docs", posixpath.dirname(page.file.src_uri))

    def link(found: re.Match[str]) -> str:
        mark, text, target = found.groups()
        path, hash_sign, anchor = target.partition("#")
        if "://" in target or not path:
            return found[0]
        real = posixpath.normpath(posixpath.join(folder, path))  # seen from the root of the repository
        site = real.removeprefix("docs/") if real.startswith("docs/") else real
        if not real.startswith("docs/") and real not in FROM_ROOT:
            return text  # a source file: not part of the site
        here = posixpath.dirname(page.file.src_uri) or "."
        return f"{mark}[{text}]({posixpath.relpath(site, here)}{hash_sign}{anchor})"

    return tabs("".join(p if p.startswith("```") else LINK.sub(link, p) for p in _by_fences(markdown)))


def _by_fences(markdown: str) -> list[str]:
    return re.split(r"(^```.*?^```$)", markdown, flags=re.M | re.S)


def tabs(markdown: str) -> str:
    """Sections between the marks, as tabs.

    >>> print(tabs("<!-- tabs -->\\n## A\\n\\none\\n\\n## B\\n\\ntwo\\n<!-- /tabs -->"))
    === "A"
    <BLANKLINE>
        one
    <BLANKLINE>
    === "B"
    <BLANKLINE>
        two
    <BLANKLINE>
    """

    def group(found: re.Match[str]) -> str:
        parts = re.split(r"^## (.+)\n", found[1], flags=re.M)[1:]
        shown = []
        for title, text in zip(parts[::2], parts[1::2], strict=True):
            lines = [f"    {line}" if line else "" for line in text.strip().splitlines()]
            shown += [f'=== "{title}"', "", *lines, ""]
        return "\n".join(shown)

    return re.sub(r"^<!-- tabs -->\n(.*?)^<!-- /tabs -->", group, markdown, flags=re.M | re.S)


def on_post_build(config: Any) -> None:
    outside = {
        f"{page.relative_to(config.site_dir)}: {address}"
        for page in Path(config.site_dir).rglob("*.html")
        for address in ASSET.findall(page.read_text())
    }
    if outside:
        raise PluginError("assets from elsewhere, the site must work offline:\n  " + "\n  ".join(sorted(outside)))
