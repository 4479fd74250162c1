"""What a rule is: one object that finds, explains and repairs one mistake.

A rule lives in a file of its own in `rules/`, ``np301_clip_without_unscale.py``, which defines ``RULE``. Rules are
found by listing that folder. ``check`` gets one node of the types named in ``nodes`` and the `Module` around it, and
yields what it found (a rule that `matching` has words for declares it instead):

    def check(node: ast.Call, module: Module) -> Iterator[Found]:
        found = module.operation(node)
        if found and found.name == "log" and ...:
            yield Found(node=node, message="log of a sigmoid", edits=(module.replace(node, "..."),), safe=True)

    RULE = Rule(code="NP206", name="log-of-sigmoid", ..., nodes=(ast.Call,), calls=frozenset({"log"}), check=check)
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from ..topics import Topic

if TYPE_CHECKING:
    from .matching import Hit, Match
    from .source import Module

Safety = Literal["safe", "unsafe", "none"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """Replacement of the characters from ``start`` to ``end`` of a module's text; made by methods of `Module`."""

    start: int
    end: int
    text: str
    shared: bool = False
    """The same insertion asked for by several findings, such as an import, is made once."""
    comment: bool = False
    """It takes out a comment on purpose: one that explains code that goes."""


@dataclass(frozen=True, slots=True)
class Moved:
    """Edits, and whether they keep every finite result."""

    edits: tuple[Change, ...] = ()
    safe: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """One mistake, as a rule sees it."""

    node: ast.AST
    message: str
    """One sentence, with the names of this code in it."""
    help: str = ""
    """What to do, one sentence."""
    edits: tuple[Change, ...] = ()
    """All or none of them are made."""
    safe: bool = False
    """Whether these edits keep every finite result."""
    info: bool = False
    """Possible, but nothing in sight says that it happens here: shown with ``--info`` only."""
    about: ast.AST | None = None
    """The operation behind it: of several findings about one operation the most specific is shown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """A rule with everything that is to be said about it; its page in the docs is written from it."""

    code: str
    name: str
    what: str
    why: str
    bad: str
    """A source that can be linted by itself: exactly this rule fires. Imports of torch, nn, F and ops are added
    here and in the other examples."""
    good: str
    """What to write instead: this rule is silent."""
    miss: str = ""
    """A true mistake that the rule knowingly does not find: silent too."""
    false_alarm: str
    fix: Safety = "none"
    fix_note: str = ""
    default: bool = True
    """Off by default when it cannot be made precise; ``--select`` with its whole code switches it on."""
    nodes: tuple[type[ast.AST], ...] = ()
    """What ``check`` is called with; (ast.Module,) for a whole file, (ast.Div,) for all divisions."""
    calls: frozenset[str] = frozenset()
    """If given, only calls of functions or methods with these last names come to ``check`` (imports renamed with
    ``as`` under their true name); other node types are not affected. This is what keeps a rule cheap."""
    words: tuple[str, ...] = ()
    """If given, files whose text has none of these words are not looked at."""
    check: Callable[[Any, Module], Iterator[Found]] = lambda node, module: iter(())
    """What finds it; or, declared with the words of `matching`:"""
    match: Match | None = None
    where: Callable[[Hit], bool] = lambda hit: True
    unless: tuple[Callable[[Hit], bool], ...] = ()
    """Harmless if one of these holds."""
    doubt: tuple[Callable[[Hit], bool], ...] = ()
    """An info if one of these holds."""
    message: str | Callable[[Hit], str] = ""
    help: str = ""
    edit: Callable[[Hit], tuple[Change, ...] | Moved] = lambda hit: ()
    about: Callable[[Hit], ast.AST | None] = lambda hit: None

    def __post_init__(self) -> None:
        for field in ("bad", "good", "miss"):
            object.__setattr__(self, field, with_imports(getattr(self, field)))
        if self.match is not None:
            object.__setattr__(self, "nodes", self.nodes or self.match.nodes)
            object.__setattr__(self, "calls", self.calls or self.match.calls)
            object.__setattr__(self, "check", self._declared)

    def _declared(self, node: ast.AST, module: Module) -> Iterator[Found]:
        assert self.match is not None
        for hit in self.match.find(node, module):
            if not self.where(hit) or any(harmless(hit) for harmless in self.unless):
                continue
            edit = self.edit(hit)
            moved = Moved(edit) if isinstance(edit, tuple) else edit
            yield Found(
                node=hit.node,
                message=self.message if isinstance(self.message, str) else self.message(hit),
                help=self.help,
                edits=moved.edits,
                safe=moved.safe,
                about=self.about(hit),
                info=any(doubtful(hit) for doubtful in self.doubt),
            )
            return

    @property
    def topic(self) -> Topic:
        """The page about this rule."""
        sections = [
            ("What it does", self.what),
            ("Why it matters", self.why),
            ("Example", f"```py\n{self.bad.strip()}\n```"),
            ("Use instead", f"```py\n{self.good.strip()}\n```"),
            ("The fix", _fix_words(self)),
            ("When it is a false alarm", f"{self.false_alarm.strip()}\n\nSilence one line with `# noqa: {self.code}`."),
        ]
        if self.miss:
            sections.append(("What it does not find", f"```py\n{self.miss.strip()}\n```"))
        return Topic(name=self.code, title=self.name, sections=tuple(sections))


_USUAL = {
    "torch": "import torch",
    "nn": "import torch.nn as nn",
    "F": "import torch.nn.functional as F",
    "ops": "from nanproof import ops",
}


def amp_loop(*steps: str, dtype: str = ", dtype=torch.float16") -> str:
    """A training loop in mixed precision, for examples: these steps stand behind the backward pass.

    >>> print(amp_loop("scaler.step(optimizer)").splitlines()[-1].strip())
    scaler.step(optimizer)
    """
    scaled = any("scaler" in step for step in steps)
    lines = [
        f"def train(model, loader, optimizer, {'scheduler, ' if 'scheduler' in steps[-1] else ''}criterion):",
        *(['    scaler = torch.amp.GradScaler("cuda")'] if scaled else []),
        "    for x, y in loader:",
        "        optimizer.zero_grad()",
        f'        with torch.autocast("cuda"{dtype}):',
        "            loss = criterion(model(x), y)",
        f"        {'scaler.scale(loss)' if scaled else 'loss'}.backward()",
        *(f"        {step}" for step in steps),
    ]
    return "\n".join(lines) + "\n"


def with_imports(text: str) -> str:
    """An example with the imports that it leaves unsaid.

    >>> print(with_imports("loss = F.relu(x)").strip())
    import torch.nn.functional as F
    <BLANKLINE>
    <BLANKLINE>
    loss = F.relu(x)
    """
    used = set(re.findall(r"(?<![\w.])(torch|nn|F|ops)(?=\.\w)", text))
    wanted = [line for name, line in _USUAL.items() if name in used and f" {name}\n" not in text]
    if not wanted:
        return text
    gap = "\n" if text.lstrip().startswith(("import ", "from ")) else "\n\n\n"
    return "\n" + "\n".join(wanted) + gap + text.lstrip("\n")


_FIXES = {
    "safe": "Safe: every finite result stays what it is. `nanproof lint --fix` applies it.",
    "unsafe": "Unsafe: it changes behavior, so it is applied only by `nanproof lint --unsafe-fixes`; read the diff.",
    "none": "There is no automatic fix: what is right depends on what the code means.",
}


def _fix_words(rule: Rule) -> str:
    off = "" if rule.default else f"\n\nThis rule is off by default; `--select {rule.code}` switches it on."
    return f"{_FIXES[rule.fix]} {rule.fix_note.strip()}".strip() + off
