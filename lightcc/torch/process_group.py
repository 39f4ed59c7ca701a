"""torch.distributed over lightcc: torch.distributed.init_process_group("lightcc").

    import torch.distributed as dist
    import lightcc.torch.process_group      # not needed where lightcc is installed: torch finds it
    dist.init_process_group("lightcc")      # initialises lightcc, too

Any launcher will do: torchrun, lightccrun, mpirun, or one that tells torch alone rank and size.

For tensors on the CPU and on CUDA GPUs (docs/gpu.md). A group of all ranks is hvd.global_process_set, any other one a
process set, which stays when the group is destroyed and is used again by the next group of the same ranks.
"""
import re
import socket
from datetime import timedelta
from typing import Callable, Dict, Iterator, List, Optional, Tuple

import torch
import torch.distributed as dist

from lightcc import _torch_backend
from lightcc.core import lib
from lightcc.core.basics import HorovodBasics
from lightcc.core.exceptions import HorovodInternalError
from lightcc.core.objects import broadcast_object
from lightcc.core.ops import barrier
from lightcc.core.process_set_matching import match
from lightcc.core.process_sets import ProcessSet, global_process_set
from lightcc.torch import store_meeting
from lightcc.torch.asked_backend import asked_backend, is_lightcc
from lightcc.torch.collectives import Collectives
from lightcc.torch.compiling import keep_out
from lightcc.torch.futures import wait_for_abandoned
from lightcc.torch.work import Work

__all__ = ["ProcessGroup", "Work"]

_CONNECT = timedelta(seconds=30)
_DRAIN_S = 5.0
_basics = HorovodBasics(__file__)
_epoch_of_ours = 0                          # that init_process_group began, and destroy_process_group is to end
_groups_of: Dict[Tuple[int, int], int] = {}  # (epoch, process set id): how many groups it has had


class ProcessGroup(Collectives):
    """A torch process group over a process set. Made by init_process_group("lightcc") and new_group.

    Errors: HorovodInternalError where a rank is lost, ranks disagree or a timeout is over; ValueError for wrong
    arguments; NotImplementedError for recv of any source. Source: torch.distributed.ProcessGroup.
    """

    def __init__(self, process_set: ProcessSet, timeout: timedelta, name: str):
        epoch_and_set = (lib.epoch, process_set.process_set_id)
        before = _groups_of.get(epoch_and_set, 0)
        _groups_of[epoch_and_set] = before + 1
        prefix = f"group.{name}" if before else ""  # another group's calls must not shift this one's numbering
        super().__init__(process_set.rank(), process_set.size(), process_set, timeout, prefix, before)
        self._group_name, self._group_desc = name, "undefined"

    @property
    def new_group(self) -> Callable[..., Optional["ProcessGroup"]]:
        """dist.new_group of torch 2.13 calls it, whichever backend the new group is to have. There is none for another
        backend than lightcc: then torch makes the group itself, as it does where the default group is gloo's."""
        backend = asked_backend()
        if not is_lightcc(backend):
            raise AttributeError(f"lightcc's groups make no groups of backend '{backend}'")
        return self._new_group

    def _new_group(self, ranks: List[int], timeout: Optional[timedelta] = None, pg_options=None,
                   group_name: str = "", group_desc: Optional[str] = None) -> Optional["ProcessGroup"]:
        """Called on all ranks; None on those that are not members."""
        if not group_name.isdigit() and list(ranks) != list(range(self._size)):  # then it is a hash of the ranks
            raise ValueError("new_group over lightcc: all ranks make a group together, so use_local_synchronization "
                             "must be False.")
        process_set = _process_set(list(ranks))
        if not process_set.included():
            return None
        group = ProcessGroup(process_set, timeout or self._timeout, group_name)
        group._group_desc = group_desc or "undefined"
        return group

    def split_group(self, *arguments, **options) -> "ProcessGroup":
        raise NotImplementedError("split_group: lightcc's groups are not split; all ranks can make the same groups "
                                  "with torch.distributed.new_group(ranks).")

    # What torch asks a group

    @property
    def _device_types(self) -> List[torch.device]:
        """The CPU first: objects travel from there."""
        return [torch.device("cpu"), *([torch.device("cuda")] if torch.cuda.is_available() else [])]

    def _get_backend(self, device: Optional[torch.device] = None) -> "ProcessGroup":
        """There is one for all devices. init_process_group(device_id=...) asks for it."""
        return self

    supports_splitting = supports_coalescing = False

    def supports_tensor_alloc(self, device: torch.device) -> bool:
        return False

    def getBackendName(self) -> str:
        return "lightcc"

    def getRank(self) -> int:
        return self._rank

    def getSize(self) -> int:
        return self._size

    name = _get_backend_name = getBackendName
    rank, size = getRank, getSize

    def getGroupName(self) -> str:
        return self._group_name

    def setGroupName(self, name: str) -> None:
        self._group_name = name

    def getGroupDesc(self) -> str:
        return self._group_desc

    def setGroupDesc(self, desc: str) -> None:
        self._group_desc = desc

    _set_group_name, _set_group_desc = setGroupName, setGroupDesc
    group_name, group_desc = property(getGroupName), property(getGroupDesc)

    def set_timeout(self, timeout: timedelta) -> None:
        """How long a wait may take."""
        self._timeout = timeout

    def shutdown(self) -> None:
        """destroy_process_group calls it. Shuts lightcc down if init_process_group initialised it."""
        wait_for_abandoned(_DRAIN_S)
        if self._set is global_process_set and lib.epoch == _epoch_of_ours:
            _basics.shutdown()

    def abort(self) -> None:
        """Ends the job on all ranks: what they wait for fails."""
        lib.abort(f"abort of process group {self._group_name} on rank {lib.rank()}")


def make(options) -> ProcessGroup:
    """What torch calls to make a group. RuntimeError if torch and lightcc disagree on the world, ValueError if only a
    part of the group is lightcc's."""
    is_lightcc(asked_backend())
    ranks = list(options.global_ranks_in_group)
    is_default = not ranks
    if is_default and not lib.initialized() and store_meeting.is_needed():
        store_meeting.meet(options.store, options.group_rank, options.group_size, options.timeout)
    _init()
    every = list(range(lib.size()))
    if is_default and (options.group_rank, options.group_size) != (lib.rank(), lib.size()):
        raise RuntimeError(f"init_process_group: torch says that this is rank {options.group_rank} of "
                           f"{options.group_size}, lightcc that it is rank {lib.rank()} of {lib.size()}. Both must "
                           "have the same launcher: unset RANK and WORLD_SIZE, or do not give rank and world_size.")
    if ranks and ranks != every:  # only members come here, and a process set needs all ranks
        raise ValueError(f"new_group(backend='lightcc', ranks={ranks}): a group of some ranks must be made by a "
                         "default group that is lightcc's, with torch 2.13 or later.")
    return ProcessGroup(global_process_set, options.timeout, options.group_id)


def rendezvous(timeout: timedelta = dist.default_pg_timeout, **_) -> Iterator[Tuple[dist.Store, int, int]]:
    """env:// where the launcher is lightccrun or mpirun: a store at rank 0, which lightcc tells to all."""
    _init()
    rank, size = lib.rank(), lib.size()
    if rank == 0:
        host = _address_of_rank_0()
        store = dist.TCPStore(host, 0, size, is_master=True, timeout=timeout, wait_for_workers=False)
        broadcast_object((host, store.port), 0, "torch_store")
    else:
        host, port = broadcast_object(None, 0, "torch_store")
        store = dist.TCPStore(host, port, size, is_master=False, timeout=_CONNECT)
        store.set_timeout(timeout)
    barrier()  # rank 0 may not leave, and its store with it, before all are connected
    yield store, rank, size
    raise HorovodInternalError("A process group over lightcc cannot meet again; call destroy_process_group first.")


def _address_of_rank_0() -> str:
    if lib.local_size() == lib.size():
        return "127.0.0.1"
    met = re.search(r" at (\S+):\d+;", lib.describe("world"))
    return met.group(1) if met else socket.gethostname()


def _init() -> None:
    global _epoch_of_ours
    if not lib.initialized():
        _basics.init()
        _epoch_of_ours = lib.epoch


def _process_set(ranks: List[int]) -> ProcessSet:
    if ranks != sorted(ranks):
        raise ValueError(f"new_group(ranks={ranks}, sort_ranks=False): lightcc's groups are in the order of ranks.")
    if ranks == global_process_set.ranks:
        return global_process_set
    process_set = ProcessSet(ranks)
    match([process_set])  # one that exists is used again
    return process_set


_torch_backend.register()
keep_out()
