"""Requests to the core, one for each call of a framework: submitting them, and the table of those in flight.

A handle is the core's own number. What a request reads and writes is kept alive here until it is done.
"""
import contextlib
import ctypes
import itertools
import struct
from array import array
from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple

from lightcc.core import lib
from lightcc.core.adapter import Adapter, adapter_of, expect_one_device
from lightcc.core.changes import Watched, changed, counts_of
from lightcc.core.exceptions import HorovodInternalError
from lightcc.core.process_sets import ProcessSet, not_registered
from lightcc.core.request_buffer import RequestBuffer, call

# handle: (what must live until it is done, the result, or a function that makes the result, whether the former is
# watched, too)
_pending: Dict[int, Tuple[Any, Any, Optional[Callable[[int], Any]], Optional[Watched]]] = {}
# By handle: the place of a request of a GPU, with the stream that goes on behind its outputs, if one does.
_places: Dict[int, lib.Place] = {}
# What requests point at, made once: the address of a name or a shape, and who owns the memory there.
_names: Dict[str, Tuple[int, Any]] = {}
_shapes: Dict[Tuple[int, ...], Tuple[int, Any]] = {}
_KEPT = 4096  # of each
_UNNAMED = 0, None


def poll(handle: int) -> bool:
    """Whether the operation of this handle is finished; never blocks. ValueError for an unknown handle.

    A handle is unknown once synchronize has returned its result.

    >>> handle = hvd.allreduce_async(np.ones(3)); hvd.poll(handle) in (True, False)
    True
    """
    try:
        if handle >> 63 == 0:  # else ctypes would cut it to 64 bits
            done = lib.poll(handle)
            if done:
                _end_watch(handle)
            return done
    except (TypeError, ctypes.ArgumentError):
        pass
    raise ValueError(f"unknown handle {handle!r}")


def _end_watch(handle: int) -> None:
    """The program knows that an operation is done, and may change its tensors; what it did before remains known."""
    entry = _pending.get(handle)
    if entry is not None and entry[3] is not None and counts_of(entry[0]) == entry[3][2]:
        _pending[handle] = (*entry[:3], None)


def synchronize(handle: int) -> Any:
    """Waits for a handle of an ..._async operation and returns its output; for a list of tensors a list.

    Returns None for a handle that is unknown, was synchronized before or ended with shutdown(). Until then a handle
    keeps alive what its operation reads and writes.
    Ctrl-C while waiting ends the job on all ranks. RuntimeError, and the job is ended as well, if a torch tensor of the
    operation was changed meanwhile (docs/errors.md).

    >>> hvd.synchronize(hvd.allreduce_async(np.ones(3)))
    array([1., 1., 1.])
    """
    entry = _pending.get(handle)
    if entry is None:
        return None
    try:
        result = _result(handle, entry[1], entry[2])
    except Exception:  # not KeyboardInterrupt: then the entry stays, its memory may still be in use
        _pending.pop(handle, None)
        raise
    _pending.pop(handle, None)
    if entry[3] is not None and entry[3][2] != counts_of(entry[0]):
        raise changed(entry[3])
    return result


def unregister(handle: int) -> bool:
    """Undoes register; False if synchronize has done so before. The handle still must be released."""
    _places.pop(handle, None)
    return _pending.pop(handle, None) is not None


def release_all() -> None:
    """At the end of the epoch, which ends every operation: releases the handles that were not synchronized. Then their
    memory may be used again, by a stream that goes on behind it."""
    for handle in _pending:
        place = _places.get(handle)
        if place is not None and place.stream is None:
            with contextlib.suppress(ValueError, RuntimeError):  # it is released already, or its device has failed
                order(handle)
        lib.release(handle)
    _pending.clear()
    _places.clear()


# Submitting

_sets = itertools.count(1)


def new_set() -> int:
    """The number of a new set: of allreduces with a name that are submitted together in each step, and before the first
    of them is waited for. The core learns their order and may hold one until those have come that shall travel with it.
    """
    return next(_sets)


def submit(kind: int, adapter: Adapter, tensor: Any, output: Any, name: Optional[str], process_set: ProcessSet,
           flags: int, op: int = 0, prescale: float = 1.0, postscale: float = 1.0, root: int = 0, splits: Any = None,
           rows: Optional[int] = None, codec: int = 0) -> int:
    """Submits one tensor. output: a tensor, or None for memory of the core. rows: how much of dimension 0 is sent.
    codec: the id of a lightcc.compress.codec.Codec."""
    try:
        address, dtype, shape, place = adapter.describe(tensor)
        written = 0 if output is None else adapter.address(output)
    except ValueError as error:
        raise _refused(kind, name, error) from None
    if not shape and kind in _NEED_ROWS:
        raise _scalar(kind, name)
    if rows is not None and rows != shape[0]:
        shape = (rows, *shape[1:])
    kept_shape = _shapes.get(shape) or _shape_of(shape)
    group = id_of(process_set)
    if op not in _OPS:
        raise _not_an_op(op)
    if root >> 31 not in (0, -1):  # another rank would be meant, or no field holds it
        raise ValueError(f"broadcast of {name or 'a tensor'}: root rank {root} is not in {process_set}.")
    kept_name = _name_of(name)
    try:  # a plain call, not _send: this is the hot path
        handle = call(lib.submit, 1, kind, flags, group, kept_name[0], op, root, float(prescale), float(postscale),
                      0 if splits is None else ctypes.addressof(splits), address, written, kept_shape[0], dtype,
                      len(shape), codec, 0, place)
    except KeyboardInterrupt:
        lib.interrupted()
        raise
    except struct.error:
        raise _not_an_op(op) from None
    except OverflowError:
        raise _not_a_factor(prescale, postscale) from None
    if handle < 0:
        raise lib.error(-handle)
    if place is not None:
        _keep_place(handle, place, flags)
    return handle


def prepare(kind: int, address: int, dtype: int, shape: Sequence[int], name: str, process_set: ProcessSet, op: int,
            prescale: float, postscale: float, codec: int = 0, set_: int = 0,
            place: Optional[lib.Place] = None, flags: int = 0) -> int:
    """A request of one tensor in place, for lib.start, which keeps its stream. set_: of a new_set(), or 0."""
    kept_name, kept_shape = _name_of(name), _shape_of(shape)
    return lib.check(call(lib.prepare, 1, kind, flags, id_of(process_set), kept_name[0], op, 0, prescale, postscale,
                            0, address, address, kept_shape[0], dtype, len(shape), codec, set_, place))


def submit_to_peer(kind: int, adapter: Adapter, tensor: Any, peer: int, tag: int, process_set: ProcessSet) -> int:
    """Submits a send of a tensor in the host's memory, or a receive into it. peer: a rank within the process set. tag:
    of 32 bits, by which both sides match."""
    try:
        address, dtype, shape, place = adapter.describe(tensor)
        sent, written = (address, 0) if kind == lib.SEND else (0, adapter.address(tensor))
    except ValueError as error:
        raise _refused(kind, None, error) from None
    return _send(call, lib.submit, 1, kind, 0, id_of(process_set), 0, 0, peer, 1.0, 1.0, 0, sent, written,
                 _shape_of(shape)[0], dtype, len(shape), 0, 0, place, tag)


class Pack:
    """Several tensors in the form in which the core takes them."""

    def __init__(self, described: Sequence[Tuple], outputs: Optional[Sequence[int]] = None):
        """described: of each tensor what Adapter.describe returns; in the host's memory if it ends without a place.
        outputs: addresses; None for memory of the core."""
        self._shapes = [_shape_of(shape) for _, _, shape, *_ in described]
        self.buffer = RequestBuffer(len(described))
        for index, (address, dtype, shape, *place) in enumerate(described):
            self.buffer.set_tensor(index, address, outputs[index] if outputs else 0, self._shapes[index][0], dtype,
                                   len(shape), *place)


def submit_pack(kind: int, pack: Pack, name: Optional[str], process_set: ProcessSet, flags: int, op: int = 0,
                prescale: float = 1.0, postscale: float = 1.0, codec: int = 0, set_: int = 0) -> int:
    """Submits several tensors as one unit."""
    if op not in _OPS:
        raise _not_an_op(op)
    kept_name = _name_of(name)
    try:
        pack.buffer.set_request(kind, flags, id_of(process_set), kept_name[0], op, 0, float(prescale), float(postscale),
                                codec=codec, set_=set_)
        return _send(lib.submit, pack.buffer.address)
    except struct.error:
        raise _not_an_op(op) from None
    except OverflowError:
        raise _not_a_factor(prescale, postscale) from None


def submit_list(kind: int, tensors: Sequence[Any], outputs: Optional[Sequence[Any]], name: Optional[str],
                process_set: ProcessSet, flags: int, op: int = 0, prescale: float = 1.0, postscale: float = 1.0,
                codec: int = 0) -> int:
    """submit_pack for lists of tensors."""
    if not hasattr(tensors, "__len__"):  # it would be used up by the first that looks through it
        raise TypeError(f"A grouped operation takes a list of tensors, not a {type(tensors).__name__}: give list(...).")
    if not tensors:
        raise ValueError("A grouped operation needs at least one tensor.")
    described: List[Tuple] = []
    addresses: List[int] = []
    answers: List[Any] = described  # those that are being gathered
    try:
        for tensor in tensors:
            described.append(adapter_of(tensor).describe(tensor))
        answers = addresses
        for output in outputs or ():
            addresses.append(adapter_of(output).address(output))
    except ValueError as error:
        raise _refused(kind, name, error, len(answers)) from None
    expect_one_device([place for _, _, _, place in described])
    if kind in _NEED_ROWS and not all(shape for _, _, shape, _ in described):
        raise _scalar(kind, name)
    handle = submit_pack(kind, Pack(described, addresses or None), name, process_set, flags, op, prescale, postscale,
                         codec)
    place = described[0][3]
    if place is not None:
        _keep_place(handle, place, flags)
    return handle


def submit_barrier(process_set: ProcessSet, flags: int = lib.BLOCK, name: Optional[str] = None) -> int:
    """Submits a barrier; BLOCK in flags: the calling thread drives it."""
    kept_name = _name_of(name)
    return _send(call, lib.submit, 0, lib.BARRIER, flags, id_of(process_set), kept_name[0])


before_join: List[Callable[[], None]] = []  # each raises where a join would lose what other ranks send


def check_join() -> None:
    """ValueError where a join would lose what other ranks send."""
    for check in before_join:
        check()


def submit_join() -> int:
    """Submits a join. Errors: those of check_join."""
    check_join()
    return _send(lib.join)


def _keep_place(handle: int, place: lib.Place, flags: int) -> None:
    if handle:  # else it is done, and the stream that the caller works on is still this one
        _places[handle] = place._replace(stream=None) if flags & lib.UNORDERED else place


def place_of(handle: int) -> Optional[lib.Place]:
    """That of a GPU's request that was submitted and not unregistered; None for one of the CPU."""
    return _places.get(handle)


def _send(function: Callable[..., int], *arguments: Any) -> int:
    try:
        return lib.check(function(*arguments))
    except KeyboardInterrupt:
        lib.interrupted()
        raise


_OPS = frozenset(lib.OPS)


def _not_an_op(op: Any) -> Exception:  # all else that may not fit into a field has been looked at
    kind = ValueError if isinstance(op, int) else TypeError
    return kind(f"op={op!r}: give hvd.Average, Sum, Adasum, Min, Max or Product.")


def _not_a_factor(*factors: float) -> ValueError:
    return ValueError(f"a factor is larger than any float: prescale and postscale are {factors}.")


def encoded(name: str) -> bytes:
    """A name as the core takes it. TypeError if it is no str, ValueError if it cannot be a name."""
    try:
        text = name.encode()
    except AttributeError:
        raise TypeError(f"name={name!r}: give a str, or None.") from None
    if b"\0" in text:  # the core would take what stands before it for the name
        raise ValueError(f"name={name!r}: a name has no NUL character in it.")
    return text


def id_of(process_set: ProcessSet) -> int:
    """The id of a process set; ValueError if it has none, TypeError if it is no process set."""
    try:
        group = process_set.process_set_id
    except AttributeError:
        raise TypeError(f"process_set={process_set!r}: give a ProcessSet.") from None
    if group is None:
        raise not_registered(process_set)
    if group.__class__ is not int or group >> 31:
        raise ValueError(f"{process_set}: process_set_id={group!r} is no id of a process set.")
    return group


_NEED_ROWS = {lib.ALLGATHER: "allgather", lib.ALLTOALL: "alltoall", lib.REDUCESCATTER: "reducescatter"}
_OPERATIONS = {lib.ALLREDUCE: "allreduce", lib.BROADCAST: "broadcast", lib.SEND: "send", lib.RECV: "recv", **_NEED_ROWS}


def _refused(kind: int, name: Optional[str], error: ValueError, index: Optional[int] = None) -> ValueError:
    """What an adapter says of a tensor, and of which; index: in a grouped operation."""
    tensor = name or "a tensor" if index is None else f"tensor {index} of {name or 'a group'}"
    return ValueError(f"{_OPERATIONS[kind]} of {tensor}: {error}")


def _scalar(kind: int, name: Optional[str]) -> Exception:
    text = f"{_NEED_ROWS[kind]} of {name or 'a tensor'}: it has no dimension 0; reshape it to [1]."
    return HorovodInternalError(text) if kind == lib.ALLGATHER else ValueError(text)  # as Horovod has it


def _name_of(name: Optional[str]) -> Tuple[int, Any]:
    if name is None:
        return _UNNAMED
    try:
        return _names[name]
    except (KeyError, TypeError):  # new, or nothing that could be a name
        pass
    return _keep(_names, name, array("b", encoded(name) + b"\0"))


def _shape_of(shape: Sequence[int]) -> Tuple[int, Any]:
    key = tuple(shape)
    return _shapes.get(key) or _keep(_shapes, key, array("q", key))


def _keep(kept: Dict[Any, Tuple[int, Any]], key: Any, memory: "array[int]") -> Tuple[int, Any]:
    if len(kept) >= _KEPT:
        kept.clear()
    kept[key] = entry = memory.buffer_info()[0], memory
    return entry


# Results

def complete(handle: int, result: Any, finish: Optional[Callable[[int], Any]] = None) -> Any:
    """Completes a request that was submitted with BLOCK and returns its result; handle: 0 if it is done already."""
    return _result(handle, result, finish) if handle else result


def register(handle: int, keep_alive: Any, result: Any, finish: Optional[Callable[[int], Any]] = None,
             operation: str = "", name: Optional[str] = None) -> int:
    """Puts a request into the table of those in flight: synchronize returns `result` or what finish(handle) returns.

    keep_alive: what the request reads and writes. operation: what an error calls it if the program changes keep_alive,
    a tensor or a list of them, meanwhile; without it nobody looks.
    """
    counts = counts_of(keep_alive) if operation else None
    _pending[handle] = (keep_alive, result, finish, None if counts is None else (operation, name, counts))
    return handle


def _result(handle: int, result: Any, finish: Optional[Callable[[int], Any]]) -> Any:
    if finish is None and handle not in _places:
        lib.finish(handle)
        return result
    try:
        status = lib.wait(handle)
        if status:
            raise lib.failure(status)
        order(handle)
        return result if finish is None else finish(handle)
    finally:
        lib.release(handle)
        _places.pop(handle, None)


def order(handle: int) -> None:
    """Of a finished request of a GPU: what the calling thread gives its stream from now on runs after the outputs are
    written. The stream that was the caller's when the request was submitted needs no order, unless it is UNORDERED."""
    place = _places.get(handle)
    if place is not None:
        now = place.now()
        if now.stream != place.stream:
            lib.order(handle, now)


def adopt(adapter: Adapter, tensor: Any) -> Callable[[int], Any]:
    """The `finish` of a request whose one output is not given: it becomes a new tensor like `tensor`."""
    return lambda handle: adapter.output(handle, 0, tensor)


def adopt_list(tensors: Sequence[Any]) -> Callable[[int], List[Any]]:
    """adopt for several tensors."""
    return lambda handle: [adapter_of(tensor).output(handle, index, tensor) for index, tensor in enumerate(tensors)]


def new_list(tensors: Sequence[Any]) -> List[Any]:
    """Outputs like these tensors."""
    return [adapter_of(tensor).empty_like(tensor) for tensor in tensors]
