"""What launchers tell a process in its environment, for scripts that ask before init."""
import os
from collections.abc import Mapping
from typing import Optional

# Rank and size, in the order in which init() believes launchers. torchrun's names are common words, so its mark counts.
_LAUNCHERS = (
    (None, "HOROVOD_RANK", "HOROVOD_SIZE"),
    ("TORCHELASTIC_RUN_ID", "RANK", "WORLD_SIZE"),
    (None, "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    (None, "PMI_RANK", "PMI_SIZE"),
)


def get_env_rank_and_size(env: Optional[Mapping[str, str]] = None) -> tuple[int, int]:
    """Rank and number of processes as lightccrun, torchrun or mpirun tell them; (0, 1) if none of them does.

    env: read instead of os.environ. RuntimeError if a launcher's rank is there without its size, or the other way.
    Source: horovod.runner.common.util.env.

    >>> get_env_rank_and_size({"HOROVOD_RANK": "1", "HOROVOD_SIZE": "4"})
    (1, 4)
    """
    env = os.environ if env is None else env
    for mark, rank, size in _LAUNCHERS:
        if mark is not None and mark not in env:
            continue
        if rank in env and size in env:
            return int(env[rank]), int(env[size])
        if rank in env or size in env:
            there, missing = (rank, size) if rank in env else (size, rank)
            raise RuntimeError(f"Could not determine process rank and size: {there} is in the environment, but "
                               f"{missing} is not. Unset what was left over from another job.")
    return 0, 1
