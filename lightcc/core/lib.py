"""The ctypes mirror of csrc/api/lightcc.h, and the only Python module that calls the library.

Constants and functions carry the names of the header without their prefix. A status other than 0 becomes an exception
here: docs/errors.md. The functions that are bound below without a `def` return what the library does.
"""
import ctypes
import os
from array import array
from ctypes import POINTER, Structure, byref, c_char_p, c_double, c_int, c_int32, c_int64, c_uint32, c_void_p, sizeof
from functools import partial
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Sequence, Tuple

from lightcc.core.exceptions import HorovodInternalError

OK, PENDING, INVALID_ARGUMENT, MISMATCH, PEER_LOST, SHUT_DOWN, TIMEOUT, INTERNAL = range(8)
UINT8, INT8, UINT16, INT16, INT32, INT64, FLOAT16, FLOAT32, FLOAT64, BOOL, BFLOAT16, UINT32, UINT64 = range(13)
OPS = AVERAGE, SUM, ADASUM, MIN, MAX, PRODUCT = range(6)
ALLREDUCE, ALLGATHER, BROADCAST, ALLTOALL, REDUCESCATTER, BARRIER, SEND, RECV = range(8)
CODEC_NONE, CODEC_TOPK, CODEC_INT8, CODEC_INT4 = range(4)
CUDA = 1
BLOCK, PADDED, UNORDERED = 1, 2, 4  # flags of requests
INFO, WARNING = 2, 3  # levels of the log
POOLED_BYTES = 1 << 20
DTYPES = ("uint8", "int8", "uint16", "int16", "int32", "int64", "float16", "float32", "float64", "bool", "bfloat16",
          "uint32", "uint64")

_WAIT_MS = 100  # how long a wait may stay in C: Python handles Ctrl-C only between two calls
_MAX_DIMENSIONS = 64


class _Place(Structure):
    _fields_ = [("device", c_int32), ("kind", c_int32), ("stream", c_void_p)]


class _Codec(Structure):
    _fields_ = [("size", c_uint32), ("kind", c_int32), ("width", c_int32), ("warmup_steps", c_int32),
                ("ratio", c_double), ("momentum", c_double), ("name", c_char_p)]


class _Residual(Structure):
    _fields_ = [("size", c_uint32), ("codec", c_int32), ("group", c_int32), ("tensor", c_int32), ("part", c_int32),
                ("node", c_int32), ("name", c_char_p), ("elements", c_int64), ("steps", c_int64), ("first", c_int64),
                ("count", c_int64), ("values", c_void_p)]


class Cluster(Structure):
    """lightcc_cluster of api/lightcc.h."""
    _fields_ = [("size", c_uint32), ("host_count", c_int32), ("hosts", POINTER(c_int32)),
                ("local_latency_s", c_double), ("memory_bytes_per_s", c_double), ("latency_s", c_double),
                ("message_s", c_double), ("nic_bytes_per_s", c_double), ("flow_bytes_per_s", c_double),
                ("oversubscription", c_double), ("nics", c_int32), ("half_duplex", c_int32), ("pod_hosts", c_int32),
                ("simulated", c_int32), ("compressed_share", c_double)]


_functions = {  # name: (result, arguments)
    "init": (c_int, []),
    "init_ranks": (c_int, [POINTER(c_int32), c_int]),
    "open_meeting": (c_int, [c_char_p, c_int]),
    "init_at": (c_int, [c_int, c_int, c_char_p, c_char_p, c_char_p]),
    "cancel_init": (c_int, [c_char_p, c_char_p]),
    "shutdown": (c_int, []),
    "shutdown_because": (c_int, [c_char_p]),
    "name_init": (None, [c_char_p]),
    "initialized": (c_int, []),
    "version": (c_char_p, []),
    "error": (c_char_p, []),
    "abort": (c_int, [c_char_p]),
    "rank": (c_int, []),
    "size": (c_int, []),
    "local_rank": (c_int, []),
    "local_size": (c_int, []),
    "cross_rank": (c_int, []),
    "cross_size": (c_int, []),
    "is_homogeneous": (c_int, []),
    "add_group": (c_int, [POINTER(c_int32), c_int]),
    "remove_group": (c_int, [c_int]),
    "group_size": (c_int, [c_int]),
    "group_rank": (c_int, [c_int]),
    "group_ranks": (c_int, [c_int, POINTER(c_int32)]),
    "group_ids": (c_int, [POINTER(c_int32), c_int]),
    "submit": (c_int64, [c_void_p]),
    "prepare": (c_int64, [c_void_p]),
    "start": (c_int64, [c_int64]),
    "discard": (c_int, [c_int64]),
    "start_all": (c_int, [c_void_p, c_int, c_void_p]),
    "fill_all": (c_int, [c_void_p, c_void_p, c_int]),
    "join": (c_int64, []),
    "last_joined": (c_int, [c_int64]),
    "wait": (c_int, [c_int64, c_int]),
    "poll": (c_int, [c_int64]),
    "release": (c_int, [c_int64]),
    "finish": (c_int, [c_int64, c_int]),
    "finish_all": (c_int, [c_void_p, c_int, c_int]),
    "output": (c_int, [c_int64, c_int, POINTER(c_void_p), POINTER(c_int64), POINTER(c_int)]),
    "output_shape": (c_int, [c_int64, c_int, POINTER(c_int64), POINTER(c_int)]),
    "output_to": (c_int, [c_int64, c_int, POINTER(_Place), c_void_p]),
    "order": (c_int, [c_int64, POINTER(_Place)]),
    "received_splits": (c_int, [c_int64, c_int, POINTER(c_int32)]),
    "alloc": (c_void_p, [c_int64]),
    "free": (None, [c_void_p]),
    "alloc_output": (c_void_p, [c_int64]),
    "output_pool": (c_int, [POINTER(c_int64), POINTER(c_double)]),
    "timeline_start": (c_int, [c_char_p, c_int]),
    "timeline_stop": (c_int, []),
    "register_codec": (c_int, [POINTER(_Codec)]),
    "release_codec": (c_int, [c_int]),
    "codec_state": (c_char_p, [c_int]),
    "read_residual": (c_int, [POINTER(_Residual)]),
    "write_residual": (c_int, [POINTER(_Residual)]),
    "counters": (c_int, [POINTER(c_int64), c_int]),
    "counter_name": (c_char_p, [c_int]),
    "waited": (c_int, [POINTER(c_int64), c_int]),
    "report": (c_int, [c_char_p]),
    "reported": (c_char_p, [c_int]),
    "log": (None, [c_int, c_char_p]),
    "describe": (c_char_p, [c_char_p]),
    "explain": (c_char_p, [c_void_p, c_int64]),
}


_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_PATH = os.environ.get("LIGHTCC_LIBRARY") or os.path.join(_PACKAGE, "_lightcc.so")


def _load() -> ctypes.CDLL:
    try:
        library = ctypes.CDLL(_PATH)
    except OSError as error:
        home = os.path.dirname(_PACKAGE)
        if os.path.exists(os.path.join(home, "csrc")) and not os.path.exists(_PATH):
            raise ImportError(
                f"you are in lightcc's source folder: Python has found {home}/lightcc, which has no library, before "
                "the installed package. Run from elsewhere, with the script in another folder (python looks in the "
                "script's own folder first, and python -c and -m in the one you are in); if lightcc is not installed "
                f"yet: pip install {home}") from error
        raise ImportError(f"lightcc's library could not be loaded: {error}. Reinstall it (pip install "
                          "--force-reinstall lightcc), or in a source tree build it (make).") from error
    for name, (result, arguments) in _functions.items():
        function = getattr(library, "lightcc_" + name)
        function.restype, function.argtypes = result, arguments
    return library


_library = _load()
submit, prepare = _library.lightcc_submit, _library.lightcc_prepare
start = _library.lightcc_start
release = _library.lightcc_release
discard = _library.lightcc_discard
release_codec = _library.lightcc_release_codec
rank, size = _library.lightcc_rank, _library.lightcc_size
local_rank, local_size = _library.lightcc_local_rank, _library.lightcc_local_size
cross_rank, cross_size = _library.lightcc_cross_rank, _library.lightcc_cross_size
is_homogeneous = _library.lightcc_is_homogeneous
group_size, group_rank = _library.lightcc_group_size, _library.lightcc_group_rank
_wait, _finish, _poll = _library.lightcc_wait, _library.lightcc_finish, _library.lightcc_poll

epoch = 0  # counts successful init calls: what was made in one epoch must not be used in another
joins = 0  # counts joins that are over: what active ranks agreed on meanwhile, those that had joined do not know


# Called when the epoch has ended, once or more often. Operations that failed may have left anything in their outputs,
# so memory that is kept for outputs must not be used again; and what was made in that epoch must be made anew.
after_epoch: List[Callable[[], None]] = []


def _epoch_has_ended() -> None:
    for tell in after_epoch:
        tell()


def error(status: int) -> Exception:
    """The exception for a status that this thread has just received from a call."""
    failed = failure(status)
    return ValueError(*failed.args) if status == INVALID_ARGUMENT else failed


def failure(status: int) -> HorovodInternalError:
    """The exception for the status of a request that had been accepted: no argument of the caller's was wrong."""
    text = (_library.lightcc_error() or b"").decode(errors="replace") or f"the library returned status {status}"
    if status not in (INVALID_ARGUMENT, MISMATCH):
        _epoch_has_ended()
    failed = HorovodInternalError(text)
    failed.status = status
    return failed


def check(result: int) -> int:
    """Returns a handle, an id or a count; raises for minus a status."""
    if result < 0:
        raise error(-result)
    return result


def _check_status(status: int) -> None:
    if status != OK:
        raise error(status)


def _text(text: str) -> bytes:
    return text.encode(errors="replace").replace(b"\0", b"?")


def _ranks(ranks: Sequence[int]) -> "ctypes.Array[c_int32]":
    for one in ranks:
        if not -1 << 31 <= one < 1 << 31:  # ctypes would cut it to 32 bits, and another rank be meant
            raise ValueError(f"{one} is no rank of the job.")
    return (c_int32 * len(ranks))(*ranks)


def init(ranks: Sequence[int] = ()) -> None:
    """ranks: those of the job that form the world; none means all."""
    global epoch
    if initialized():
        return
    _check_status(_library.lightcc_init_ranks(_ranks(ranks), len(ranks)) if ranks
                  else _library.lightcc_init())
    epoch += 1


def open_meeting() -> str:
    where = ctypes.create_string_buffer(4096)
    _check_status(_library.lightcc_open_meeting(where, len(where)))
    return where.value.decode()


def init_at(rank: int, size: int, job: str, secret: str, where: str) -> None:
    global epoch
    _check_status(_library.lightcc_init_at(rank, size, _text(job), _text(secret), _text(where)))
    epoch += 1


def cancel_init(job: str, cause: str) -> None:
    """The init_at of this job in another thread, under way or yet to come, raises HorovodInternalError with the cause
    at once. Does nothing to a world that has formed."""
    _check_status(_library.lightcc_cancel_init(_text(job), _text(cause)))


def shutdown(reason: str = "it shut down") -> None:
    """reason: is told to the other ranks, in their errors."""
    _epoch_has_ended()
    _check_status(_library.lightcc_shutdown_because(_text(reason)))


def name_package(name: str) -> None:
    """Errors advise to call init() of this package, that of the user's choice."""
    _library.lightcc_name_init(f"{name}.init()".encode())


def not_initialised() -> ValueError:
    """The error of a query before init; its text is that of collectives."""
    group_size(0)
    return ValueError((_library.lightcc_error() or b"").decode())


def initialized() -> bool:
    return _library.lightcc_initialized() == 1


def epoch_status() -> int:
    """OK, or what the world has ended with, as PEER_LOST."""
    address = _library.lightcc_alloc(1)
    if address:
        _library.lightcc_free(address)
        return OK
    try:
        add_group([rank()])  # refused at once: nothing can be sent any more
    except HorovodInternalError as over:
        return over.status
    return OK


def version() -> str:
    return _library.lightcc_version().decode()


def abort(cause: str) -> None:
    """Ends the epoch on every rank; what they are told is the cause."""
    _epoch_has_ended()
    _library.lightcc_abort(_text(cause))


def interrupted() -> None:
    """Ends the job on every rank: a collective that one rank has left can never finish."""
    abort(f"KeyboardInterrupt on rank {rank()}")


def wait(handle: int, step: Callable[[int, int], int] = _wait) -> int:
    """Waits until the request is done and returns its status; Ctrl-C ends the job on all ranks."""
    try:
        status = step(handle, _WAIT_MS)
        while status == PENDING:
            status = step(handle, _WAIT_MS)
    except KeyboardInterrupt:
        interrupted()
        raise
    return status


def finish(handle: int) -> None:
    """wait, then release; raises what the request failed with."""
    status = wait(handle, _finish)
    if status:
        raise failure(status)


def start_all(prepared: "array[int]", handles: "array[int]") -> None:
    """Starts prepared requests and appends their handles; raises if one cannot be started, which has none then."""
    begun = array("q", bytes(8 * len(prepared)))
    (address, count), (begun_address, _) = prepared.buffer_info(), begun.buffer_info()
    status = _library.lightcc_start_all(address, count, begun_address)
    if status:
        handles.extend(handle for handle in begun if handle)
        raise error(status)
    handles.extend(begun)


def fill_all(prepared: "array[int]", sources: "array[int]") -> None:
    """Copies into the tensors of prepared requests, on a GPU in the order of their stream.

    sources: for each an address on its device, where all bytes of its tensor are.
    """
    (address, count), (sources_address, _) = prepared.buffer_info(), sources.buffer_info()
    _check_status(_library.lightcc_fill_all(address, sources_address, count))


def finish_all(handles: "array[int]") -> None:
    """finish for many: raises what the first of them failed with, when all are done."""
    address, count = handles.buffer_info()
    status = wait(address, lambda address, timeout_ms: _library.lightcc_finish_all(address, count, timeout_ms))
    if status:
        raise failure(status)


def poll(handle: int) -> bool:
    return check(_poll(handle)) == 1


def join() -> int:
    return check(_library.lightcc_join())


def last_joined(handle: int) -> int:
    global joins
    joins += 1
    return check(_library.lightcc_last_joined(handle))


def add_group(ranks: Sequence[int]) -> int:
    return check(_library.lightcc_add_group(_ranks(ranks), len(ranks)))


def remove_group(group: int) -> None:
    _check_status(_library.lightcc_remove_group(group))


def group_ranks(group: int) -> Optional[List[int]]:
    count = group_size(group)
    if count < 0:
        return None
    ranks = (c_int32 * count)()
    _check_status(_library.lightcc_group_ranks(group, ranks))
    return list(ranks)


def group_ids() -> List[int]:
    count = _library.lightcc_group_ids(None, 0)
    ids = (c_int32 * max(count, 1))()
    _library.lightcc_group_ids(ids, count)
    return list(ids)[:count]


def received_splits(handle: int, index: int, group: int) -> List[int]:
    splits = (c_int32 * group_size(group))()
    _check_status(_library.lightcc_received_splits(handle, index, splits))
    return list(splits)


class Place(NamedTuple):
    """Where the memory of a tensor is that is not the host's: lightcc_place of api/lightcc.h, and what keeps it valid.
    """

    device: int
    kind: int
    stream: Optional[int]
    now: Callable[[], "Place"]  # the same with the stream that the calling thread works on now
    owner: Any = None           # what keeps the stream alive, if something must


_MostBytes: Any = ctypes.c_char * (1 << 46)


class Memory(_MostBytes):
    """Memory of the core, given back when the last tensor that views it is gone.

    Its one type claims more bytes than any block has, because ctypes keeps a type for each length forever; a view
    says its own length (numpy.frombuffer and torch.frombuffer take a count and an offset).
    """

    # partial(free, self)(), with no function of Python's on the way: in one, a Ctrl-C would be raised here, where
    # Python drops every exception, and the program would go on as if nobody had pressed it.
    __del__ = property(partial(partial, _library.lightcc_free))


def alloc(count: int) -> Memory:
    """`count` zeroed bytes that the ranks of this host share."""
    address = _library.lightcc_alloc(count)
    if not address:
        raise error(INTERNAL)
    return Memory.from_address(address)


def alloc_output(count: int) -> Optional[Memory]:
    """`count` bytes for a new output, from what earlier ones have left; None: the caller allocates."""
    address = _library.lightcc_alloc_output(count)
    return Memory.from_address(address) if address else None


def output_pool() -> Tuple[int, float]:
    """The most bytes of memory that is kept for outputs, and the seconds it is kept without use."""
    most_bytes, idle_s = c_int64(), c_double()
    _check_status(_library.lightcc_output_pool(byref(most_bytes), byref(idle_s)))
    return most_bytes.value, idle_s.value


def output(handle: int, index: int) -> Tuple[Memory, Tuple[int, ...]]:
    """The memory and shape of an output that the core allocated."""
    data, shape, ndim = c_void_p(), (c_int64 * _MAX_DIMENSIONS)(), c_int(_MAX_DIMENSIONS)
    _check_status(_library.lightcc_output(handle, index, byref(data), shape, byref(ndim)))
    return Memory.from_address(data.value or 0), tuple(shape[:ndim.value])


def output_shape(handle: int, index: int) -> Tuple[int, ...]:
    """The shape of an output of a GPU's request, which the caller then allocates."""
    shape, ndim = (c_int64 * _MAX_DIMENSIONS)(), c_int(_MAX_DIMENSIONS)
    _check_status(_library.lightcc_output_shape(handle, index, shape, byref(ndim)))
    return tuple(shape[:ndim.value])


def output_to(handle: int, index: int, place: Place, address: int) -> None:
    """Has that output written to this address, by the stream of the place."""
    _check_status(_library.lightcc_output_to(handle, index, byref(_Place(*place[:3])), address))


def order(handle: int, place: Place) -> None:
    """What the stream of the place is given from now on runs after the outputs of this GPU's request are written."""
    _check_status(_library.lightcc_order(handle, byref(_Place(*place[:3]))))


def library_beside(file: str) -> str:
    """The path of another library of lightcc, which is in the core's folder."""
    return os.path.join(os.path.dirname(_PATH), file)


def tensorflow_library() -> str:
    """The path of the library of operations for TensorFlow."""
    return library_beside("_lightcc_tensorflow.so")


def missing_in_tensorflow() -> Optional[str]:
    """What the operations' library, loaded by TensorFlow before, did not find there; None: nothing."""
    missing = ctypes.CDLL(tensorflow_library()).lightcc_tensorflow_missing
    missing.restype = c_char_p
    name = missing()
    return name and name.decode()


def start_timeline(path: bytes, mark_cycles: bool) -> None:
    if b"\0" in path:
        raise ValueError(f"start_timeline: the path {path!r} has a NUL character in it.")
    _check_status(_library.lightcc_timeline_start(path, mark_cycles))


def stop_timeline() -> None:
    _check_status(_library.lightcc_timeline_stop())


def register_codec(kind: int, width: int, warmup_steps: int, ratio: float, momentum: float,
                   name: Optional[str] = None) -> int:
    """name: of one that may be registered already, which then is meant; None: a new one."""
    codec = _Codec(sizeof(_Codec), kind, width, warmup_steps, ratio, momentum, name and name.encode())
    return check(_library.lightcc_register_codec(byref(codec)))


def codec_state(codec: int) -> str:
    """JSON: csrc/api/lightcc.h."""
    state = _library.lightcc_codec_state(codec)
    if state is None:
        raise error(INVALID_ARGUMENT)
    return state.decode(errors="replace")


def copy_residual(to_core: bool, values: int, name: str, **fields: int) -> None:
    """A part of what was left behind, to or from the address `values`; fields: those of lightcc_residual."""
    residual = _Residual(size=sizeof(_Residual), values=values, name=name.encode(), **fields)
    function = _library.lightcc_write_residual if to_core else _library.lightcc_read_residual
    _check_status(function(byref(residual)))


def counters() -> Dict[str, int]:
    """What this process has done since init: bytes, collectives, waits, by name."""
    count = _library.lightcc_counters(None, 0)
    values = (c_int64 * max(count, 1))()
    _library.lightcc_counters(values, count)
    return {_library.lightcc_counter_name(i).decode(): values[i] for i in range(count)}


def waited() -> List[int]:
    """Nanoseconds, by rank, that all others waited for it alone; on rank 0, zeros elsewhere. [] before init."""
    values = (c_int64 * max(size(), 1))()
    count = _library.lightcc_waited(values, len(values))
    return list(values)[:max(count, 0)]


def report(text: str) -> None:
    """Tells rank 0, which keeps the last text of each rank. Does nothing without an epoch."""
    _library.lightcc_report(_text(text))


def reported(rank: int) -> str:
    """On rank 0, what a rank has reported last; "": nothing yet."""
    return (_library.lightcc_reported(rank) or b"").decode(errors="replace")


def log(level: int, text: str) -> None:
    """A line of the core's log. level: INFO or WARNING."""
    _library.lightcc_log(level, _text(text))


def explain(cluster: Cluster, nbytes: int) -> str:
    """JSON: what the cost model says of an all-reduce of so many bytes."""
    cluster.size = sizeof(Cluster)
    text = _library.lightcc_explain(byref(cluster), nbytes)
    if text is None:
        raise error(INVALID_ARGUMENT)
    return text.decode()


def describe(what: str) -> str:
    """The core's own account of "selector", "network", "knobs", "world", "fusion_plan", or, before init too, "gpus"."""
    return (_library.lightcc_describe(what.encode()) or b"").decode()
