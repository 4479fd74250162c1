"""Every layout of text logs: what is read out of a few lines of each."""

from __future__ import annotations

import math
import re

import pytest

from logs.reading import plain, points, read_text
from logs.samples import CASES
from nanproof.logs.grammar import Grammar
from nanproof.logs.grammars import GRAMMARS


@pytest.mark.parametrize("grammar", GRAMMARS, ids=lambda g: g.name)
def test_a_grammar_reads_its_own_sample_and_finds_what_is_bad(grammar: Grammar) -> None:
    reading = grammar.read(grammar.sample.encode())
    assert reading is not None
    assert any(not math.isfinite(v) for v in reading.values.values())
    assert grammar.needle in grammar.sample.encode()
    first = next(g for g in GRAMMARS if g.needle in grammar.sample.encode() and g.read(grammar.sample.encode()))
    assert first is grammar, "another grammar takes these lines before"


@pytest.mark.parametrize("name", CASES)
def test_layouts(name: str) -> None:
    text, columns, facts = CASES[name]
    series = read_text(text)
    expected = {n: [(s, plain(v)) for s, v in p] for n, p in columns.items()}
    assert {n: points(series.columns.get(n)) for n in columns} == expected
    found = {"unit": series.unit, "max_steps": series.max_steps, "events": [e.kind for e in series.events]}
    assert {k: found[k] for k in facts} == facts


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("chunk", [1, 7])
def test_how_the_bytes_arrive_does_not_matter(name: str, chunk: int) -> None:
    text = CASES[name][0]
    whole, pieces = read_text(text), read_text(text, chunk=chunk)
    assert {n: points(c) for n, c in pieces.columns.items()} == {n: points(c) for n, c in whole.columns.items()}
    assert [e.text for e in pieces.events] == [e.text for e in whole.events]


@pytest.mark.parametrize("name", CASES)
def test_colours_and_windows_line_ends_do_not_matter(name: str) -> None:
    text = CASES[name][0]
    colored = (
        re.sub(r"\b(loss|nan)\b", "\x1b[1;31m\\1\x1b[0m", text) if "\x1b" not in text and '{"' not in text else text
    )
    plainly, dressed = read_text(text), read_text(colored.replace("\n", "\r\n"))
    assert {n: points(c) for n, c in dressed.columns.items()} == {n: points(c) for n, c in plainly.columns.items()}


def test_a_config_is_no_record() -> None:
    series = read_text(
        "TrainingArguments(learning_rate=5e-05, loss=1.0, max_grad_norm=1.0)\nNamespace(lr=0.1, lambda_loss=0.5)\n"
        "lr: 0.001\nwarmup_steps: 100\nbatch size: 32\naux_loss_weight: 0.01\n"
        "epochs: 10\nStep 1: load the model\nStep 2/3: tokenise\n"
    )
    assert series.rows == 0
    assert not series.columns


def test_a_new_heading_of_another_table() -> None:
    series = read_text(
        "epoch     train_loss  valid_loss\n0         0.5         0.6\n"
        "epoch     train_loss  error_rate  valid_loss\n1         nan         0.1         0.7\n"
    )
    assert points(series.columns["valid_loss"]) == [(0, 0.6), (1, 0.7)]
