"""Python objects through collectives: pickled, they travel as bytes, whatever the framework."""
import io
import pickle
import struct
from typing import Any, List, Optional

from lightcc import _core, ops
from lightcc.common.process_sets import ProcessSet, global_process_set

_LENGTH = struct.Struct("<q")


def broadcast_object(obj: Any, root_rank: int = 0, name: Optional[str] = None,
                     process_set: ProcessSet = global_process_set) -> Any:
    """Returns the root's object on every rank of the set; on the others `obj` is not looked at.

    obj: anything that cloudpickle can pickle. root_rank: a world rank. name: default "broadcast_object"; length and
    bytes travel as "<name>.sz" and "<name>.t". Errors as for broadcast. Source: horovod.torch.functions.

    >>> hvd.broadcast_object({"epoch": hvd.rank()}, root_rank=0)
    {'epoch': 0}
    """
    name = name or "broadcast_object"
    is_root = _core.rank() == root_rank
    data = bytearray(_dumps(obj)) if is_root else bytearray()
    length = bytearray(_LENGTH.pack(len(data)))
    ops.broadcast_(length, root_rank, name + ".sz", process_set)
    if not is_root:
        data = bytearray(_LENGTH.unpack(length)[0])
    ops.broadcast_(data, root_rank, name + ".t", process_set)
    return obj if is_root else pickle.loads(data)


def allgather_object(obj: Any, name: Optional[str] = None, process_set: ProcessSet = global_process_set) -> List[Any]:
    """Returns the objects of all ranks of the set, in rank order; of those that have not joined (hvd.join).

    obj: anything that cloudpickle can pickle. name: default "allgather_object". Errors as for allgather.
    Source: horovod.torch.functions (which has no process_set).

    >>> hvd.allgather_object(hvd.rank()) == list(range(hvd.size()))
    True
    """
    data = ops.allgather(bytearray(_dumps(obj)), name or "allgather_object", process_set)
    gathered, objects = io.BytesIO(data), []
    while gathered.tell() < len(data):
        objects.append(pickle.load(gathered))  # a pickle knows its own end
    return objects


def _dumps(obj: Any) -> bytes:
    import cloudpickle  # late: it takes time to import, and few programs send objects
    return cloudpickle.dumps(obj)
