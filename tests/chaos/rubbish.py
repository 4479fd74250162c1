"""Tier C: malformed checkpoints, logs, configs, code and requests: no crash, nothing executed, nothing called clean."""

from __future__ import annotations

import json
import os
import random
import resource
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from checkpoint.corpus import bases, corpus, write_corpus
from checkpoint.writers import gguf_file
from logs.corpus import BITES, spoiled

TESTS = Path(__file__).parents[1]
KINDS = ("checkpoint", "log", "config", "code", "request")


@dataclass(frozen=True, kw_only=True)
class Piece:
    """One malformed file, and whether "clean" would be wrong."""

    kind: str
    name: str
    path: Path
    bad: bool


@dataclass
class Score:
    """What came of some pieces; each list should stay empty."""

    opened: int = 0
    crashes: list[str] = field(default_factory=list)
    executions: list[str] = field(default_factory=list)
    false_clean: list[str] = field(default_factory=list)

    @property
    def wrong(self) -> list[str]:
        return [
            *(f"crash: {c}" for c in self.crashes),
            *(f"executed: {e}" for e in self.executions),
            *(f"called clean: {c}" for c in self.false_clean),
        ]


# --- what is fed in -------------------------------------------------------------------------------------------------


FEW = 2000


def checkpoints(folder: Path, seed: int, count: int, canary: Path) -> list[Piece]:
    good = bases(gguf_file(folder / "base.gguf").read_bytes())
    place = folder / "checkpoints"
    place.mkdir()
    dice = random.Random(f"checkpoint:{seed}")
    if count < FEW:  # then most need not be written at all
        some = [c for c in corpus(seed, good, canary) if dice.random() < 1.5 * count / FEW][:count]
        return [_write(folder, "checkpoint", f"{i:05}-{n}", data, bad=bad) for i, (n, data, bad) in enumerate(some)]
    must = write_corpus(place, seed, good, canary)
    chosen = dice.sample(sorted(must), min(count, len(must)))
    return [Piece(kind="checkpoint", name=n, path=place / n, bad=must[n]) for n in chosen]


def logs(folder: Path, seed: int, count: int) -> Iterator[Piece]:
    """Spoiled logs of every format; and whole ones with a NaN in them, between lines of noise."""
    dice = random.Random(f"log:{seed}")
    for name, data in spoiled(count // 2, seed):
        yield _write(folder, "log", f"{name}.log", data, bad=False)
    for i in range(count - count // 2):
        noise = [_noise(dice) for _ in range(dice.randrange(12))]
        lines = [b"iter %d: loss 2.5" % s for s in range(3)] + [b"iter 3: loss nan"]
        mixed = [line for at, line in enumerate(lines) for line in (*noise[at::4], line)]
        yield _write(folder, "log", f"noise-{i}.log", b"\n".join(mixed) + b"\n", bad=True)


def _noise(dice: random.Random) -> bytes:
    """A line of rubbish; one that ends lines, or is a record itself, would change what is right."""
    tame = [b for b in BITES if not set(b) & set(b"\r\n\b\x1b") and not b.startswith((b"\xff\xfe", b"\0"))]
    line = b"".join(dice.choice(tame) if dice.random() < 0.5 else dice.randbytes(5) for _ in range(dice.randrange(6)))
    return b"# " + line.replace(b"\n", b" ").replace(b"\r", b" ").replace(b"\0", b" ").replace(b"\x1b", b" ")


YAML = b"""\
model: {name: gpt, width: 256}
optimizer: &o
  lr: 1e-3
  betas: [0.9, 0.999]
  eps: 1e-8
other: *o
precision: bf16-mixed
text: |
  several
  lines
"""
CONFIGS = {
    "yaml": YAML,
    "json": b'{"optimizer": {"lr": 0.001, "betas": [0.9, 0.999]}, "fp16": {"enabled": true, "loss_scale": 0}}\n',
    "toml": b'[optimizer]\nlr = 1e-3\nbetas = [0.9, 0.999]\n[model]\nname = "gpt"\n',
    "py": b"import os\nlr = 1e-3\noptimizer = dict(type='AdamW', lr=lr)\nfp16 = dict(loss_scale='dynamic')\n",
}


def hostile_configs(canary: Path) -> dict[str, bytes]:
    """Configs that run something, blow up, or are no config at all, in a reader that trusts them."""
    touch = f"touch {canary}"
    laughs = "a0: &a0 [x,x,x,x,x,x,x,x,x]\n"
    laughs += "".join(f"a{i}: &a{i} [{','.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 10))
    return {
        "apply.yaml": f"x: !!python/object/apply:os.system ['{touch}']\nlr: 1\n".encode(),
        "new.yaml": f"!!python/object/new:os.system ['{touch}']\n".encode(),
        "name.yaml": f"x: !!python/name:os.system\ny: {touch}\n".encode(),
        "hydra.yaml": f"_target_: os.system\n_args_: ['{touch}']\n".encode(),
        "env.yaml": f'x: ${{oc.env:HOME}}\ny: ${{eval:\'__import__("os").system("{touch}")\'}}\n'.encode(),
        "laughs.yaml": laughs.encode(),
        "cycle.yaml": b"a: &a [*a]\nb: &b {c: *b}\n",
        "deep.yaml": b"[" * 50_000,
        "dedent.yaml": "".join(f"{' ' * i}a:\n" for i in range(900)).encode(),
        "list.yaml": b"- 1\n- 2\n",
        "word.yaml": b"hello\n",
        "nothing.yaml": b"",
        "null.json": b"null",
        "deep.json": b'{"a":' * 60_000,
        "digits.json": b'{"lr": 1' + b"0" * 6000 + b"}",
        "surrogate.json": b'{"lr": "\\ud800"}',
        "twice.json": b'{"lr": 1, "lr": NaN}',
        "deep.toml": b"a = " + b"[" * 9000,
        "dots.toml": b"a" + b".a" * 9000 + b" = 1",
        "run.py": f"import os\nos.system({touch!r})\nlr = 1\n".encode(),
        "open.py": f"open({str(canary)!r}, 'w')\nlr = 1e-3\n".encode(),
        "comprehension.py": f"lr = [open({str(canary)!r}, 'w') for _ in range(2)]\n".encode(),
        "deep.py": b"lr = " + b"(" * 3000 + b"1" + b")" * 3000,
    }


MEANS_SOMETHING = (".py", "hydra.yaml", "env.yaml", "surrogate.json", "digits.json")
"""Odd, but a config: there may be nothing to say about it."""


def configs(folder: Path, seed: int, count: int, canary: Path) -> Iterator[Piece]:
    for name, data in hostile_configs(canary).items():
        yield _write(folder, "config", name, data, bad=not name.endswith(MEANS_SOMETHING))
    yield from _mutants(folder, "config", CONFIGS, seed, count)


def codes(folder: Path, seed: int, count: int, canary: Path) -> Iterator[Piece]:
    """Spoiled training code. A file that Python cannot parse must be told of; the reader decides which those are."""
    run = f"open({str(canary)!r}, 'w')".encode()
    crafted = {
        "runs.py": b"import torch\n" + run + b"\n",
        "decorated.py": b"import torch\n@(" + run + b")\ndef f(): pass\n",
        "default.py": b"import torch\ndef f(x=" + run + b"): pass\n",
        "class.py": b"import torch\nclass A(metaclass=" + run + b"): pass\n",
        "coding.py": b"# -*- coding: no_such_codec -*-\nimport torch\n",
        "utf7.py": b"# coding: utf-7\nimport torch\n+AAo-" + run,
        "parens.py": b"import torch\nx = " + b"(" * 1500 + b"1" + b")" * 1500 + b"\n",
        "minus.py": b"import torch\nx = " + b"-" * 20_000 + b"1\n",
        "strings.py": b"import torch\nx = " + b"'a' " * 20_000 + b"\n",
        "python2.py": b"import torch\nprint 'loss', loss\nexec 'x'\n",
        "tabs.py": b"import torch\nif 1:\n\tx = 1\n        y = 2\n",
        "cr.py": b"import torch\rx = 1\r",
        "nul.py": b"import torch\nx = '\0'\n",
        "bom.py": b"\xef\xbb\xbfimport torch\n",
        "wide.py": "import torch\nx = 1".encode("utf-16"),
        "cells.ipynb": b'{"cells": [{"cell_type": "code", "source": ["import torch\\n", "x ="]}]}',
        "half.ipynb": b'{"cells": [{"cell_type": "code", "source": ["import torch',
    }
    for name, data in crafted.items():
        yield _write(folder, "code", name, data, bad=True)
    fixtures = sorted((TESTS / "linting" / "fixtures").glob("np*.py"))
    chosen = {f"{i}.py": p.read_bytes() for i, p in enumerate(random.Random(f"code:{seed}").sample(fixtures, 12))}
    yield from _mutants(folder, "code", chosen, seed, count)


def _mutants(folder: Path, kind: str, good: dict[str, bytes], seed: int, count: int) -> Iterator[Piece]:
    dice = random.Random(f"{kind}:{seed}")
    bites = [
        b"(",
        b"[",
        b"{",
        b"'",
        b'"',
        b"\\",
        b"\n",
        b"\t",
        b":",
        b"&a ",
        b"*a ",
        b"!!",
        b"\0",
        b"\xff",
        b"${",
        b"#",
        b"\x85",
        b"\xed\xa0\x80",
        b"lambda ",
        b"async ",
        b"1e",
        b"0x",
        b"%",
        b"- ",
        b"---\n",
        b"...",
    ]
    for i in range(count):
        name = dice.choice(sorted(good))
        data = bytearray(good[name])
        for _ in range(dice.randint(1, 5)):
            at = dice.randrange(len(data) + 1)
            match dice.randrange(6):
                case 0:
                    del data[at : at + dice.choice([1, 3, 40])]
                case 1 if data:
                    data[dice.randrange(len(data))] ^= 1 << dice.randrange(8)
                case 2:
                    data[at:at] = dice.choice(bites) * dice.choice([1, 2, 300])
                case 3:
                    data[at:at] = data[at // 2 : at // 2 + dice.choice([5, 200])]
                case 4:
                    data[at:at] = dice.randbytes(dice.choice([1, 30]))
                case _:
                    del data[at:]
        yield _write(folder, kind, f"{i:05}.{name.rpartition('.')[2]}", bytes(data), bad=kind == "code")


def _write(folder: Path, kind: str, name: str, data: bytes, *, bad: bool) -> Piece:
    place = folder / kind
    place.mkdir(exist_ok=True)
    (place / name).write_bytes(data)
    return Piece(kind=kind, name=f"{kind}/{name}", path=place / name, bad=bad)


def pieces(kind: str, folder: Path, seed: int, count: int, canary: Path) -> list[Piece]:
    match kind:
        case "checkpoint":
            return checkpoints(folder, seed, count, canary)
        case "log":
            return list(logs(folder, seed, count))
        case "config":
            return list(configs(folder, seed, count, canary))
        case _:
            return list(codes(folder, seed, count, canary))


# --- the limited child ----------------------------------------------------------------------------------------------


def feed(found: Iterable[Piece], folder: Path, canary: Path) -> Score:
    """Open every piece in limited children; one that dies or hangs is a crash, and another takes over."""
    score = Score()
    waiting = {p.name: p for p in found}
    good = _good_files(folder)
    while waiting:
        order = "".join(
            json.dumps({"kind": p.kind, "name": p.name, "path": str(p.path)}) + "\n" for p in waiting.values()
        )
        ordered = folder / "order"
        ordered.write_text(order)
        command = [sys.executable, str(Path(__file__).with_name("reader.py")), *good]
        with ordered.open() as stdin, (folder / "stderr").open("w") as stderr:
            child = subprocess.Popen(command, stdin=stdin, stdout=subprocess.PIPE, stderr=stderr, text=True)
        for line in _lines(child):
            told = json.loads(line)
            if "violation" in told:
                score.executions.append(told["violation"])
                continue
            piece = waiting.pop(told["name"])
            score.opened += 1
            if "crash" in told:
                score.crashes.append(f"{piece.name}: {told['crash']}")
            elif told["verdict"] == "clean" and piece.bad:
                score.false_clean.append(piece.name)
        if waiting:
            name = next(iter(waiting))  # they are opened in order
            score.opened += 1
            score.crashes.append(f"{name}: the reader ended with {child.returncode}")
            del waiting[name]
    if canary.exists():
        score.executions.append("the canary sang: something from a file was run")
    return score


def _good_files(folder: Path) -> list[str]:
    place = folder / "good"
    place.mkdir(exist_ok=True)
    good = bases(gguf_file(place / "a.gguf").read_bytes())
    for name, data in (("a.pt", good.zip), ("b.pt", good.legacy), ("c.safetensors", good.safetensors)):
        (place / name).write_bytes(data)
    (place / "a.log").write_text("iter 1: loss 2.0\n")
    (place / "d.jsonl").write_text('{"step": 1, "loss": 2.0}\n')
    (place / "b.py").write_text("import torch\nloss = torch.log(torch.softmax(x, 0))\n")
    named = [f"checkpoint:{place}", f"log:{place / 'a.log'}", f"log:{place / 'd.jsonl'}", f"code:{place / 'b.py'}"]
    for ending, data in CONFIGS.items():
        (place / f"e.{ending}").write_bytes(data)
        named.append(f"config:{place / f'e.{ending}'}")
    return named


def _lines(child: subprocess.Popen[str]) -> Iterator[str]:
    """The lines of a child; it is ended when nothing comes for five minutes."""
    assert child.stdout is not None
    while select.select([child.stdout], [], [], 300)[0]:
        line = child.stdout.readline()
        if not line:
            break
        yield line
    child.kill()
    child.wait()
    child.stdout.close()


# --- requests -------------------------------------------------------------------------------------------------------


@contextmanager
def served(folder: Path) -> Iterator[tuple[str, int, str]]:
    """A page of a run, in a child with limited memory; its host, port and token."""
    run = folder / "run"
    run.mkdir()
    (run / "training_log.jsonl").write_text('{"step": 1, "loss": 2.0}\n{"step": 2, "loss": NaN}\n')
    command = [sys.executable, "-m", "nanproof", "watch", "--web", str(run)]
    limit = 4 << 30
    with (folder / "server").open("w") as stderr:
        child = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (limit, limit)),
        )
    try:
        assert child.stdout is not None
        address = child.stdout.readline().strip()
        host, port = address.split("/")[2].split(":")
        yield host, int(port), address.split("/")[3]
    finally:
        child.send_signal(signal.SIGINT)
        try:
            child.communicate(timeout=20)
        except subprocess.TimeoutExpired:
            child.kill()
            child.communicate()


def requests(host: str, token: str, seed: int, count: int) -> Iterator[tuple[bytes, bool]]:
    """Malformed and unwelcome requests; each with whether an answer of 200 would be wrong."""
    dice = random.Random(f"request:{seed}")
    methods = [b"GET", b"POST", b"PUT", b"TRACE", b"get", b"G\0T", b"", b"PRI", b"CONNECT", b"X" * 5000]
    hosts = [host.encode(), b"evil.example", b"", b"[::1", host.encode() + b".evil", b"a\0b", b"x" * 9000]
    tails = [
        b"",
        b"runs",
        b"points/r0?low=x",
        b"page/../server.py",
        b"page/%2e%2e%2fserver.py",
        b"incident/r0/../../x",
        b"points/r999999999999999999",
        b"page/app.js%00",
        b"%ff%fe",
        b"?" + b"a=b&" * 3000,
        b"stream/x",
        b"//",
    ]
    for _ in range(count):
        method, named, tail = dice.choice(methods), dice.choice(hosts), dice.choice(tails)
        right = dice.random() < 0.4
        word = token if right else dice.choice(["", token[:-1], token + "x", "..", token.upper() + "0"])
        head = method + b" /" + word.encode() + b"/" + tail + b" HTTP/1.1\r\nHost: " + named + b"\r\n"
        extra = dice.choice(
            [
                b"",
                b"Origin: http://evil.example\r\n",
                b"Content-Length: -1\r\n",
                b"Content-Length: 99999999999\r\n",
                b"Transfer-Encoding: chunked\r\n\r\nZZZ\r\n",
                b"X: " + b"y" * 70_000 + b"\r\n",
                b"no colon at all\r\n",
                b"Range: bytes=0-0,-1\r\n",
                b"Upgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Key: x\r\n",
            ]
        )
        data = head + extra + b"Connection: close\r\n\r\n"
        match dice.randrange(5):
            case 0:
                data = data[: dice.randrange(len(data))]
            case 1:
                at = dice.randrange(len(data))
                data = data[:at] + dice.randbytes(dice.choice([1, 50])) + data[at:]
            case 2:
                data = dice.randbytes(dice.choice([1, 400]))
        yield data, not (f"/{token}/".encode() in data and host.encode() in data and data.startswith(b"GET"))


def ask(host: str, port: int, data: bytes, seconds: float = 1) -> bytes:
    """Send bytes and read what comes back; to half a request nothing comes."""
    answer = b""
    with socket.create_connection((host, port), timeout=300) as line, suppress(ConnectionError, TimeoutError):
        line.settimeout(seconds)
        line.sendall(data)
        while len(answer) < 1 << 20 and (part := line.recv(1 << 16)):
            answer += part
    return answer


def pester(folder: Path, seed: int, count: int) -> Score:
    """Send requests to a real server, which must stay up and give nothing away."""
    score = Score()
    with served(folder) as (host, port, token):
        own = f"{host}:{port}"
        for i, (data, unwelcome) in enumerate(requests(own, token, seed, count)):
            name = f"request/{i:05} {data[:60]!r}"
            score.opened += 1
            try:
                answer = ask(host, port, data)
            except OSError as error:
                score.crashes.append(f"{name}: {error}")
                break
            status = answer[9:12]
            if status == b"500" or b"Traceback" in answer:
                score.crashes.append(name)
            if unwelcome and status == b"200":
                score.false_clean.append(name)
            if unwelcome and token.encode() in answer:
                score.executions.append(f"{name}: the answer gives the token away")
        good = f"GET /{token}/runs HTTP/1.1\r\nHost: {own}\r\nConnection: close\r\n\r\n".encode()
        end = time.monotonic() + 300
        while not (alive := ask(host, port, good, 10)[9:12] == b"200") and time.monotonic() < end:
            time.sleep(0.2)
        if not alive:
            score.crashes.append("the server answers no more")
    return score


def run(kind: str, folder: Path, seed: int, count: int) -> Score:
    """All of one kind, in a folder of its own."""
    folder.mkdir(parents=True, exist_ok=True)
    if kind == "request":
        return pester(folder, seed, count)
    canary = folder / f"canary-{os.getpid()}"
    return feed(pieces(kind, folder, seed, count, canary), folder, canary)
