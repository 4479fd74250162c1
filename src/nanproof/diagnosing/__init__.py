"""From a broken run to its cause: evidence, ranked causes, the question that would decide, and the repair.

    from nanproof import diagnose

    diagnosis = diagnose("runs/a", facts={"attention": "sdpa"})
    print(diagnosis.causes[0].name, diagnosis.causes[0].fix)

Evidence comes from a description (`described`), from what the user states (`stated`) and from the files of a run. The
engine is pure: the same evidence gives the same ranking. A cause is one file in ``causes/``.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from .data.report import DataReport
from .diagnosis import Diagnosis as Diagnosis
from .diagnosis import Suspect as Suspect
from .evidence import Evidence as Evidence
from .evidence import Fact as Fact


def diagnose_evidence(evidence: Evidence) -> Diagnosis:
    """The diagnosis of facts that are known already."""
    from .diagnosis import conclude

    return conclude(evidence)


def diagnose(
    path: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] = (),
    *,
    facts: Mapping[str, object] | None = None,
    evidence: str | os.PathLike[str] | Mapping[str, object] | None = None,
    data: DataReport | None = None,
) -> Diagnosis:
    """Why a run broke: from its files, from what you know (``facts``) and from a description (``evidence``).

    ``path`` is a folder or some files: logs, tracker files, configs, checkpoints, incidents, code. ``facts`` are those
    of ``--fact``; ``evidence`` is a JSON file, or the mapping in it, with the fields of `described`; ``data`` is what
    `nanproof.diagnosing.data.scan_data` found in the training data.
    """
    from .case import diagnose_all

    paths = [path] if isinstance(path, str | os.PathLike) else list(path)
    return diagnose_all(paths, facts=facts or {}, evidence=evidence, data=data)
