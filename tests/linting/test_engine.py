"""Which files are linted, what is said about those that cannot be, and what silences a finding."""

from __future__ import annotations

import ast
import dataclasses
import os
import sysconfig
from pathlib import Path

import pytest

from linting.toys import OLD, PLAIN, TOYS, checked, linter, toy
from nanproof import errors
from nanproof.linting import lint, program, project
from nanproof.linting.catalogue import all_rules, everything, pages
from nanproof.linting.discover import find_files
from nanproof.linting.engine import Linter
from nanproof.linting.inspection import Inspection
from nanproof.linting.settings import Settings, choose_rules, load_settings
from nanproof.linting.source import Module

TORCH = "import torch\n"
UNSTABLE = TORCH + "y = torch.log(torch.sigmoid(x))\n"
REAL = choose_rules([], [])


def said(data: bytes, path: str = "a.py") -> list[tuple[str, int, str]]:
    found = Linter([], REAL, Settings(info=True)).data(Path(path), data).problems
    return [(p.finding.code, p.finding.line, p.finding.message) for p in found]


@pytest.mark.parametrize(
    ("data", "line", "words"),
    [
        (b"import torch\nprint 'x'\n", 2, "Python 2 code: Missing parentheses"),
        (b"import torch\ntry: pass\nexcept A, e: pass\n", 3, "Python 2 code: multiple exception types"),
        (b"import torch\nx = = 1\n", 2, "syntax error: invalid syntax"),
        (b"import torch\nx = 1\0\n", 2, "null bytes"),
        (b"import torch\nx = '\xff'\n", 2, "it is not utf-8 text"),
        (b"# coding: klingon\nimport torch\n", 1, "encoding is not known: unknown encoding: klingon"),
        (b"\xef\xbb\xbf# coding: latin-1\nimport torch\n", 1, "encoding is not known: encoding problem"),
        (b"import torch\nx = " + b"(" * 3000 + b")" * 3000, 2, "too many nested parentheses"),
        (b"import torch\nx = " + b"-" * 30000 + b"1", 1, "nested too deeply"),
        (b"import torch\nx = a" + b".b" * 30000, 1, "nested too deeply"),
        (b"import torch\nif x: pass\n" + b"elif y: pass\n" * 5000, 1, "nested too deeply"),
        (b"import torch\nx = f'{a'\n", 2, "syntax error"),
        (b"import torch\n  x = 1\n", 2, "syntax error: unexpected indent"),
    ],
)
def test_what_cannot_be_linted_is_said(data: bytes, line: int, words: str) -> None:
    [(code, place, message)] = said(data)
    assert (code, place) == ("NP001", line)
    assert message.startswith("not linted: ")
    assert words in message


@pytest.mark.parametrize(
    "data", [b"", b"torch", b"\n" * 10, b"# torch", b"\xef\xbb\xbfimport torch", b"import torch\r"]
)
def test_odd_but_fine(data: bytes) -> None:
    assert said(data) == []


def test_a_file_without_torch_is_not_even_parsed(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_bytes(b"print 'python 2'\0")
    assert lint(tmp_path) == ()


def test_unreadable_large_and_special_files(tmp_path: Path) -> None:
    (tmp_path / "large.py").write_bytes(b"import torch\n" + b"# padding\n" * 1_000_000)
    os.mkfifo(tmp_path / "pipe.py")
    (tmp_path / "gone.py").symlink_to(tmp_path / "nowhere.py")
    (tmp_path / "loop.py").symlink_to(tmp_path / "loop.py")
    said = {Path(f.path).name: f.message for f in lint(tmp_path)}
    assert said["large.py"] == "not linted: it has 10 MB; files over 10 MB are not linted"
    assert said["pipe.py"] == "not linted: it is not a regular file"
    assert said["gone.py"] == "not linted: it cannot be read: No such file or directory"
    assert said["loop.py"] == "not linted: it cannot be read: Too many levels of symbolic links"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_without_permission(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text(UNSTABLE)
    (tmp_path / "a.py").chmod(0)
    assert "Permission denied" in lint(tmp_path)[0].message


def test_folders_of_other_people_are_passed_over_unless_named(tmp_path: Path) -> None:
    for folder in (".git", ".venv", "node_modules", "__pycache__", "x/site-packages/y", "mine"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "a.py").write_text(UNSTABLE)
    (tmp_path / "mine" / "again").symlink_to(tmp_path, target_is_directory=True)
    (tmp_path / "mine" / "b.py").symlink_to(tmp_path / "mine" / "a.py")
    (tmp_path / "notes.txt").write_text(UNSTABLE)
    assert [Path(f.path).relative_to(tmp_path).as_posix() for f in lint(tmp_path)] == ["mine/a.py"]
    assert len(lint(tmp_path / "x" / "site-packages")) == 1
    assert len(lint(tmp_path / "notes.txt")) == 1


def test_a_path_that_is_not_there() -> None:
    with pytest.raises(errors.UsageError, match="nowhere does not exist"):
        lint("nowhere")


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("old(1)", 1),
        ("old(1)  # noqa", 0),
        ("old(1)  # NOQA", 0),
        ("old(1)  # noqa: NP901", 0),
        ("old(1)  # noqa:NP901", 0),
        ("old(1)  # noqa: E501, NP901", 0),
        ("old(1)  # noqa: E501 NP901", 0),
        ("old(1)  # noqa: NP9", 0),
        ("old(1)  # noqa: E501", 1),
        ("old(1)  # noqa: NP902", 1),
        ("old(1)  # type: ignore  # noqa: NP901", 0),
        ("old(1)  # noqa: NP901 - on purpose", 0),
        ("old(1)  # nanproof: ignore", 0),
        ("old(1)  # nanproof: ignore[NP901]", 0),
        ("old(1)  # nanproof: ignore[no-old]", 0),
        ("old(1)  # nanproof: ignore[NP902, NP901]", 0),
        ("old(1)  # nanproof: ignore[NP902]", 1),
        ("# nanproof: ignore[NP901]\nold(1)", 0),
        ("x = 1  # nanproof: ignore[NP901]\nold(1)", 1),
        ("# noqa\nold(1)", 1),
        ("y = f(\n    old(1),\n)  # noqa: NP901", 0),
        ("y = f(  # noqa: NP901\n    old(1),\n)", 1),
        ("y = f(\n    old(1),  # noqa: NP901\n)", 0),
        ("if old(1):\n    x = 1\n    y = 2  # noqa", 1),
        ("# nanproof: ignore-file\nold(1)", 0),
        ("x = 1\n    # nanproof: ignore-file[NP901]\nold(1)", 0),
        ("# nanproof: ignore-file[NP902]\nold(1)", 1),
        ("x = '# nanproof: ignore-file'\nold(1)", 1),
    ],
)
def test_comments_that_silence(text: str, count: int) -> None:
    assert len(checked(TORCH + text, OLD).problems) == count


def test_the_same_finding_twice_counts_once() -> None:
    twice = toy("NP901", "old", nodes=(ast.Call, ast.Call))
    assert len(checked(TORCH + "old(1)", twice).problems) == 1


def test_a_rule_that_fails_says_so_and_the_others_go_on() -> None:
    failing = toy("NP908", "old", lambda node, module: (1 / 0,))  # type: ignore[return-value]
    rules = [r for r in all_rules() if r.code == "NP002"]
    found = checked(TORCH + "old(1); plain(2)", failing, PLAIN, *rules).problems
    assert sorted(p.finding.code for p in found) == ["NP002", "NP907"]
    message = next(p.finding.message for p in found if p.finding.code == "NP002")
    assert message.startswith("rule NP908 failed on this file: ZeroDivisionError: division by zero (test_engine.py:")


def test_renamed_imports_reach_their_rule() -> None:
    text = TORCH + "from lib import old as fine\nimport lib as l\nfine(1)\nl.old(2)\nx.old(3)\n"
    assert [p.finding.line for p in checked(text, OLD).problems] == [4, 5, 6]


def test_words_decide_which_files_a_rule_sees() -> None:
    picky = toy("NP901", "old", words=("clip_grad",))
    assert not checked(TORCH + "old(1)", picky).problems
    assert checked(TORCH + "old(1)  # clip_grad", picky).problems


# --- settings ---------------------------------------------------------------------------------------------------------


def settings(folder: Path, text: str) -> Settings:
    (folder / "pyproject.toml").write_text(text)
    return load_settings(folder)


def test_the_section_of_pyproject(tmp_path: Path) -> None:
    (tmp_path / "src" / "third").mkdir(parents=True)
    (tmp_path / "src" / "pyproject.toml").write_text(
        "[project]\nname = 'inner'\n"
    )  # has no section: the one above counts
    text = '[tool.nanproof.lint]\nselect = ["NP2"]\nignore = ["NP205"]\nexclude = ["third", "*_pb2.py"]\n'
    settings(tmp_path, text + '[tool.nanproof.lint.per-file-ignores]\n"src/train.py" = ["log-of-probability"]\n')
    for name in ("train.py", "model.py", "third/x.py", "a_pb2.py"):
        (tmp_path / "src" / name).write_text(UNSTABLE)
    found = lint(tmp_path / "src", select=["NP206"])
    assert [Path(f.path).name for f in found] == ["model.py"]
    found = lint([tmp_path / "src" / "third" / "x.py"])
    assert found == ()


@pytest.mark.parametrize(
    ("text", "words", "hint"),
    [
        ('selct = ["NP2"]', "has no setting 'selct'", "did you mean select"),
        ("line-length = 3", "has no setting 'line-length'", "settings are select, ignore, exclude, per-file-ignores"),
        ('select = "NP2"', "select in .* must be a list of strings", "for example"),
        ("ignore = [3]", "ignore in .* must be a list of strings", "for example"),
        ("per-file-ignores = 3", "per-file-ignores in .* must be a table", "for example"),
        ('[tool.nanproof.lint.per-file-ignores]\n"a" = ["NP9"]', "no rule is called 'NP9'", ""),
        ("select = [", "is not TOML", "correct it"),
    ],
)
def test_a_wrong_section_is_an_error_that_helps(tmp_path: Path, text: str, words: str, hint: str) -> None:
    with pytest.raises(errors.UsageError, match=f"{words}.*{hint}"):
        settings(tmp_path, f"[tool.nanproof.lint]\n{text}\n")


def test_rules_are_chosen_by_prefix_name_and_all() -> None:
    everything = {r.code for r in all_rules()}
    by_default = {r.code for r in all_rules() if r.default}
    always = {c for c in everything if c.startswith("NP0")}

    def chosen(select: list[str], ignore: list[str] = []) -> set[str]:  # noqa: B006
        return {r.code for r in choose_rules(select, ignore)}

    assert chosen([]) == by_default
    assert chosen(["ALL"]) == everything
    assert chosen(["NP2"]) == {c for c in by_default if c.startswith("NP2")} | always
    assert chosen(["np206", "clip-without-unscale"]) == {"NP206", "NP301"} | always
    assert chosen([], ["NP2", "NP0"]) == {c for c in by_default if not c.startswith(("NP2", "NP0"))}
    off = sorted(everything - by_default)
    for code in off:
        assert chosen([code]) == {code} | always
        assert code not in chosen([code[:3]])
    with pytest.raises(errors.UsageError, match=r"no rule is called 'NP999'"):
        chosen(["NP999"])
    with pytest.raises(errors.UsageError, match=r"'clip-without-unscal'.*did you mean clip-without-unscale"):
        chosen([], ["clip-without-unscal"])


def test_excluded_files(tmp_path: Path) -> None:
    for name in ("a.py", "build/b.py", "src/gen/c.py", "src/d.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()

    def left(*exclude: str) -> list[str]:
        found = find_files([tmp_path], Settings(root=tmp_path, exclude=exclude))
        return [f.relative_to(tmp_path).as_posix() for f in found]

    assert left() == ["a.py", "build/b.py", "src/d.py", "src/gen/c.py"]
    assert left("build") == ["a.py", "src/d.py", "src/gen/c.py"]
    assert left("src/gen/", "a.py") == ["build/b.py", "src/d.py"]
    assert left("src/*") == ["a.py", "build/b.py"]
    assert left("*.py") == []


# --- facts of a program -----------------------------------------------------------------------------------------------


def test_facts_come_from_the_files_that_run_together(tmp_path: Path) -> None:
    files = {
        "a/train.py": "import torch\nfrom .engine import step\nfrom utils.amp import scaler\n",
        "a/engine.py": "import torch\nprobe()\n",
        "a/utils/amp.py": "import torch\nscaler = torch.amp.GradScaler('cuda')\nscaler.unscale_(opt)\n",
        "b/train.py": "import torch\nprobe()\n",
        "b/other.py": "import torch\n# scaler.unscale_(opt)\nx = 'GradScaler()'\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    seen = {}

    def look(node: object, module: Module) -> tuple[()]:
        seen[module.path] = (module.project.scaler, module.project.unscale)
        return ()

    paths = sorted(tmp_path.rglob("*.py"))
    list(Linter(paths, [toy("NP901", "probe", look)], Settings(info=True)).run(paths))
    by_name = {Path(p).relative_to(tmp_path).as_posix(): facts for p, facts in seen.items()}
    assert by_name == {
        "a/engine.py": (True, True),
        "b/train.py": (False, False),
    }  # through train.py, which imports both


def test_a_fact_is_never_there_without_one_of_its_words() -> None:
    """Files without the words are not parsed for a fact, so the words must not miss one."""
    site = Path(sysconfig.get_path("purelib"))
    files = sorted([*(site / "trl").rglob("*.py"), *(site / "accelerate").rglob("*.py")])[::3]
    assert len(files) > 50
    wrong = []
    together = program.Program(files)
    for path in files:
        facts, words = together._read_facts(str(path)), program._hints_in(path)
        for name, hints in project.HINTS.items():
            if getattr(facts, name) and not words & set(hints):
                wrong.append((path.name, name))
    assert wrong == []
    assert set(project.HINTS) == {f.name for f in dataclasses.fields(project.FileFacts)}


def test_the_pages_of_the_rules() -> None:
    written = pages()
    assert set(written) == {f"{r.code}.md" for r in everything()} | {"README.md"}
    for rule in everything():
        assert written[f"{rule.code}.md"].startswith(f"# {rule.code}: {rule.name}\n")
        assert f"[{rule.code}]({rule.code}.md)" in written["README.md"]


def test_the_public_function_takes_one_path_or_many(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text(UNSTABLE)
    one = lint(str(tmp_path / "a.py"))
    assert one == lint([tmp_path]) == lint(tmp_path)
    assert [f.code for f in one] == ["NP206"]
    assert lint(tmp_path, ignore=["NP206"]) == ()
    assert lint([]) == ()


def test_standard_input_is_a_file_without_neighbours() -> None:
    run = Inspection([], stdin=UNSTABLE.encode())
    [found] = list(run.lint())
    assert [p.finding.path for p in found.problems] == ["<stdin>"]


def test_warnings_of_foreign_code_are_not_ours(tmp_path: Path) -> None:
    """Invalid escapes in a linted file would be warnings of this process, and warnings are errors here."""
    (tmp_path / "a.py").write_text(TORCH + "x = '\\d'\ny = 1 is 1\n")
    assert lint(tmp_path) == ()
    [found] = linter(*TOYS).run([tmp_path / "a.py"])
    assert found.problems == ()


@pytest.mark.parametrize("framework", ["paddle", "megengine", "jittor"])
def test_code_of_other_frameworks_is_left_alone(tmp_path: Path, framework: str) -> None:
    loop = "import {0}.nn.functional as F\n\ndef loss(p):\n    return F.binary_cross_entropy(F.sigmoid(p), p)\n"
    for name, expected in (("torch", ["NP207"]), (framework, [])):
        (tmp_path / f"{name}_code.py").write_text(loop.format(name))
        assert [f.code for f in lint([tmp_path / f"{name}_code.py"])] == expected
