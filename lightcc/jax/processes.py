"""How JAX's processes and lightcc's ranks, which are the same processes by the same numbers, meet.

Where a launcher has placed them, lightcc knows the way: the ranks meet, and rank 0 tells the others where JAX's
coordinator will be. Where JAX alone is told who they are, by jax.distributed.initialize or by what Kubeflow sets, they
meet in JAX's own store, as the ranks of torch do in torch's (lightcc/torch/store_meeting.py).
"""
import ctypes
import functools
import json
import os
import re
import socket
import threading
from typing import Any, Optional, Sequence, Union

import jax

from lightcc.core import elastic_worker, lib, meeting
from lightcc.core.basics import leave_after_error
from lightcc.core.exceptions import HorovodInternalError
from lightcc.core.job import basics
from lightcc.core.objects import broadcast_object
from lightcc.jax import children, collectives
from lightcc.launch import network, placed

STORE_TIMEOUT_S = 300  # as JAX's own

_jax_initialize = jax.distributed.initialize
_is_ours = False  # whether jax.distributed was initialised here


def begin() -> None:
    """On import: meets the others if somebody has said who they are, and sees to it that a program which calls
    jax.distributed.initialize itself works as well."""
    jax.distributed.initialize = _initialize
    threading._register_atexit(_before_end)  # type: ignore[attr-defined]  # before JAX ends its backend
    if _jax_state().client is not None or _is_launched() or _is_of_kubeflow():
        init()
        children.mark()


def init(coordinator_address: Optional[str] = None, num_processes: Optional[int] = None,
         process_id: Optional[int] = None, local_device_ids: Optional[Union[int, Sequence[int]]] = None) -> None:
    """Meets the other processes. A launcher's process has done so when lightcc.jax was imported, so it need not call
    this. A second call does nothing.

    coordinator_address, num_processes, process_id, local_device_ids: those of jax.distributed.initialize, where no
    launcher tells; none of them without a launcher: a world of one.

    Errors: RuntimeError if JAX has its devices already, for numbers other than the launcher's or an earlier call's, and
    in a process that a rank has started; ValueError if a process is to have several CPU devices, and for
    local_device_ids alone; HorovodInternalError if the others cannot be reached. Source: jax.distributed.

    >>> lightcc.jax.init(); lightcc.jax.size() >= 1
    True
    """
    given = (coordinator_address, num_processes, process_id)
    if given == (None, None, None) and local_device_ids is not None:
        raise ValueError(f"lightcc.jax.init(local_device_ids={local_device_ids}): give coordinator_address, "
                         "num_processes and process_id as well, or leave it out: a launcher's processes of a host take "
                         "a GPU each.")
    if lib.initialized() and (basics.size() == 1 or _jax_state().client is not None):
        _expect_ours("lightcc.jax.init", num_processes, process_id)
    elif given != (None, None, None):
        jax.distributed.initialize(*given, local_device_ids)
    elif children.is_of_rank():
        raise RuntimeError("lightcc.jax: a rank has started this process, which is none itself, and so has no rank and "
                           "size. Hand it what it needs, or put such calls behind `if __name__ == \"__main__\":`.")
    elif _jax_state().client is not None:
        _meet_in_store()
    elif _is_launched():
        _meet_as_launched()
    elif _is_of_kubeflow():
        address, port, size, rank = (os.environ[name] for name in children.KUBEFLOW)
        jax.distributed.initialize(f"{address}:{port}", int(size), int(rank))
    else:
        basics.init()


def rank() -> int:
    """Rank of this process, 0 to size() - 1: JAX's process_index().

    >>> 0 <= lightcc.jax.rank() < lightcc.jax.size()
    True
    """
    init()
    return basics.rank()


def size() -> int:
    """Number of processes: JAX's process_count().

    >>> lightcc.jax.size() > lightcc.jax.rank()
    True
    """
    init()
    return basics.size()


def local_rank() -> int:
    """Rank of this process among those of its host.

    >>> lightcc.jax.local_rank() <= lightcc.jax.rank()
    True
    """
    init()
    return basics.local_rank()


def shutdown() -> None:
    """Leaves the job. JAX's collectives fail from then on, and JAX cannot begin again in this process: its backend
    keeps its number of processes. Programs need not call it, their end does the same.

    >>> lightcc.jax.shutdown()
    """
    basics.shutdown()


def _jax_state() -> Any:
    from jax._src import distributed
    return distributed.global_state


def _is_launched() -> bool:
    return meeting.is_placed() or any(name in os.environ for name in children.RANKS)


def _is_of_kubeflow() -> bool:
    return all(name in os.environ for name in children.KUBEFLOW)


def _before_end() -> None:
    """At the end of the program. After an error the others are told at once. If a process is lost, JAX would wait 100
    seconds for it, and then abort this one."""
    is_lost = lib.initialized() and lib.epoch_status() == lib.PEER_LOST
    leave_after_error()
    if not is_lost:
        return
    state = _jax_state()
    for one in (state.preemption_sync_manager, state.client, state.service):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(one))  # what ends it would wait
    state.preemption_sync_manager = state.client = state.service = None


@functools.wraps(_jax_initialize)
def _initialize(coordinator_address: Optional[str] = None, num_processes: Optional[int] = None,
                process_id: Optional[int] = None, *args: Any, **options: Any) -> None:
    """jax.distributed.initialize of a program that calls it itself."""
    if _is_ours:
        _expect_ours("jax.distributed.initialize", num_processes, process_id)
        return
    collectives.check_too_late("jax.distributed.initialize")
    collectives.check_devices()
    _jax_initialize(coordinator_address, num_processes, process_id, *args, **options)
    _meet_in_store()


def _expect_ours(call: str, num_processes: Optional[int], process_id: Optional[int]) -> None:
    for name, given, ours in (("num_processes", num_processes, basics.size()),
                              ("process_id", process_id, basics.rank())):
        if given is not None and given != ours:
            raise RuntimeError(f"{call}({name}={given}): the launcher or an earlier call has said {ours}, and "
                               "lightcc.jax has begun with that. Leave the arguments out, or start the processes "
                               "without a launcher and call this first.")


def _meet_as_launched() -> None:
    global _is_ours
    collectives.check_too_late("lightcc.jax.init()")
    collectives.check_devices()
    if elastic_worker.available():
        raise RuntimeError("lightcc.jax is not for elastic jobs: JAX keeps its number of processes for as long as a "
                           "process lives. Start without --min-np, and again from a checkpoint after a failure.")
    basics.init()
    _is_ours = True
    if basics.size() == 1:
        return
    ports = os.environ.get("LIGHTCC_PORT_RANGE", "")
    holder = network.hold_port(ports) if basics.rank() == 0 else None  # until the coordinator listens there
    address = broadcast_object(f"{_address_of_rank_0()}:{holder.getsockname()[1]}" if holder else None, 0,
                               "jax.coordinator")
    if address is None:
        raise HorovodInternalError(f"no port of LIGHTCC_PORT_RANGE={ports} is free on rank 0's host for JAX's "
                                   "coordinator")
    device = basics.local_rank() if basics.local_size() > 1 else None  # a GPU each, as mpirun and Slurm have it in JAX
    _jax_initialize(address, basics.size(), basics.rank(), device, cluster_detection_method="deactivate")
    if holder:
        holder.close()


def _address_of_rank_0() -> str:
    if lib.local_size() == lib.size():
        return "127.0.0.1"
    met = re.search(r" at (\S+):\d+;", lib.describe("world"))
    return met.group(1) if met else socket.gethostname()


def _meet_in_store() -> None:
    """jax.distributed is initialised: its processes are lightcc's ranks."""
    state = _jax_state()
    rank, size, store = state.process_id, state.num_processes, state.client
    if not lib.initialized() and size > 1:
        store.key_value_set(f"lightcc/process/{rank}", json.dumps(placed.here()))
        if rank == 0:
            store.key_value_set("lightcc/meeting", json.dumps(placed.open_meeting()))
        found = [placed.Process(*_told(store, f"lightcc/process/{other}", other)) for other in range(size)]
        placed.place(rank, found, placed.Meeting(*_told(store, "lightcc/meeting", 0)))
    basics.init()
    if (basics.rank(), basics.size()) != (rank, size):
        raise RuntimeError(f"jax.distributed knows this process as {rank} of {size}, and lightcc as {basics.rank()} of "
                           f"{basics.size()}: give both the same, or leave it to the launcher by `import lightcc.jax`")


def _told(store: Any, key: str, rank: int) -> list:
    try:
        return json.loads(store.blocking_key_value_get(key, STORE_TIMEOUT_S * 1000))
    except Exception as error:  # jaxlib's own, whose class has moved
        raise HorovodInternalError(f"process {rank} has not come to JAX's store within {STORE_TIMEOUT_S} s: {error}. "
                                   "Do all processes import lightcc.jax?") from error
