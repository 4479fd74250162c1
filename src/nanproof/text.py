"""Text from files, made harmless, and the one place that writes to the terminal.

>>> plain("layer\\x1b]0;owned\\x07.weight")
'layer\\\\x1b]0;owned\\\\x07.weight'
>>> plain("two\\nlines"), plain("größe → 1")
('two\\\\nlines', 'größe → 1')

Control characters (C0, C1, DEL), escape sequences, characters that turn the direction of writing, invisible ones and
lone surrogates are shown as escapes; letters of all languages stay as they are. Whatever a verb prints goes through
`show`, or through `console` for tables and live views, and is cleaned there: no verb has to think of it.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable
from contextlib import suppress
from typing import IO, TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from rich.console import Console

# What is not printable is escaped, and these, which count as printable but hide or change what stands beside them.
_HIDDEN = re.compile(
    "[\u00ad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180f\u3164\ufe00-\ufe0f\uffa0\U000e0100-\U000e01ef]"
)
_NAMED = {"\n": "\\n", "\r": "\\r", "\t": "\\t"}
# Our own colors carry a word that no file can know, so that a color sequence out of a file is only text.
_KEY = f"\ue000{os.urandom(8).hex()}"
_STYLED = re.compile(f"{_KEY}([0-9;]{{1,8}})m")
# our own signs on a terminal that has no such characters; each as wide as the sign where columns must align
_ASCII = str.maketrans(
    {
        **dict(zip("▁▂▃▄▅▆▇█", "_.-~=+*#", strict=True)),
        "✗": "x",
        "✓": "+",
        "▸": ">",
        "·": "|",
        "–": "-",
        "×": "x",
        "≤": "<=",
        "≥": ">=",
        "≈": "~",
        "→": "->",
        "…": "...",
        "“": '"',
        "”": '"',
        "‖": "|",
        "Δ": "d",
        "★": "*",
        "•": "*",
        "−": "-",
        "—": "-",
        "━": "-",
        "╸": "-",
        "╺": "-",
        "─": "-",
        "├": "|",
        "└": "`",
        "√": "sqrt ",
        "±": "+-",
        "∞": "inf",
        "ε": "eps",
        "Σ": "sum",
        **dict(zip("⁻⁰¹²³⁴⁵⁶⁷⁸⁹", "-0123456789", strict=True)),
    }
)
# within a table every sign must stay one column wide
_NARROW = _ASCII | {ord(sign): ord(plain) for sign, plain in zip("→…≤≥", ">.<>", strict=True)}
_RAISED = re.compile("(?=[⁻⁰¹²³⁴⁵⁶⁷⁸⁹])(?<![⁻⁰¹²³⁴⁵⁶⁷⁸⁹])")  # before an exponent
_COLORS = {"red": 31, "green": 32, "yellow": 33, "blue": 34, "magenta": 35, "cyan": 36}


def plain(text: str) -> str:
    """One line of text that a terminal shows and does not obey."""
    if text.isascii() and text.isprintable():
        return text
    return "".join(c if c.isprintable() and not _HIDDEN.match(c) else _escaped(c) for c in text)


def lines(text: str) -> str:
    """The same for several lines: line breaks and tabs stay.

    >>> lines("a\\n\\tb\\x1b[2J")
    'a\\n\\tb\\\\x1b[2J'
    """
    return "\n".join("\t".join(plain(part) for part in line.split("\t")) for line in text.split("\n"))


def clean_record(record: Any) -> bool:
    """A filter for `logging`: the message of a record, made harmless before any handler sees it.

    >>> import logging
    >>> record = logging.makeLogRecord({"msg": "grad of %s", "args": ("w\\x1b[2J",)})
    >>> clean_record(record), record.getMessage()
    (True, 'grad of w\\\\x1b[2J')
    """
    with suppress(Exception):  # a message that does not fit its arguments is the handler's to report, as ever
        record.msg, record.args = lines(record.getMessage()), ()
    return True


def style(text: str, fg: str | None = None, *, bold: bool = False, dim: bool = False) -> str:
    """Text in a color, for `show`: the color appears on a terminal only.

    >>> show(style("bad", fg="red"))
    bad
    """
    codes = [str(_COLORS[fg])] if fg else []
    codes += ["1"] * bold + ["2"] * dim
    return f"{_KEY}{';'.join(codes)}m{text}{_KEY}0m" if codes else text


def show(text: str, *, err: bool = False, nl: bool = True) -> None:
    """Print text, cleaned; on a stream that cannot write a character, its escape."""
    stream = _lenient(sys.stderr if err else sys.stdout)
    stream.write(_rendered(text, colors=_has_colors(stream)) + ("\n" if nl else ""))
    stream.flush()


def show_status(text: str) -> None:
    """Replace the last line of the terminal on standard error; without text, only clear it."""
    stream = _lenient(sys.stderr)
    stream.write(f"\r\x1b[2K{plain(text)}")
    stream.flush()


def fold(text: str, indent: int) -> str:
    """A line broken at blanks where the terminal ends, the rest of it indented; whole where nobody reads it on one."""
    if not sys.stdout.isatty():
        return text
    import shutil

    columns = shutil.get_terminal_size().columns
    text, margin = fitting(text), " " * min(indent, columns // 3)
    folded = [""]
    used = 0
    for blanks, word in re.findall(r"( *)([^ ]+)", text):
        size = len(_STYLED.sub("", word))
        if used and used + len(blanks) + size > columns:
            folded.append(margin + word)
            used = len(margin) + size
        else:
            folded[-1] += blanks + word
            used += len(blanks) + size
    return "\n".join(folded)


def _spelled(text: str) -> str:
    """
    >>> _spelled("√x → 10⁻⁶ ± ε²")
    'sqrt x -> 10^-6 +- eps^2'
    """
    return _RAISED.sub("^", text).translate(_ASCII)


def fitting(text: str) -> str:
    """Text with our signs spelled out where the terminal has none, to be laid out afterwards."""
    return text if (sys.stdout.encoding or "ascii").lower().startswith("utf") else _spelled(text)


def console(*, err: bool = False, width: int | None = None) -> Console:
    """A rich console whose texts are cleaned whatever they are part of."""
    from rich.console import Console
    from rich.segment import Segment

    class Clean(Console):
        def render(self, renderable: Any, options: Any = None) -> Iterable[Segment]:
            narrow = not self.encoding.startswith("utf")
            for text, look, control in super().render(renderable, options):
                shown = text if control else lines(text)
                yield Segment(shown.translate(_NARROW) if narrow else shown, look, control)

    stream = _lenient(sys.stderr if err else sys.stdout)
    # NO_COLOR alone would leave bold and dim text in
    return Clean(file=stream, width=width, highlight=False, color_system="auto" if _has_colors(stream) else None)


def _escaped(c: str) -> str:
    code = ord(c)
    return _NAMED.get(c) or (f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}" if code < 65536 else f"\\U{code:08x}")


def _rendered(text: str, *, colors: bool) -> str:
    if text.isascii() and text.isprintable():
        return text
    done, at = [], 0
    for mark in _STYLED.finditer(text):
        done += [lines(text[at : mark.start()]), f"\x1b[{mark[1]}m" if colors else ""]
        at = mark.end()
    return "".join([*done, lines(text[at:])])


def _has_colors(stream: IO[str]) -> bool:
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


class _Lenient:
    """A stream that writes plain signs, or escapes, where its encoding has no such character, as in plain ASCII."""

    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except UnicodeEncodeError:
            code = getattr(self._stream, "encoding", None) or "ascii"
            return self._stream.write(_spelled(text).encode(code, "backslashreplace").decode(code))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def _lenient(stream: IO[str]) -> IO[str]:
    return cast(IO[str], _Lenient(stream))
