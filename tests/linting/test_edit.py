"""Changes to a text: parentheses, indentation, line ends, encodings."""

from __future__ import annotations

import ast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from linting.toys import checked, toy
from nanproof.linting.document import PythonFile
from nanproof.linting.fix import apply_edits
from nanproof.linting.rule import Change
from nanproof.linting.source import Module
from nanproof.records import Edit


def change(text: str, made: Change) -> str:
    return text[: made.start] + made.text + text[made.end :]


@pytest.mark.parametrize(
    ("text", "new", "expected"),
    [
        ("y = use(x) * 2", "a + b", "y = (a + b) * 2"),
        ("y = use(x) + 2", "a * b", "y = a * b + 2"),
        ("y = 2 - use(x)", "a - b", "y = 2 - (a - b)"),
        ("y = -use(x)", "a + b", "y = -(a + b)"),
        ("y = -use(x)", "a ** b", "y = -a ** b"),
        ("y = use(x) ** 2", "-a", "y = (-a) ** 2"),
        ("y = use(x).sum()", "a + b", "y = (a + b).sum()"),
        ("y = use(x).sum()", "f(a)", "y = f(a).sum()"),
        ("y = use(x)[0]", "a if b else c", "y = (a if b else c)[0]"),
        ("y = f(use(x))", "a + b", "y = f(a + b)"),
        ("y = f(k=use(x))", "a if b else c", "y = f(k=a if b else c)"),
        ("y = z[use(x)]", "a + b", "y = z[a + b]"),
        ("y = (use(x)) * 2", "a + b", "y = (a + b) * 2"),
        ("y = use(x) * 2", "(a + b)", "y = (a + b) * 2"),
        ("y = not use(x)", "a or b", "y = not (a or b)"),
        ("y = use(x) and z", "a or b", "y = (a or b) and z"),
        ("y = use(x) < 2", "a < b", "y = (a < b) < 2"),
        ("y = use(x).real", "1", "y = (1).real"),
        ("y = [*use(x)]", "a or b", "y = [*(a or b)]"),
        ("y = use(x)", "lambda: 1", "y = lambda: 1"),
    ],
)
def test_a_replaced_expression_keeps_together(text: str, new: str, expected: str) -> None:
    module = Module.parse(text)
    after = change(text, module.replace(module.calls("use")[0], new))
    assert after == expected
    wanted = ast.parse(text.replace("use(x)", f"({new})"))
    assert ast.dump(ast.parse(after)) == ast.dump(wanted)


OPERATORS = st.sampled_from(["+", "-", "*", "/", "**", "@", "<", "and", "or", "|", "if 1 else"])
EXPRESSIONS = st.recursive(
    st.sampled_from(["a", "b", "1", "f(x)"]),
    lambda inner: st.one_of(
        st.tuples(inner, OPERATORS, inner).map(lambda t: f"({t[0]}) {t[1]} ({t[2]})"),
        inner.map(lambda e: f"-({e})"),
        inner.map(lambda e: f"not ({e})"),
        inner.map(lambda e: f"({e}).t"),
        inner.map(lambda e: f"({e})[0]"),
    ),
    max_leaves=6,
)


@given(EXPRESSIONS, EXPRESSIONS, st.randoms(use_true_random=False))
def test_a_replaced_expression_means_what_it_says(outer: str, inner: str, random: object) -> None:
    """Whatever is put wherever, the tree is the one with parentheses around the new expression."""
    text = ast.unparse(ast.parse(f"y = {outer}"))
    new = ast.unparse(ast.parse(inner, mode="eval"))
    module = Module.parse(text)
    for name in module.nodes(ast.Name):
        if isinstance(name.ctx, ast.Load):
            after = change(text, module.replace(name, new))
            start, end = module.span(name)
            assert ast.dump(ast.parse(after)) == ast.dump(ast.parse(f"{text[:start]}({new}){text[end:]}"))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("use(x)\n", "new()\nuse(x)\n"),
        ("if a:\r\n\tuse(x)\r\n", "if a:\r\n\tnew()\r\n\tuse(x)\r\n"),
        ("a = 1; use(x)\n", "a = 1; new(); use(x)\n"),
        ("if a: use(x)\n", "if a: new(); use(x)\n"),
        ("@use(x)\ndef f(): pass\n", "new()\n@use(x)\ndef f(): pass\n"),
    ],
)
def test_a_line_before(text: str, expected: str) -> None:
    module = Module.parse(text)
    assert change(text, module.insert_before(module.statement(module.calls("use")[0]), "new()")) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("use(x)\n", "use(x)\nnew()\n"),
        ("use(x)", "use(x)\nnew()"),
        ("if a:\r\n    use(x)  # why\r\nb\r\n", "if a:\r\n    use(x)  # why\r\n    new()\r\nb\r\n"),
        ("use(x); b\n", "use(x); new(); b\n"),
        ("if a: use(x)\nb\n", "if a: use(x); new()\nb\n"),
        ("use(\n    x,\n)\nb\n", "use(\n    x,\n)\nnew()\nb\n"),
        ("use(x);\n", "use(x); new();\n"),
    ],
)
def test_a_line_after(text: str, expected: str) -> None:
    module = Module.parse(text)
    assert change(text, module.insert_after(module.statement(module.calls("use")[0]), "new()")) == expected


def test_several_lines_keep_their_depth() -> None:
    text = "def f():\n    use(x)\n"
    module = Module.parse(text)
    after = change(text, module.insert_before(module.statement(module.calls("use")[0]), "if a:\n    b()"))
    assert after == "def f():\n    if a:\n        b()\n    use(x)\n"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a\nuse(x)\nb\n", "a\nb\n"),
        ("a\r\nuse(x)\r\n", "a\r\n"),
        ("a\nuse(x)", "a\n"),
        ("a; use(x)\n", "a\n"),
        ("use(x); a\n", "a\n"),
        ("a; use(x); b\n", "a; b\n"),
        ("if a:\n    use(x)\n", "if a:\n    pass\n"),
        ("if a: use(x)\n", "if a: pass\n"),
        ("a\nuse(x)  # why\nb\n", "a\n# why\nb\n"),
    ],
)
def test_a_statement_taken_out(text: str, expected: str) -> None:
    module = Module.parse(text)
    assert change(text, module.remove(module.statement(module.calls("use")[0]))) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("import os\nx = 1\n", "import os\nimport math\nx = 1\n"),
        ("'''doc'''\nx = 1\n", "'''doc'''\nimport math\nx = 1\n"),
        ("x = 1\n", "import math\nx = 1\n"),
        ("#!/bin/python\n# coding: utf-8\nx = 1\n", "#!/bin/python\n# coding: utf-8\nimport math\nx = 1\n"),
        ("from __future__ import annotations\nx = 1\n", "from __future__ import annotations\nimport math\nx = 1\n"),
        ("import math\n", "import math\n"),
        ("from a import (\n    b,  # c\n)\nx = 1\n", "from a import (\n    b,  # c\n)\nimport math\nx = 1\n"),
        ("def f():\n    import math\n", "import math\ndef f():\n    import math\n"),
        ("try:\n    import a\nexcept E:\n    pass\n", "import math\ntry:\n    import a\nexcept E:\n    pass\n"),
        ("", "import math\n"),
    ],
)
def test_an_import_added(text: str, expected: str) -> None:
    assert change(text, Module.parse(text).import_line("import math")) == expected


@pytest.mark.parametrize(
    ("text", "written"),
    [
        ("import torch\n", "torch.nn.functional.softplus"),
        ("import torch.nn.functional as F\n", "F.softplus"),
        ("from torch import nn\nimport torch\n", "nn.functional.softplus"),
        ("from torch.nn.functional import softplus as sp\n", "sp"),
        ("import torch as th\n", "th.nn.functional.softplus"),
        ("x = 1\n", "F.softplus"),
    ],
)
def test_how_a_name_is_written_here(text: str, written: str) -> None:
    module = Module.parse(text)
    spelled, changes = module.spell("torch.nn.functional.softplus")
    assert spelled == written
    after = text
    for made in changes:
        after = change(after, made)
    again = Module.parse(f"{after}{spelled}(x)")
    assert again.called(again.nodes(ast.Call)[0]) == "torch.nn.functional.softplus"


def test_nothing_is_edited_in_an_f_string() -> None:
    """Before Python 3.12 the tree does not say where an expression in an f-string stands."""
    text = "a = f'{1}'; b = f'x {y + use(x)} z'"
    found = checked(text, toy("NP901", "use", lambda node, module: (module.replace(node, "new(x)"),))).problems[0]
    assert found.finding.edits == ()
    assert text[slice(*found.span)] == "f'x {y + use(x)} z'"


CODINGS = ["utf-8", "utf-8-sig", "latin-1", "cp1252", "shift_jis", "iso2022_jp", "utf-7"]


# With bare carriage returns Python's own detection does not see the line that names the encoding.
@pytest.mark.parametrize(
    ("coding", "newline"),
    [(c, n) for c in CODINGS for n in ("\n", "\r\n", "\r") if n != "\r" or c.startswith("utf-8")],
)
def test_bytes_outside_an_edit_stay_in_every_encoding(coding: str, newline: str) -> None:
    head = "" if coding.startswith("utf-8") else f"# coding: {coding}{newline}"
    word = "日本" if coding in ("shift_jis", "iso2022_jp") else "größe"
    text = f"{head}{word} = '{word}'{newline}\tuse({word}){newline}".replace("\t", "")
    data = text.encode(coding)
    document = PythonFile("a.py", data)
    assert document.text == text
    start = text.index("use(")
    edit = document.edit(start, start + 3, "new")
    if edit is None:
        assert coding in ("iso2022_jp", "utf-7")
        return
    assert apply_edits(data, [edit], document.encoding) == text.replace("use(", "new(").encode(coding)


@st.composite
def apart(draw: st.DrawFn) -> tuple[bytes, list[Edit]]:
    """Bytes, and edits in them that do not overlap."""
    data = draw(st.binary(max_size=40).map(lambda b: bytes(c % 26 + 97 for c in b)))
    cuts = sorted(draw(st.lists(st.integers(0, len(data)), max_size=8, unique=True)))
    pairs = zip(cuts[::2], cuts[1::2], strict=False)
    return data, [Edit(path="a", start=a, end=b, text=draw(st.text("XYZ", max_size=3))) for a, b in pairs]


@given(apart(), st.randoms(use_true_random=False))
def test_edits_in_any_order_are_the_edits_one_by_one(case: tuple[bytes, list[Edit]], random: object) -> None:
    data, edits = case
    expected = data
    for edit in sorted(edits, key=lambda e: -e.start):
        expected = expected[: edit.start] + edit.text.encode() + expected[edit.end :]
    shuffled = sorted(edits, key=lambda e: hash((e.start, e.text)))
    assert apply_edits(data, shuffled) == expected
    assert apply_edits(data, [*edits, *edits]) == expected
    assert apply_edits(data, []) == data
