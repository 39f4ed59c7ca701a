"""The ctypes mirror of csrc/embedding/table.h, and the only Python module that calls that library.

Constants, structs and functions carry the names of the header without their prefix; a struct's `size` is filled in by
struct(). A status other than 0 becomes an exception in check(): docs/errors.md. Arrays are NumPy's: address().
"""
import ctypes
import time
from ctypes import POINTER, Structure, c_char_p, c_double, c_int, c_int32, c_int64, c_uint32, c_uint64, c_void_p
from functools import partial
from typing import Any, Optional, Type, TypeVar

import numpy

from lightcc.core import lib as core
from lightcc.core.exceptions import HorovodInternalError

INITIALIZERS = ("zeros", "constant", "uniform", "normal")
RULES = ("sgd", "adagrad", "rowwise_adagrad", "lazy_adam", "sparse_adam", "group_adagrad", "group_adam")
MODES = ("sum", "mean", "max")
TRAINING, PREFETCH, AVERAGE, HOLD = 1, 2, 4, 8
SERVED_LOOKUP, SERVED_TRAINING, SERVED_UPDATE, SERVED_APPLY, SERVED_END = range(5)
OF_COMMIT, OF_CHECKPOINT = range(2)  # logs
OF_DELTAS, OF_CHECKPOINTS, TAKE = 1, 2, 4  # readers of changes; flags
MOST_SLOTS = 4
CANDIDATE_PARTS = 64
_S = TypeVar("_S", bound=Structure)


class Options(Structure):
    _fields_ = [("size", c_uint32), ("dtype", c_int32), ("dim", c_int64), ("name", c_char_p), ("init", c_int32),
                ("checked", c_int32), ("a", c_double), ("b", c_double), ("seed", c_uint64), ("wire", c_int32),
                ("reserved", c_int32), ("limit_bytes", c_int64), ("max_rows", c_int64)]


class Rule(Structure):
    _fields_ = [("size", c_uint32), ("kind", c_int32), ("initial", c_double), ("terms", c_int32), ("reserved", c_int32)]


class Stats(Structure):
    _fields_ = [("size", c_uint32), ("slabs", c_int32), ("rows", c_int64), ("steps", c_int64),
                ("record_bytes", c_int64), ("bytes", c_int64), ("index_bytes", c_int64), ("index_growing", c_int64),
                ("candidates", c_int64), ("candidate_bytes", c_int64), ("admitted", c_int64), ("evicted", c_int64),
                ("total_rows", c_int64), ("updates", c_int64)]


class Rows(Structure):
    _fields_ = [("size", c_uint32), ("changed", c_int32), ("capacity", c_int64), ("count", c_int64),
                ("cursor", c_int64), ("taken", c_int64), ("keys", c_void_p), ("checks", c_void_p),
                ("counts", c_void_p), ("lasts", c_void_p), ("weights", c_void_p), ("slots", c_void_p * MOST_SLOTS)]


class Wanted(Structure):
    _fields_ = [("size", c_uint32), ("reserved", c_int32), ("table", c_void_p), ("keys", c_void_p),
                ("checks", c_void_p), ("count", c_int64)]


class Found(Structure):
    _fields_ = [("size", c_uint32), ("plain", c_int32), ("count", c_int64), ("unique", c_int64),
                ("padded", c_int64), ("keys", c_void_p), ("inverse", c_void_p), ("rows", c_void_p)]


class Gradient(Structure):
    _fields_ = [("lookup", c_void_p), ("index", c_int64), ("keys", c_void_p), ("checks", c_void_p), ("count", c_int64),
                ("values", c_void_p)]


class Step(Structure):
    _fields_ = [("size", c_uint32), ("gradient_count", c_int32), ("table", c_void_p),
                ("gradients", POINTER(Gradient)), ("lr", c_double), ("beta1", c_double), ("beta2", c_double),
                ("eps", c_double), ("l1", c_double), ("l2", c_double), ("l21", c_double)]


class Bags(Structure):
    _fields_ = [("size", c_uint32), ("dtype", c_int32), ("dim", c_int64), ("mode", c_int32), ("reserved", c_int32),
                ("count", c_int64), ("bags", c_int64), ("inverse", c_void_p), ("offsets", c_void_p),
                ("weights", c_void_p), ("rows", c_void_p)]


_handle, _out = c_void_p, POINTER(c_void_p)
_FUNCTIONS = {  # name: arguments; all return a status
    "open": [c_int, c_int, c_int, _out],
    "close": [_handle],
    "create": [_handle, POINTER(Options), _out],
    "free": [_handle],
    "attach": [_handle, POINTER(Rule)],
    "slots": [_handle, POINTER(c_int64)],
    "set_admission": [_handle, c_int64, c_double],
    "set_filter": [_handle, c_int64, c_int],
    "set_eviction": [_handle, c_int, c_double, c_double, c_int64],
    "due": [_handle, c_int64, c_void_p, c_void_p, c_void_p, c_void_p, POINTER(c_int64)],
    "answer_due": [_handle, c_void_p, c_int64],
    "evict": [_handle, c_void_p, c_int64],
    "forget_changes": [_handle],
    "forget_gone": [_handle, c_int],
    "changed": [_handle, c_int, POINTER(c_int64)],
    "gone": [_handle, c_int, c_int64, c_void_p, POINTER(c_int64)],
    "export_candidates": [_handle, c_int, c_int, c_int64, c_void_p, c_void_p, POINTER(c_int64)],
    "import_candidates": [_handle, c_void_p, c_void_p, c_int64],
    "export_candidate_log": [_handle, c_int, c_int64, c_int64, c_void_p, c_void_p, POINTER(c_int64)],
    "get_stats": [_handle, POINTER(Stats)],
    "contains": [_handle, c_void_p, c_int64, c_void_p],
    "erase": [_handle, c_void_p, c_int64],
    "read": [_handle, c_void_p, c_void_p, c_int64, c_void_p],
    "first": [_handle, c_void_p, c_int64, c_void_p],
    "clear": [_handle],
    "owners": [_handle, c_void_p],
    "set_owners": [_handle, c_void_p],
    "owner_of": [_handle, c_void_p, c_int64, c_void_p],
    "first_owners": [c_int, c_void_p],
    "move_owners": [c_void_p, c_int, c_void_p, c_int, c_void_p],
    "export": [_handle, POINTER(Rows)],
    "import": [_handle, POINTER(Rows)],
    "begin_log": [_handle, c_int],
    "end_log": [_handle, c_int],
    "go_back": [_handle],
    "logged": [_handle, c_int, c_void_p, c_int64, c_void_p],
    "export_log": [_handle, c_int, POINTER(Rows)],
    "log_stats": [_handle, c_int, POINTER(c_int64), POINTER(c_int64), POINTER(c_int64)],
    "adopt": [_handle, _handle],
    "alphas": [_handle, c_int64, c_int64, c_void_p],
    "set_alphas": [_handle, c_void_p, c_int64],
    "numbers": [_handle, c_void_p],
    "set_numbers": [_handle, c_void_p],
    "finish": [_handle, c_int],
    "release": [_handle],
    "drop": [_handle],
    "lookup": [_handle, POINTER(Wanted), c_int, c_uint32, _out],
    "get_found": [_handle, c_int, POINTER(Found)],
    "update": [_handle, POINTER(Step), c_int, c_uint32, _out],
    "get_sums": [_handle, c_void_p, POINTER(c_int)],
    "apply": [_handle, c_double, c_int],
    "serve": [_handle, c_uint32, _out],
    "get_served": [_handle, POINTER(c_int)],
    "dedup": [c_void_p, c_int64, c_void_p, c_void_p, POINTER(c_int64)],
    "gather": [c_int, c_int64, c_void_p, c_void_p, c_int64, c_void_p],
    "add_by_row": [c_int, c_int64, c_void_p, c_void_p, c_int64, c_void_p],
    "sum_by_row": [c_int, c_int64, c_void_p, c_void_p, c_int64, c_int64, c_void_p],
    "pool": [POINTER(Bags), c_void_p, c_void_p],
    "pool_backward": [POINTER(Bags), c_void_p, c_void_p, c_void_p, c_void_p],
    "hash_strings": [c_char_p, c_void_p, c_int64, c_void_p, c_void_p],
}


def _load() -> ctypes.CDLL:
    path = core.library_beside("_lightcc_embedding.so")
    try:
        library = ctypes.CDLL(path)
    except OSError as error:
        raise ImportError(f"lightcc's library of embeddings could not be loaded: {error}. Reinstall it (pip install "
                          "--force-reinstall lightcc), or in a source tree build it (make).") from error
    for name, arguments in _FUNCTIONS.items():
        function = getattr(library, f"lightcc_embedding_{name}")
        function.restype, function.argtypes = c_int, arguments
    library.lightcc_embedding_error.restype = c_char_p
    return library


_library = _load()


def call(name: str, *arguments: Any) -> None:
    """Calls a function of the header; raises what it failed with.

    >>> import numpy; unique, inverse, count = numpy.empty(3, "i8"), numpy.empty(3, "i8"), c_int64()
    >>> call("dedup", address(numpy.array([7, 5, 7])), 3, address(unique), address(inverse), count)
    >>> unique[:count.value].tolist(), inverse.tolist()
    ([7, 5], [0, 1, 0])
    """
    check(getattr(_library, f"lightcc_embedding_{name}")(*arguments))


def check(status: int) -> None:
    """ValueError for an invalid argument, HorovodInternalError for other failures of this thread's last call."""
    if status == core.OK:
        return
    text = (_library.lightcc_embedding_error() or b"").decode(errors="replace") or f"the library returned {status}"
    if status == core.INVALID_ARGUMENT:
        raise ValueError(text)
    failed = HorovodInternalError(text)
    failed.status = status
    raise failed


def made(name: str, *arguments: Any) -> int:
    """Calls a function whose last argument, which is left out here, is a handle that it sets; returns that."""
    handle = c_void_p()
    call(name, *arguments, ctypes.byref(handle))
    assert handle.value
    return handle.value


class CallHandle(c_void_p):
    """A call of the library, which is released with it, by no function of Python's: core.lib.Memory says why."""

    __del__ = property(partial(partial, _library.lightcc_embedding_release))


def finish(handle: CallHandle) -> None:
    """Waits until a call is done; raises what it failed with. Ctrl-C ends the job on all ranks."""
    check(core.wait(handle, _library.lightcc_embedding_finish))  # type: ignore[arg-type]  # as a handle of the core


def is_done_by(handle: CallHandle, until: float) -> bool:
    """Whether a call is done, or has failed, as finish() says then, at a moment of time.monotonic(), or before."""
    finish_call = _library.lightcc_embedding_finish

    def step(call: CallHandle, timeout_ms: int) -> int:
        status = finish_call(call, timeout_ms)
        return core.TIMEOUT if status == core.PENDING and time.monotonic() >= until else status
    core.wait(handle, step)  # type: ignore[arg-type]  # as finish
    return finish_call(handle, 0) != core.PENDING


def free(handle: int, function: Any = _library.lightcc_embedding_free) -> None:
    """Frees a table; never raises."""
    function(handle)


def close(handle: int, function: Any = _library.lightcc_embedding_close) -> None:
    """Closes a group; never raises."""
    function(handle)


def struct(kind: Type[_S], /, **fields: Any) -> _S:
    """A struct with its size filled in.

    >>> struct(Rule, terms=3).terms, struct(Rule).size == ctypes.sizeof(Rule)
    (3, True)
    """
    return kind(size=ctypes.sizeof(kind), **fields)


def address(array: Optional[numpy.ndarray]) -> Optional[int]:
    """Where a contiguous array is; None for None."""
    if array is None:
        return None
    assert array.flags.c_contiguous
    return array.ctypes.data


class _Memory(ctypes.c_char * (1 << 46)):  # type: ignore[misc]
    """Memory of the library. It claims more bytes than any block has, because ctypes keeps a type for each length."""

    owner: Any = None


def view(where: Optional[int], dtype: Any, count: int, owner: Any) -> numpy.ndarray:
    """An array over `count` values of the library's memory, which keeps the owner alive."""
    if not count or not where:
        return numpy.empty(0, dtype)
    memory = _Memory.from_address(where)
    memory.owner = owner
    return numpy.frombuffer(memory, dtype, count)
