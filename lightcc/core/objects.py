"""Python objects through collectives: pickled, they travel as bytes, whatever the framework."""
import io
import pickle
import struct
from typing import Any, List, Optional, Tuple

from lightcc.core import lib, ops
from lightcc.core.process_sets import ProcessSet, global_process_set

_LENGTH = struct.Struct("<q")


class _Unpicklable:
    """Travels instead of an object that its rank could not pickle, so that no rank waits for it."""

    def __init__(self, rank: int, error: Exception):
        self.text = f"rank {rank} could not pickle its object: {type(error).__name__}: {error}"


def broadcast_object(obj: Any, root_rank: int = 0, name: Optional[str] = None,
                     process_set: ProcessSet = global_process_set) -> Any:
    """Returns the root's object on every rank of the set; on the others `obj` is not looked at.

    obj: anything that cloudpickle can pickle. root_rank: a world rank. name: default "broadcast_object"; length and
    bytes travel as "<name>.sz" and "<name>.t". Errors as for broadcast; if the object cannot be pickled, the root
    raises what pickling raised, and the others ValueError. Source: horovod.torch.functions.

    >>> hvd.broadcast_object({"epoch": hvd.rank()}, root_rank=0)
    {'epoch': 0}
    """
    name = name or "broadcast_object"
    is_root = lib.rank() == root_rank
    data, failure = _dumps(obj) if is_root else (bytearray(), None)
    length = bytearray(_LENGTH.pack(len(data)))
    ops.broadcast_(length, root_rank, name + ".sz", process_set)
    if not is_root:
        data = bytearray(_LENGTH.unpack(length)[0])
    ops.broadcast_(data, root_rank, name + ".t", process_set)
    if failure is not None:
        raise failure
    return obj if is_root else _expect("broadcast_object", [pickle.loads(data)])[0]


def allgather_object(obj: Any, name: Optional[str] = None, process_set: ProcessSet = global_process_set) -> List[Any]:
    """Returns the objects of all ranks of the set, in rank order; of those that have not joined (hvd.join).

    obj: anything that cloudpickle can pickle. name: default "allgather_object". Errors as for allgather; if an object
    cannot be pickled, its rank raises what pickling raised, and the others ValueError.
    Source: horovod.torch.functions (which has no process_set).

    >>> hvd.allgather_object(hvd.rank()) == list(range(hvd.size()))
    True
    """
    mine, failure = _dumps(obj)
    data = ops.allgather(mine, name or "allgather_object", process_set)
    if failure is not None:
        raise failure
    gathered, objects = io.BytesIO(data), []
    while gathered.tell() < len(data):
        objects.append(pickle.load(gathered))  # a pickle knows its own end
    return _expect("allgather_object", objects)


def dumped(obj: Any) -> bytes:
    """Pickled by cloudpickle. Errors: whatever an object's own methods raise.

    >>> pickle.loads(dumped(lambda: 3))()
    3
    """
    import cloudpickle  # late: it takes time to import, and few programs send objects
    return cloudpickle.dumps(obj)


def _dumps(obj: Any) -> Tuple[bytearray, Optional[Exception]]:
    """The object, pickled; if it cannot be, an _Unpicklable and the reason."""
    try:
        return bytearray(dumped(obj)), None
    except Exception as error:  # whatever an object's own methods raise
        return bytearray(pickle.dumps(_Unpicklable(lib.rank(), error))), error


def _expect(call: str, objects: List[Any]) -> List[Any]:
    """The objects, if they all are what was to be sent."""
    failures = [entry.text for entry in objects if isinstance(entry, _Unpicklable)]
    if failures:
        raise ValueError(f"{call}: {'; '.join(failures)}")
    return objects
