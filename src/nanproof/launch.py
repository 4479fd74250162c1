"""Which of several processes this is, as the launcher that started it says."""

from __future__ import annotations

import os
from collections.abc import Mapping

# torchrun, Open MPI, MPICH and Intel MPI, PMIx, Slurm's srun: the variables of rank and world size
_LAUNCHERS = (
    ("RANK", "WORLD_SIZE"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("PMI_RANK", "PMI_SIZE"),
    ("PMIX_RANK", "PMIX_SIZE"),
    ("SLURM_PROCID", "SLURM_NTASKS"),
)


def rank_and_world(environment: Mapping[str, str] | None = None) -> tuple[int, int]:
    """Rank and world size of this process; (0, 1) when no launcher names them.

    >>> rank_and_world({"RANK": "3", "WORLD_SIZE": "8"}), rank_and_world({"SLURM_PROCID": "1", "SLURM_NTASKS": "2"})
    ((3, 8), (1, 2))
    >>> rank_and_world({})
    (0, 1)
    """
    given = os.environ if environment is None else environment
    for rank, size in _LAUNCHERS:
        if given.get(rank, "").isdecimal():
            size_text = given.get(size, "")
            return int(given[rank]), max(int(size_text) if size_text.isdecimal() else 1, int(given[rank]) + 1)
    return 0, 1


def is_first_process() -> bool:
    """Whether this is rank 0, or the only process."""
    return rank_and_world()[0] == 0
