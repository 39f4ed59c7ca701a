"""How the ranks of a process group meet where torch alone knows them: under torch.multiprocessing.spawn or the
launchers of Lightning and others, which tell torch rank and size, and set no variables that lightcc reads.

What ranks must know of each other travels through the group's store, the job's secret included, in the clear as all
that torch keeps there.
"""
import json
import os
from datetime import timedelta

import torch.distributed as dist

from lightcc import _torch_backend
from lightcc.core import meeting
from lightcc.core.exceptions import HorovodInternalError
from lightcc.launch import placed


def is_needed() -> bool:
    """Whether init() would not find the other ranks by itself."""
    if meeting.is_placed():
        return meeting.is_over()
    return not any(name in os.environ for name in ("RANK", *_torch_backend.LAUNCHERS))


def meet(store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
    """Called on all ranks of the group before init(). HorovodInternalError if one does not come within the timeout;
    ValueError on all ranks if some have another version of lightcc or Python."""
    store.set(f"lightcc/process/{rank}", json.dumps(placed.here()))
    if rank == 0:
        store.set("lightcc/meeting", json.dumps(placed.open_meeting()))
    processes = [placed.Process(*_of_rank(other, f"lightcc/process/{other}", store, timeout)) for other in range(size)]
    placed.place(rank, processes, placed.Meeting(*_of_rank(0, "lightcc/meeting", store, timeout)))


def _of_rank(rank: int, key: str, store: dist.Store, timeout: timedelta) -> list:
    try:
        store.wait([key], timeout)
    except RuntimeError as error:  # DistStoreError
        raise HorovodInternalError(f"init_process_group: rank {rank} has not come to torch's store within "
                                   f"{timeout.total_seconds():g} s") from error
    return json.loads(store.get(key))
