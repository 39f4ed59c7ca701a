"""GPUs for checks where there is none: the double of CUDA (tests/unit/doubles/cuda_double.h) below the core, and arrays
in its memory. It finds accesses without order.

An array is written and read by the stream that is current in the calling thread, as a framework does it, and what it
leaves when it is gone is used again without waiting by the stream it was made on, as caching allocators do it.
"""
import contextlib
import ctypes
import os
import sys
import threading
import types
from ctypes import c_char_p, c_int, c_size_t, c_uint64, c_void_p
from pathlib import Path
from typing import Dict, List, Tuple

import numpy as np

PATH = os.environ.get("LIGHTCC_CUDA_DOUBLE") or str(Path(__file__).parents[2] / "build" / "cmake" / "libcuda_double.so")
DEVICES = 8
_SHOWN = 20_000  # characters of faults

_functions = {
    "allocate": (c_void_p, [c_int, c_size_t]),
    "release": (None, [c_void_p]),
    "create_stream": (c_void_p, [c_int]),
    "record": (c_void_p, [c_int, c_void_p]),
    "wait": (None, [c_int, c_void_p, c_void_p]),
    "forget": (None, [c_int, c_void_p]),
    "fill": (None, [c_int, c_void_p, c_void_p, c_size_t, c_void_p]),
    "read": (None, [c_int, c_void_p, c_void_p, c_void_p, c_size_t]),
    "faults": (c_int, [c_char_p, c_int]),
    "ignore_order": (None, [c_int]),
    "seed": (c_uint64, []),
}


class Double:
    """The double of this process, and the memory and streams that programs use. Streams are numbers, 0 the default one.
    """

    def __init__(self):
        try:
            library = ctypes.CDLL(PATH)
        except OSError as error:
            raise AssertionError(f"The double of CUDA could not be loaded: {error}. Build it (make test builds it; or "
                                 "cmake --build build/cmake --target cuda_double), or say in LIGHTCC_CUDA_DOUBLE where "
                                 "it is.") from error
        for name, (result, arguments) in _functions.items():
            function = getattr(library, "double_" + name)
            function.restype, function.argtypes = result, arguments
            setattr(self, "_" + name, function)
        self._current = threading.local()
        self._unused: Dict[Tuple[int, int, int], List[int]] = {}  # addresses, by device, stream and bytes

    def faults(self) -> List[str]:
        text = ctypes.create_string_buffer(_SHOWN)
        count = self._faults(text, len(text))
        lines = text.value.decode(errors="replace").splitlines()
        return lines + ["(not shown)"] * (count - len(lines))

    def ignore_order(self, ignored: bool) -> None:
        self._ignore_order(ignored)

    def seed(self) -> int:
        return self._seed()

    def new_stream(self, device: int) -> int:
        return self._create_stream(device)

    def stream(self, device: int) -> int:
        """The current one of this thread."""
        return getattr(self._current, "streams", {}).get(device, 0)

    @contextlib.contextmanager
    def on(self, device: int, stream: int):
        """Makes a stream the current one."""
        before = getattr(self._current, "streams", {})
        self._current.streams = {**before, device: stream}
        try:
            yield stream
        finally:
            self._current.streams = before

    def event(self, device: int) -> "Event":
        """An event that is recorded in the current stream."""
        return Event(self, device)

    def write(self, device: int, address: int, values: np.ndarray) -> None:
        self._fill(device, self.stream(device), address, values.nbytes, values.ctypes.data)

    def read(self, device: int, address: int, into: np.ndarray) -> None:
        self._read(device, self.stream(device), address, into.ctypes.data, into.nbytes)

    def take(self, device: int, stream: int, count: int) -> int:
        unused = self._unused.get((device, stream, count))
        return unused.pop() if unused else self._allocate(device, count)

    def give_back(self, device: int, stream: int, count: int, address: int) -> None:
        self._unused.setdefault((device, stream, count), []).append(address)


class Event:
    """A position in a stream, for which others can wait."""

    def __init__(self, double: Double, device: int):
        self._double, self._device = double, device
        self._event = double._record(device, double.stream(device))

    def wait(self) -> None:
        """The current stream waits for it."""
        self._double._wait(self._device, self._double.stream(self._device), self._event)

    def __del__(self):
        self._double._forget(self._device, self._event)


class Memory:
    """Bytes of a device, at `address`."""

    def __init__(self, double: Double, device: int, count: int):
        self.address = 0
        self.double, self.device, self.count = double, device, max(count, 1)
        self._stream = double.stream(device)
        self.kept_for = set()  # streams that may still use it when it is given back
        self.address = double.take(device, self._stream, self.count)
        if not self.address:
            raise ValueError(f"the double has no device {device}")

    def __del__(self):
        for stream in self.kept_for if self.address else ():
            with self.double.on(self.device, stream):
                event = self.double.event(self.device)
            with self.double.on(self.device, self._stream):
                event.wait()
        if self.address:
            self.double.give_back(self.device, self._stream, self.count, self.address)


class Array:
    """What the arrays of both kinds have in common. `form` is a numpy array at the same address: for shape, dtype and
    slices, never for what it holds."""

    def __init__(self, memory: Memory, form: np.ndarray):
        self.memory, self.form = memory, form

    @classmethod
    def new(cls, double: Double, device: int, shape, dtype):
        dtype = np.dtype(dtype)
        memory = Memory(double, device, int(np.prod(shape)) * dtype.itemsize)
        raw = (ctypes.c_char * memory.count).from_address(memory.address)
        return cls(memory, np.ndarray(shape, dtype, raw))

    @classmethod
    def of(cls, double: Double, device: int, values: np.ndarray):
        values = np.asarray(values, order="C")
        array = cls.new(double, device, values.shape, values.dtype)
        double.write(device, array.address, values)
        return array

    shape, dtype = property(lambda self: self.form.shape), property(lambda self: self.form.dtype)
    ndim, nbytes = property(lambda self: self.form.ndim), property(lambda self: self.form.nbytes)
    address = property(lambda self: self.form.ctypes.data)

    def __getitem__(self, key):
        return type(self)(self.memory, self.form[key])

    def reshape(self, *shape):
        return type(self)(self.memory, self.form.reshape(*shape))

    @property
    def T(self):
        return type(self)(self.memory, self.form.T)

    def get(self) -> np.ndarray:
        """A copy in the host's memory, after what the current stream has to do."""
        assert self.form.flags.c_contiguous
        values = np.empty(self.shape, self.dtype)
        self.memory.double.read(self.memory.device, self.address, values)
        return values

    def tolist(self):
        return self.get().tolist()


class StandardArray(Array):
    """One that is found by its interfaces."""

    device = property(lambda self: self.memory.device)

    def __dlpack_device__(self):
        return 2, self.memory.device

    @property
    def __cuda_array_interface__(self):
        form, stream = self.form, self.memory.double.stream(self.memory.device)
        return {"shape": form.shape, "typestr": form.dtype.str, "data": (self.address, not form.flags.writeable),
                "strides": None if form.flags.c_contiguous else form.strides, "version": 3, "stream": stream or 1}

    def __array_namespace__(self):
        def empty(shape, dtype, device):
            return type(self).new(self.memory.double, device, shape, dtype)
        return types.SimpleNamespace(empty=empty, empty_like=lambda x: empty(x.shape, x.dtype, x.device))


class ImmutableArray(StandardArray):
    """One as JAX has them: a program that may read it finds many ways, one that wants to write it none. Arrays that its
    library makes are so, too, and no stream is named."""

    @property
    def __cuda_array_interface__(self):
        interface = super().__cuda_array_interface__
        kept = {key: interface[key] for key in ("shape", "typestr", "strides")}
        return {**kept, "data": (self.address, True), "version": 2}

    def __dlpack__(self, **_):
        raise AssertionError("lightcc has no use for a capsule")

    def __array__(self, *_):
        raise AssertionError("this would be a copy in the host's memory")


class PlainArray(StandardArray):
    """One whose library makes no arrays for others."""

    __array_namespace__ = None


def cupy_module(double: Double) -> types.ModuleType:
    """What lightcc uses of CuPy."""
    current = threading.local()

    class Device:
        def __init__(self, number):
            self.id = number

        def __enter__(self):
            self.before, current.device = getattr(current, "device", 0), self.id

        def __exit__(self, *_):
            current.device = self.before

    class ndarray(Array):  # noqa: N801  CuPy's name
        device = property(lambda self: Device(self.memory.device))
        flags = property(lambda self: self.form.flags)
        data = property(lambda self: types.SimpleNamespace(ptr=self.address))

    def empty(shape, dtype):
        return ndarray.new(double, getattr(current, "device", 0), shape, dtype)

    module = types.ModuleType("cupy")
    module.ndarray, module.empty = ndarray, empty
    module.empty_like = lambda x: empty(x.shape, x.dtype)
    module.array = lambda values, dtype: ndarray.of(double, getattr(current, "device", 0), np.array(values, dtype))
    module.cuda = types.SimpleNamespace(
        Device=Device, get_current_stream=lambda device: types.SimpleNamespace(ptr=double.stream(device)))
    return module


@contextlib.contextmanager
def as_cupy(double: Double):
    """The module is CuPy here."""
    from lightcc.core import adapter
    assert "cupy" not in sys.modules
    module = sys.modules["cupy"] = cupy_module(double)
    try:
        yield module
    finally:
        del sys.modules["cupy"]
        adapter._made.pop("cupy", None)
