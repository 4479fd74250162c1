"""What `nanproof run` and the Trainer's callback cost per step: the same script with and without, taking turns.

Each variant is a process of its own, since patches belong to a process. It makes one step when told to and answers
with the CPU time and the time by the clock that the step took; start-up is not counted. `--write` puts the table into
docs/run.md, `--small` tries it out.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

STEPS_BEFORE = 70
"""Enough for spike limits to be worked out at every step."""
FIGURE = 1.03
PAGE = Path(__file__).parents[1] / "docs" / "run.md"
PACKAGES = ("torch", "transformers")
PLAIN, AGAIN, RUN = "plain python", "plain python, a second copy (the noise)", "**`nanproof run`**"
TRAINER, CALLBACK = "HF Trainer", "**HF Trainer with the callback**"


def turns() -> Any:
    """In a worker: wait for a turn, then tell how long it took, for ever."""
    for _ in sys.stdin:
        start, clock = time.process_time(), time.perf_counter()
        yield
        sys.stdout.write(f"{time.process_time() - start} {time.perf_counter() - clock}\n")
        sys.stdout.flush()


def train_plain() -> None:
    """A usual loop: loader, forward, backward, clipping, AdamW, a schedule."""
    import torch
    from torch import nn
    from torch.utils.data import DataLoader

    from guard import FULL, Transformer, make_batches

    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = Transformer(FULL)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=True)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100_000)
    loader = DataLoader(make_batches(FULL), batch_size=None)
    wait = turns()
    while True:
        for x, y in loader:
            next(wait)
            optimizer.zero_grad()
            model(x, y).backward()
            nn.utils.clip_grad_norm_(model.parameters(), FULL.max_norm)
            optimizer.step()
            scheduler.step()


def train_trainer(guarded: bool, folder: str) -> None:
    """Hugging Face's Trainer on a GPT-2 of the same size."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

    from guard import BATCH, CONTEXT, FULL, HEADS, LAYERS

    torch.set_num_threads(1)
    config = GPT2Config(
        vocab_size=FULL.vocabulary, n_positions=CONTEXT, n_embd=FULL.width, n_layer=LAYERS, n_head=HEADS
    )
    wait = turns()

    class Clock(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            next(wait)  # ends this turn, waits for the next one

    class Tokens(torch.utils.data.Dataset):  # type: ignore[type-arg]
        def __len__(self) -> int:
            return 10_000

        def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
            row = torch.randint(FULL.vocabulary, (CONTEXT,), generator=torch.Generator().manual_seed(i))
            return {"input_ids": row, "labels": row}

    callbacks: list[Any] = []
    if guarded:
        from nanproof.integrations.transformers import GuardCallback

        callbacks.append(GuardCallback(run_dir=Path(folder, "run")))
    arguments = TrainingArguments(
        output_dir=folder,
        per_device_train_batch_size=BATCH,
        max_steps=5_000,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        save_strategy="no",
        logging_strategy="no",
        max_grad_norm=FULL.max_norm,
    )
    next(wait)
    Trainer(
        model=GPT2LMHeadModel(config), args=arguments, train_dataset=Tokens(), callbacks=[*callbacks, Clock()]
    ).train()


class Worker:
    """A training process that makes a step when it is told to."""

    def __init__(self, *words: str) -> None:
        here = Path(__file__)
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(here.parent)}
        self._process = subprocess.Popen(
            [sys.executable, *words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        self.clock: list[float] = []
        """The seconds by the clock of all its steps."""

    def step(self) -> float:
        """The CPU seconds of one step."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            raise RuntimeError(self._process.communicate()[1][-2000:])
        used, clock = map(float, answer.split())
        self.clock.append(clock)
        return used

    def end(self) -> None:
        self._process.kill()
        self._process.communicate()


GENERATIONS = 6
"""How often all processes are started again: where one happens to lie in memory makes it faster or slower."""


def measure_both(seconds: float = 15.0, warmup: int = STEPS_BEFORE, generations: int = GENERATIONS) -> str:
    """Measure both pairs; the table in Markdown."""
    from measure import ratio

    times: dict[str, list[float]] = {}
    clocks: dict[str, list[float]] = {}
    for _ in range(generations):
        one, clock = one_generation(seconds, warmup)
        for name in one:
            times.setdefault(name, []).extend(one[name])
            clocks.setdefault(name, []).extend(clock[name])
    rounds = len(times[PLAIN])
    lines = ["| step | over | CPU time | quartiles | by the clock | to reach | |", "|---|---|---|---|---|---|---|"]
    for name, over, figure in ((AGAIN, PLAIN, None), (RUN, PLAIN, FIGURE), (CALLBACK, TRAINER, FIGURE)):
        r, clock = ratio(times, name, over), ratio(clocks, name, over)
        aim, verdict = (f"≤ {figure}", r.verdict(figure)) if figure is not None else ("", "")
        lines.append(
            f"| {name} | {over} | {r.show('{:.3f}')} | {r.low:.2f}–{r.high:.2f} | {clock.show('{:.3f}')} | {aim} "
            f"| {verdict} |"
        )
    told = f"{rounds} rounds in {generations} generations of processes, each after {warmup} steps; AdamW, clipping."
    return "\n".join([told, "", *lines])


def one_generation(seconds: float, warmup: int) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """CPU times and times by the clock, round by round."""
    from measure import interleave

    here = str(Path(__file__))
    with tempfile.TemporaryDirectory() as folder:
        workers = {
            PLAIN: Worker(here, "plain"),
            AGAIN: Worker(here, "plain"),
            RUN: Worker("-m", "nanproof", "run", "--quiet", "--run-dir", f"{folder}/run", here, "plain"),
            TRAINER: Worker(here, "trainer", f"{folder}/a"),
            CALLBACK: Worker(here, "guarded", f"{folder}/b"),
        }
        try:
            times = interleave({n: w.step for n, w in workers.items()}, seconds=seconds, warmup=warmup)
        finally:
            for worker in workers.values():
                worker.end()
    rounds = len(times[PLAIN])
    return times, {name: worker.clock[-rounds:] for name, worker in workers.items()}


def write() -> None:
    """Put the table between its markers in docs/run.md."""
    from nanproof.files import write_atomic
    from run import machine, replace

    text = f"{machine(PACKAGES)}\n\n{measure_both()}"
    write_atomic(PAGE, replace(PAGE.read_text(encoding="utf-8"), "run_cost", text))
    print(text)


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["plain"]:
            train_plain()
        case ["trainer" | "guarded" as kind, folder]:
            train_trainer(kind == "guarded", folder)
        case ["--small"]:
            print(measure_both(seconds=5.0, warmup=5))
        case ["--write"]:
            write()
        case _:
            print(measure_both())
