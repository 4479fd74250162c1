"""Notebooks: cells as one program, magics tolerated, and edits that leave every other byte alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanproof.linting import lint
from nanproof.linting.document import Unreadable
from nanproof.linting.fix import apply_edits
from nanproof.linting.inspection import Inspection
from nanproof.linting.notebook import Notebook, mask


def notebook(*cells: str | list[str], **options: object) -> bytes:
    """A notebook as Jupyter writes it: lines as a list, outputs and metadata around."""
    made = [
        {"cell_type": "markdown", "metadata": {}, "source": ["# Ünïcode \u2028 title"]},
        *(
            {
                "cell_type": "code",
                "execution_count": None,
                "metadata": {"tags": []},
                "outputs": [{"output_type": "stream", "name": "stdout", "text": ['"cells": [{]\\\n']}],
                "source": c if isinstance(c, list) else c.splitlines(keepends=True),
            }
            for c in cells
        ),
    ]
    whole = {"cells": made, "metadata": {"language_info": {"name": "python"}}, "nbformat": 4, "nbformat_minor": 5}
    return (json.dumps(whole, indent=1, ensure_ascii=bool(options.get("ascii"))) + "\n").encode()


def codes(path: Path) -> list[tuple[str, str, int]]:
    return [(f.code, f.path.rpartition("/")[2], f.line) for f in lint([path])]


FIRST = "import torch\nimport torch.nn.functional as F\n%matplotlib inline\n"
SECOND = "# größe\nloss = -torch.log(torch.sigmoid(x)).mean()  # \\n stays"


def test_findings_name_the_cell(tmp_path: Path) -> None:
    path = tmp_path / "a.ipynb"
    path.write_bytes(notebook(FIRST, SECOND))
    assert codes(path) == [("NP206", "a.ipynb:cell 3", 2)]


@pytest.mark.parametrize("ascii", [False, True])
@pytest.mark.parametrize("second", [SECOND, [SECOND], SECOND.split("zzz")])
def test_a_fix_changes_the_line_and_nothing_else(tmp_path: Path, second: str | list[str], ascii: bool) -> None:
    path = tmp_path / "a.ipynb"
    before = notebook(FIRST, second, ascii=ascii)
    path.write_bytes(before)
    run = Inspection([path])
    [(_, fixed)] = list(run.fix(unsafe=False))
    assert fixed is not None
    old = b"torch.log(torch.sigmoid(x))"
    assert fixed.new == before.replace(old, b"F.logsigmoid(x)")
    assert json.loads(fixed.new)["cells"][1] == json.loads(before)["cells"][1]


def test_a_new_line_is_a_string_of_its_own() -> None:
    """An inserted line goes into the list as Jupyter would have written it."""
    data = notebook("import torch\nx = torch.zeros(3)\n", "y = 2\n")
    edit = Notebook("a.ipynb", data).edit(12, 12, "\nimport math")
    assert edit is not None
    assert apply_edits(data, [edit]) == notebook("import torch\nimport math\nx = torch.zeros(3)\n", "y = 2\n")


def test_source_as_one_string(tmp_path: Path) -> None:
    path = tmp_path / "a.ipynb"
    whole = json.loads(notebook("import torch\ny = torch.log(torch.sigmoid(x))\n"))
    whole["cells"][1]["source"] = "".join(whole["cells"][1]["source"])
    path.write_text(json.dumps(whole))
    [(_, fixed)] = list(Inspection([path]).fix(unsafe=False))
    assert fixed is not None
    assert json.loads(fixed.new)["cells"][1]["source"] == "import torch\ny = torch.nn.functional.logsigmoid(x)\n"


@pytest.mark.parametrize(
    "cell",
    [
        "%matplotlib inline\nx = 1",
        "!pip install torch==2.0 \\\n   --quiet\nx = 1",
        "!python demo.py \\\n  data/v_7G_c001.mp4\nx = 1",
        "x = !ls -l\nx = 1",
        "files = %sql select 1\nx = 1",
        "%%time\nx = 1",
        "%%bash\nfor i in *; do echo $i; done",
        "?torch.log\ntorch.log?\ntorch.log??\nx = 1",
        "if y:\n    !ls\nx = 1",
        "pip install torch\ncd ..\nx = 1",
        "a = 7\nb = (a\n  % 2)\n%timeit b\nx = 1",
        'print("""\n%d items\n!important\n""" % 3)\n!ls\nx = 1',
        "await f()\nx = 1",
        "",
        "# only a comment",
    ],
)
def test_magics_are_tolerated(cell: str) -> None:
    masked = mask(cell)
    assert len(masked) == len(cell)
    assert [len(a) for a in masked.splitlines()] == [len(a) for a in cell.splitlines()]
    document = Notebook("a.ipynb", notebook("import torch", cell))
    assert document.failures() == []
    if "x = 1" in cell:
        assert "x = 1" in document.text


def test_python_that_looks_like_a_magic_is_kept() -> None:
    text = "a = 7\nb = (a\n  % 2)\n%timeit b\nx = 1"
    assert mask(text) == "a = 7\nb = (a\n  % 2)\n0        \nx = 1"


def test_a_broken_cell_is_named_and_the_others_are_linted(tmp_path: Path) -> None:
    path = tmp_path / "a.ipynb"
    path.write_bytes(notebook("import torch", "y = 1\nx = = 1\n", SECOND))
    found = lint([path])
    assert [(f.code, f.path.rpartition("/")[2], f.line, f.column) for f in found] == [
        ("NP001", "a.ipynb:cell 3", 2, 5),
        ("NP206", "a.ipynb:cell 4", 2, 9),
    ]
    assert "syntax error" in found[0].message
    run = Inspection([path])
    outcome = run.apply([f for _, f in run.fix(unsafe=False) if f is not None], why="lint --fix")
    assert [(r.compiles, r.compiled, r.verified) for r in outcome.repairs] == [(False, False, True)]


def test_the_old_format(tmp_path: Path) -> None:
    path = tmp_path / "a.ipynb"
    cells = [
        {"cell_type": "code", "input": ["import torch\n", "y = torch.log(torch.sigmoid(x))"], "language": "python"}
    ]
    path.write_text(json.dumps({"nbformat": 3, "worksheets": [{"cells": cells}]}))
    assert codes(path) == [("NP206", "a.ipynb:cell 1", 2)]


@pytest.mark.parametrize(
    "data", [b"torch", b"{}", b'{"cells": 3, "torch": 1}', b'["torch"]', b"\xff torch", b'{"cells": [']
)
def test_what_is_no_notebook_is_said(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "a.ipynb"
    path.write_bytes(data)
    found = lint([path])
    if b"torch" in data:
        assert [f.code for f in found] == ["NP001"]
        assert "not a notebook" in found[0].message
    with pytest.raises(Unreadable, match="not a notebook"):
        Notebook("a.ipynb", data)


LINES = st.lists(
    st.sampled_from(["x = 1\n", "y = 'ü\\n'\n", "z = '\\\\'\n", 's = "😀\\t"\n', "\n", "# é \u2028 \x7f\n", "w = 2"]),
    max_size=5,
)


@given(st.lists(LINES, min_size=1, max_size=3), st.booleans(), st.booleans(), st.data())
def test_any_edit_is_an_edit_of_the_text(
    cells: list[list[str]], ascii: bool, joined: bool, data: st.DataObject
) -> None:
    """Replacing a range of the text and editing the JSON come to the same."""
    sources = [["".join(c)] if joined and c else c for c in cells]
    raw = notebook(*sources, ascii=ascii)
    document = Notebook("a.ipynb", raw)
    if not document.cells:
        return
    cell = data.draw(st.sampled_from(document.cells))
    start = data.draw(st.integers(0, len(cell.text)))
    end = data.draw(st.integers(start, len(cell.text)))
    text = data.draw(st.sampled_from(["", "a", "é\n", '"\\', "import torch\nß", "\n"]))
    edit = document.edit(cell.offset + start, cell.offset + end, text)
    assert edit is not None
    after = Notebook("a.ipynb", apply_edits(raw, [edit]))
    changed = next(c for c in after.cells if c.number == cell.number) if after.cells else None
    expected = cell.text[:start] + text + cell.text[end:]
    assert (changed.text if changed else "") == expected
    kept = json.loads(raw), json.loads(apply_edits(raw, [edit]))
    for whole in kept:
        whole["cells"][cell.number - 1]["source"] = None
    assert kept[0] == kept[1]


def test_no_edit_from_one_cell_into_the_next() -> None:
    document = Notebook("a.ipynb", notebook("x = 1", "y = 2"))
    assert document.edit(2, 8, "") is None
