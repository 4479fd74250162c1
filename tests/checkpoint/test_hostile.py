"""Thousands of hostile and broken files: a verdict for each, nothing executed, memory bounded."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from checkpoint.corpus import bases, write_corpus
from checkpoint.writers import gguf_file

pytestmark = pytest.mark.slow

SEED = 20_261
CAP = 128 << 20

RUNNER = """
    import json, os, resource, sys

    import nanproof.checkpoint.dcp, nanproof.records  # imported when needed; here before anything is watched
    from nanproof.checkpoint import scan_series

    folder, warm = sys.argv[1], sys.argv[2]
    for kind in os.listdir(warm):
        scan_series(os.path.join(warm, kind), jobs=2)  # everything that is imported lazily is here now
    pages = int(open("/proc/self/statm").read().split()[0])
    limit = pages * resource.getpagesize() + (160 << 20)  # the cap, and room for the stacks of two threads
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    names = sys.stdin.read().split("\\n")

    def watch(event, args):
        if peaking:
            return
        if event in ("exec", "compile", "import", "os.system", "subprocess.Popen", "pickle.find_class", "os.exec",
                     "os.posix_spawn", "os.spawn", "ctypes.dlopen", "socket.connect"):
            print(json.dumps({"violation": f"{event} {str(args)[:200]}"}), flush=True)
        elif event == "open" and args[1] is not None and set(str(args[1])) & set("wax+"):
            print(json.dumps({"violation": f"open {args[:2]}"}), flush=True)

    peaking = False
    sys.addaudithook(watch)
    for name in names:
        try:
            reports = scan_series(os.path.join(folder, name), jobs=2).reports
            health = [r.health for r in reports]
            words = [w for r in reports for w in r.reasons]
            print(json.dumps({"name": name, "health": health, "words": words[:3]}), flush=True)
        except BaseException as error:
            print(json.dumps({"name": name, "crash": f"{type(error).__name__}: {error}"}), flush=True)
    peaking = True  # from here on this script itself compiles and opens
    print(json.dumps({"peak": eval(sys.argv[3])}), flush=True)
"""


# The peak of a program itself; what getrusage tells also counts the process that started it.
PEAK = "int(next(line for line in open('/proc/self/status') if line.startswith('VmHWM')).split()[1]) * 1024"


def bare_interpreter() -> int:
    """The peak memory of a Python that does nothing."""
    return int(subprocess.run([sys.executable, "-c", f"print({PEAK})"], capture_output=True, check=True).stdout)


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, bool], list[dict[str, object]], Path]:
    root = tmp_path_factory.mktemp("hostile")
    folder, warm = root / "files", root / "good"
    folder.mkdir()
    warm.mkdir()
    canary = root / "canary"
    good = bases(gguf_file(root / "base.gguf").read_bytes())
    for name, data in (
        ("a.pt", good.zip),
        ("b.pt", good.legacy),
        ("c.safetensors", good.safetensors),
        ("d.gguf", good.gguf),
    ):
        (warm / name).write_bytes(data)
    must = write_corpus(folder, SEED, good, canary)
    run = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(RUNNER), str(folder), str(warm), PEAK],
        input="\n".join(must),
        text=True,
        capture_output=True,
        timeout=600,
        env=os.environ | {"MALLOC_ARENA_MAX": "1"},
    )
    assert run.returncode == 0, run.stderr[-2000:]
    return must, [json.loads(line) for line in run.stdout.splitlines()], canary


def test_every_file_gets_a_verdict(outcome: tuple[dict[str, bool], list[dict[str, object]], Path]) -> None:
    must, lines, _ = outcome
    crashes = [line for line in lines if "crash" in line]
    assert crashes == [], f"seed {SEED}: {crashes[:5]}"
    assert len(must) >= 2_000
    assert {line["name"] for line in lines if "name" in line} == set(must)


def test_nothing_is_executed_written_or_imported(
    outcome: tuple[dict[str, bool], list[dict[str, object]], Path],
) -> None:
    _, lines, canary = outcome
    assert [line for line in lines if "violation" in line] == []
    assert not canary.exists()


def test_none_is_called_healthy_that_is_not(outcome: tuple[dict[str, bool], list[dict[str, object]], Path]) -> None:
    must, lines, _ = outcome
    wrong = [
        line for line in lines if "health" in line and must[str(line["name"])] and set(line["health"]) <= {"healthy"}
    ]  # type: ignore[call-overload]
    assert wrong == [], f"seed {SEED}"


def test_memory_stays_below_the_cap(outcome: tuple[dict[str, bool], list[dict[str, object]], Path]) -> None:
    _, lines, _ = outcome
    starved = [line for line in lines if "more memory than there is" in str(line.get("words"))]
    assert starved == []
    (peak,) = [line["peak"] for line in lines if "peak" in line]
    assert isinstance(peak, int)
    assert 10 << 20 < peak - bare_interpreter() <= CAP


def test_the_canary_sings_where_files_are_trusted(tmp_path: Path) -> None:
    """The attacks are real: Python's own unpickler runs them."""
    from checkpoint.corpus import _hostile_pickles

    canary = tmp_path / "canary"
    data = next(d for n, d, _ in _hostile_pickles(canary) if n == "attack-system.pt")
    subprocess.run(
        [sys.executable, "-c", "import pickle, sys; pickle.loads(sys.stdin.buffer.read())"], input=data, check=True
    )
    assert canary.exists()


def test_a_file_without_permission_is_unreadable(tmp_path: Path) -> None:
    """Root may read everything, so the child first becomes nobody."""
    import tempfile

    code = """
        import os, sys
        from nanproof.checkpoint import scan
        scan(sys.argv[1])
        if os.geteuid() == 0:
            os.seteuid(65534)
        report = scan(sys.argv[1])
        print(report.health, report.reasons)
    """
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        path = Path(folder, "secret.pt")
        path.write_bytes(b"x")
        path.chmod(0)
        command = [sys.executable, "-c", textwrap.dedent(code), str(path)]
        run = subprocess.run(command, text=True, capture_output=True, timeout=600)
    assert run.stdout.startswith("unreadable ('cannot be opened: permission denied'"), run.stderr
