"""NP001: a file that could not be linted is never counted as clean."""

from __future__ import annotations

from ..rule import Rule

RULE = Rule(
    code="NP001",
    name="not-linted",
    what="Says that a file, or a cell of a notebook, that mentions torch could not be linted, and why.",
    why="""A file that cannot be read is not a clean file. What stands in the way is a syntax error, Python 2, null
bytes, an encoding other than the one the file names, nesting too deep for Python's parser, a size of more than 10 MB,
or missing permission. The file is left alone: nothing in it is changed.""",
    bad='import torch\n\nprint "loss", torch.zeros(1)\n',
    good='import torch\n\nprint("loss", torch.zeros(1))\n',
    false_alarm="""Templates and generated files may not be meant to be Python. Leave them out with `exclude` in
`[tool.nanproof.lint]` of pyproject.toml.""",
    nodes=(),
    check=lambda node, module: iter(()),
)
