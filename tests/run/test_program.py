"""The program runs as plain python would run it, or a clear error comes before anything runs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from functools import partial
from pathlib import Path

import pytest
from click.testing import CliRunner

from nanproof.cli.shell import nanproof as verbs
from nanproof.files import Lock
from run.launch import nanproof


def write(folder: Path, files: dict[str, str]) -> None:
    for name, source in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(textwrap.dedent(source))


def as_python(tmp_path: Path, *words: str, stdin: str = "") -> tuple[subprocess.CompletedProcess[str], str]:
    """What nanproof run and plain python do with the same words; the first must not add to the script's output."""
    ours = nanproof("run", *words, check=False, cwd=tmp_path, input=stdin)
    theirs = subprocess.run(
        [sys.executable, *words], cwd=tmp_path, input=stdin, capture_output=True, text=True, timeout=600, check=False
    )
    assert ours.returncode == theirs.returncode
    assert ours.stdout == theirs.stdout
    own = "".join(line for line in ours.stderr.splitlines(keepends=True) if not line.startswith("nanproof: "))
    assert own == theirs.stderr
    return ours, theirs.stdout


SAME = {
    "arguments and names": (
        "a.py --lr 3 -m x --policy y --json",
        """
        import sys, os
        print(sys.argv, os.path.relpath(__file__), __name__, __spec__, __package__, os.path.relpath(sys.path[0]))
        print(sorted(k for k in globals() if k.startswith("__")))
        if __name__ == "__main__":
            print("main")
    """,
    ),
    "sys.exit with a number": ("a.py", "import sys; print('x'); sys.exit(7)"),
    "sys.exit with words": ("a.py", "import sys; sys.exit('words')"),
    "os._exit": ("a.py", "import os; os._exit(5)"),
    "an exception": ("a.py", "def f():\n    raise ValueError('boom')\nf()\n"),
    "an exception from an exception": (
        "a.py",
        """
        try:
            1 / 0
        except ZeroDivisionError as error:
            raise KeyError("k") from error
    """,
    ),
    "a syntax error": ("a.py", "x = (\n"),
    "its own excepthook": ("a.py", "import sys\nsys.excepthook = lambda *a: print('hook', a[1])\n1 / 0\n"),
    "atexit and a class in a pickle": (
        "a.py",
        """
        import atexit, pickle
        class Thing: pass
        atexit.register(lambda: print("bye", type(pickle.loads(pickle.dumps(Thing()))).__name__))
    """,
    ),
    "a thread that outlives it": (
        "a.py",
        """
        import threading, time
        threading.Thread(target=lambda: (time.sleep(0.2), print("late"))).start()
    """,
    ),
    "a fork": (
        "a.py",
        """
        import os
        child = os.fork()
        if child == 0:
            os._exit(3)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    """,
    ),
    "processes of its own": (
        "a.py",
        """
        import multiprocessing
        def work(q):
            q.put(__name__)
        if __name__ == "__main__":
            for method in ("fork", "spawn"):
                context = multiprocessing.get_context(method)
                q = context.Queue()
                p = context.Process(target=work, args=(q,))
                p.start()
                print(method, q.get(), p.join(), p.exitcode)
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                print(pool.map(abs, [-1, -2]))
    """,
    ),
}


@pytest.mark.parametrize("name", SAME)
def test_a_script_behaves_as_with_plain_python(name: str, tmp_path: Path) -> None:
    words, source = SAME[name]
    write(tmp_path, {"a.py": source})
    as_python(tmp_path, *words.split())


def test_standard_input_is_the_scripts_own(tmp_path: Path) -> None:
    write(tmp_path, {"a.py": "import sys; print(sys.stdin.read())"})
    _, said = as_python(tmp_path, "a.py", stdin="hello\n")
    assert said == "hello\n\n"


def test_a_program_from_standard_input(tmp_path: Path) -> None:
    _, said = as_python(tmp_path, "-", "a", "b", stdin="import sys; print(__name__, sys.argv)")
    assert said == "__main__ ['-', 'a', 'b']\n"


PACKAGE = {
    "pkg/__init__.py": "A = 1",
    "pkg/__main__.py": "print('package', __package__)",
    "pkg/sub/__init__.py": "",
    "pkg/sub/other.py": "B = 2",
    "pkg/sub/train.py": """
        import os, sys
        from .. import A
        from .other import B
        print(A, B, [os.path.relpath(sys.argv[0]), *sys.argv[1:]], sys.path[0] == os.getcwd())
        print(__package__, __spec__.name)
    """,
}


@pytest.mark.parametrize("words", ["-m pkg.sub.train --lr 3 -m x", "-m pkg", "pkg"])
def test_modules_and_folders(words: str, tmp_path: Path) -> None:
    write(tmp_path, PACKAGE)
    as_python(tmp_path, *words.split())


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("nothing.py", "error: there is no script nothing.py\n  hint: give the path of a script"),
        ("a", "error: there is no script a\n  hint: nanproof run a.py"),
        ("empty", "error: empty is a folder without __main__.py"),
        ("-m nothing.there", "error: there is no module 'nothing.there'\n  hint: run it from the folder that holds it"),
        ("-m pkg.nothing", "error: there is no module 'pkg.nothing' to run"),
        ("--set policy.max_skip=3 a.py", "error: unknown setting 'policy.max_skip'\n  hint: use policy.max_skips"),
        ("--set policy.max_skips=0 a.py", "error: policy.max_skips is 0\n  hint: give 1 or more"),
        ("--set policy.max_skips=many a.py", "error: policy.max_skips is many"),
        ("--set watch.every=-3 a.py", "error: watch.every is -3\n  hint: give a positive number"),
        ("--set window a.py", "error: --set window has no value"),
        ("--max-norm -1 a.py", "error: max_norm is -1.0"),
        ("--policy careful a.py", "'careful' is not one of 'default', 'strict', 'observe'"),
        ("--nnodes 2 a.py", "error: --nnodes needs --nproc"),
        ("--nproc 2 --nnodes 2 a.py", "error: --nnodes 2 needs a place where the machines meet\n  hint: give --rdzv"),
        ("--run-dir a.py/x a.py", "error: a.py/x cannot be written: Not a directory\n  hint: give --run-dir a folder"),
        ("--run-dir taken a.py", "is in use by process"),
        ("", "missing argument 'PROGRAM'"),
    ],
)
def test_wrong_words_are_found_before_anything_runs(
    words: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, {"a.py": "print('ran')", "empty/readme": "", **PACKAGE})
    (tmp_path / "taken").mkdir()
    lock = Lock(tmp_path / "taken")
    lock.acquire()
    monkeypatch.chdir(tmp_path)
    before = [*sys.path], sys.argv, sys.modules["__main__"]
    done = CliRunner().invoke(verbs, ["run", *words.split()])
    lock.release()
    assert done.exit_code == 2
    assert said in done.stderr
    assert "ran" not in done.stdout
    if words != "-m pkg.nothing":  # found out only by importing pkg, which is the user's code: records have begun
        assert not (tmp_path / "runs").exists()
    sys.path[:], sys.argv, sys.modules["__main__"] = before


def test_torch_is_not_imported_before_the_script_does(tmp_path: Path) -> None:
    """What a script puts into the environment before its import of torch must still count."""
    write(tmp_path, {"a.py": "import sys; print({'torch', 'numpy', 'rich'} & set(sys.modules))"})
    assert nanproof("run", "--set", "policy.spike_window=32", "a.py", cwd=tmp_path).stdout == "set()\n"


def test_what_the_script_left_open_is_written(tmp_path: Path) -> None:
    """At its end Python closes files that only a cycle holds; that must not get lost under nanproof."""
    cycle = "class Holder: pass\nh = Holder()\nh.me = h\nh.file = open('out.txt', 'w')\nh.file.write('kept')\n"
    write(tmp_path, {"a.py": cycle})
    nanproof("run", "a.py", cwd=tmp_path)
    assert (tmp_path / "out.txt").read_text() == "kept"


def test_the_outcome_for_machines(tmp_path: Path) -> None:
    write(tmp_path, {"a.py": "import sys; sys.exit(3)"})
    done = nanproof("run", "--json", "a.py", check=False, cwd=tmp_path)
    assert done.returncode == 3
    assert json.loads(done.stdout)["exit_code"] == 3


def test_an_interrupt_ends_it(tmp_path: Path) -> None:
    write(tmp_path, {"a.py": "import time\nprint('here', flush=True)\ntime.sleep(60)\n"})
    process = subprocess.Popen(
        [sys.executable, "-m", "nanproof", "run", "a.py"],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),  # a shell's & leaves it ignored
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "here\n"
    time.sleep(0.1)
    os.kill(process.pid, signal.SIGINT)
    assert process.stderr is not None
    assert process.stderr.readline() == "nanproof: interrupted before a step was guarded\n"
    os.kill(process.pid, signal.SIGINT)  # as torchrun sends one more to what the terminal has interrupted
    assert process.wait(timeout=600) in (130, -signal.SIGINT)
    assert process.communicate() == ("", "")
