"""Requests to the core, one for each call of a framework: submitting them, and the table of those in flight.

A handle is the core's own number. What a request reads and writes is kept alive here until it is done.
"""
import ctypes
from typing import Any, Callable, Dict, Optional, Sequence, Tuple

from lightcc import _core
from lightcc.adapter import adapter_of
from lightcc.common.exceptions import HorovodInternalError
from lightcc.common.process_sets import ProcessSet

# handle: (what must live until it is done, the result, or a function that makes the result)
_pending: Dict[int, Tuple[Any, Any, Optional[Callable[[int], Any]]]] = {}
_shapes: Dict[Tuple[int, ...], Tuple[int, int, Any]] = {}  # shape: (address, dimensions, owner of the address)
_SHAPES_KEPT = 4096


def poll(handle: int) -> bool:
    """Whether the operation of this handle is finished; never blocks. ValueError for an unknown handle.

    A handle is unknown once synchronize has returned its result.

    >>> handle = hvd.allreduce_async(np.ones(3)); hvd.poll(handle) in (True, False)
    True
    """
    try:
        if handle >> 63 == 0:  # else ctypes would cut it to 64 bits
            return _core.poll(handle)
    except (TypeError, ctypes.ArgumentError):
        pass
    raise ValueError(f"unknown handle {handle!r}")


def synchronize(handle: int):
    """Waits for a handle of an ..._async operation and returns its output; for a list of tensors a list.

    Returns None for a handle that is unknown, was synchronized before or ended with shutdown(). Until then a handle
    keeps alive what its operation reads and writes.
    Ctrl-C while waiting ends the job on all ranks.

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
    return result


def unregister(handle: int) -> bool:
    """Undoes register; False if synchronize has done so before. The handle still must be released."""
    return _pending.pop(handle, None) is not None


def release_all() -> None:
    """At the end of the epoch, which ends every operation: releases the handles that were not synchronized."""
    for handle in _pending:
        _core.release(handle)
    _pending.clear()


# Submitting

def submit(kind, adapter, tensor, output, name, process_set, flags, op=0, prescale=1.0, postscale=1.0, root=0,
           splits=None, rows=None) -> int:
    """Submits one tensor. output: a tensor, or None for memory of the core. rows: how much of dimension 0 is sent."""
    address, dtype, shape = adapter.describe(tensor)
    if not shape and kind in _NEED_ROWS:
        raise _scalar(kind, name)
    if rows is not None and rows != shape[0]:
        shape = (rows, *shape[1:])
    packed = _shapes.get(shape) or _pack_shape(shape)
    group = id_of(process_set)
    if op not in _OPS:
        raise _not_an_op(op)
    if root >> 31 not in (0, -1):  # ctypes would cut it to 32 bits, and another rank be meant
        raise ValueError(f"broadcast of {name or 'a tensor'}: root rank {root} is not in {process_set}.")
    try:  # a plain call, not _send: this is the hot path
        handle = _core.submit(kind, None if name is None else encoded(name), group, address,
                              None if output is None else adapter.address(output), dtype, packed[1], packed[0], op,
                              root, float(prescale), float(postscale), splits, flags)
    except KeyboardInterrupt:
        _core.interrupted()
        raise
    except ctypes.ArgumentError:
        raise _not_an_op(op) from None
    except OverflowError:
        raise _not_a_factor(prescale, postscale) from None
    if handle < 0:
        raise _core.error(-handle)
    return handle


class Pack:
    """Several tensors in the form in which the core takes them."""

    def __init__(self, described: Sequence[Tuple[int, int, Sequence[int]]]):
        count = len(described)
        dimensions = [length for _, _, shape in described for length in shape]
        self.count = count
        self.addresses = (ctypes.c_void_p * count)(*[address for address, _, _ in described])
        self.dtypes = (ctypes.c_int32 * count)(*[dtype for _, dtype, _ in described])
        self.ndims = (ctypes.c_int32 * count)(*[len(shape) for _, _, shape in described])
        self.shapes = (ctypes.c_int64 * max(len(dimensions), 1))(*dimensions)


def submit_pack(kind: int, pack: Pack, outputs, name: Optional[str], process_set: ProcessSet, flags: int, op: int = 0,
                prescale: float = 1.0, postscale: float = 1.0) -> int:
    """Submits several tensors as one unit; outputs: an array of addresses, or None for memory of the core."""
    if op not in _OPS:
        raise _not_an_op(op)
    try:
        return _send(_core.submit_group, kind, None if name is None else encoded(name), id_of(process_set),
                     pack.count, pack.addresses, outputs, pack.dtypes, pack.ndims, pack.shapes, op, 0, float(prescale),
                     float(postscale), None, flags, None)
    except ctypes.ArgumentError:
        raise _not_an_op(op) from None
    except OverflowError:
        raise _not_a_factor(prescale, postscale) from None


def submit_list(kind, tensors, outputs, name, process_set, flags, op=0, prescale=1.0, postscale=1.0) -> int:
    """submit_pack for lists of tensors."""
    if not tensors:
        raise ValueError("A grouped operation needs at least one tensor.")
    described = [adapter_of(tensor).describe(tensor) for tensor in tensors]
    if kind in _NEED_ROWS and not all(shape for _, _, shape in described):
        raise _scalar(kind, name)
    addresses = None
    if outputs is not None:
        addresses = (ctypes.c_void_p * len(outputs))(*[adapter_of(output).address(output) for output in outputs])
    return submit_pack(kind, Pack(described), addresses, name, process_set, flags, op, prescale, postscale)


def submit_barrier(process_set: ProcessSet, flags: int = _core.BLOCK, name: Optional[str] = None) -> int:
    """Submits a barrier; BLOCK in flags: the calling thread drives it."""
    return _send(_core.submit, _core.BARRIER, None if name is None else encoded(name), id_of(process_set), None,
                 None, 0, 0, None, 0, 0, 1.0, 1.0, None, flags)


def submit_join() -> int:
    """Submits a join."""
    return _send(_core.join)


def _send(function, *arguments) -> int:
    try:
        return _core.check(function(*arguments))
    except KeyboardInterrupt:
        _core.interrupted()
        raise


_OPS = frozenset(range(6))


def _not_an_op(op) -> Exception:  # all else that ctypes could refuse has been looked at
    kind = ValueError if isinstance(op, int) else TypeError
    return kind(f"op={op!r}: give hvd.Average, Sum, Adasum, Min, Max or Product.")


def _not_a_factor(*factors) -> ValueError:
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
        raise ValueError(f"{process_set} is not registered; use hvd.add_process_set or hvd.init(process_sets=...).")
    if group.__class__ is not int or group >> 31:
        raise ValueError(f"{process_set}: process_set_id={group!r} is no id of a process set.")
    return group


_NEED_ROWS = {_core.ALLGATHER: "allgather", _core.ALLTOALL: "alltoall", _core.REDUCESCATTER: "reducescatter"}


def _scalar(kind: int, name: Optional[str]) -> Exception:
    text = f"{_NEED_ROWS[kind]} of {name or 'a tensor'}: it has no dimension 0; reshape it to [1]."
    return HorovodInternalError(text) if kind == _core.ALLGATHER else ValueError(text)  # as Horovod has it


def _pack_shape(shape: Sequence[int]) -> Tuple[int, int, Any]:
    array = (ctypes.c_int64 * max(len(shape), 1))(*shape)
    packed = ctypes.addressof(array), len(shape), array
    if len(_shapes) >= _SHAPES_KEPT:
        _shapes.clear()
    _shapes[tuple(shape)] = packed
    return packed


# Results

def complete(handle: int, result, finish=None):
    """Completes a request that was submitted with BLOCK and returns its result; handle: 0 if it is done already."""
    return _result(handle, result, finish) if handle else result


def register(handle: int, keep_alive, result, finish=None) -> int:
    """Puts a request into the table of those in flight: synchronize returns `result` or what finish(handle) returns.

    keep_alive: what the request reads and writes.
    """
    _pending[handle] = (keep_alive, result, finish)
    return handle


def _result(handle: int, result, finish):
    if finish is None:
        _core.finish(handle)
        return result
    try:
        status = _core.wait(handle)
        if status:
            raise _core.failure(status)
        return finish(handle)
    finally:
        _core.release(handle)


def adopt(adapter, tensor):
    """The `finish` of a request whose one output is the core's; the output gets the dtype of `tensor`."""
    return lambda handle: adapter.adopt(*_core.output(handle, 0), tensor)


def adopt_list(tensors):
    """adopt for several tensors."""
    return lambda handle: [adapter_of(tensor).adopt(*_core.output(handle, index), tensor)
                           for index, tensor in enumerate(tensors)]


def new_list(tensors):
    """Outputs like these tensors."""
    return [adapter_of(tensor).empty_like(tensor) for tensor in tensors]
