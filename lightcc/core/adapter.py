"""What a collective must know about a framework's tensors: one small class a framework, found by the tensor's type.

No framework is imported here: if a tensor of it exists, it has been imported already.
"""
import ctypes
import functools
import sys
from typing import Any, Callable, Dict, Optional, Protocol, Sequence, Tuple

from lightcc.core import lib
from lightcc.core.torch_outputs import OutputPool

# Address, dtype code, shape and place of a tensor.
Described = Tuple[int, int, Tuple[int, ...], Optional[lib.Place]]


class Adapter(Protocol):
    """The five questions. A tensor belongs to its framework; an adapter keeps none."""

    def describe(self, tensor: Any) -> Described:
        """Address, dtype code, shape and place of a tensor that can be sent; ValueError for any other. The place is
        None for the host's memory."""

    def address(self, output: Any) -> int:
        """Address of a tensor that is to be written; describe has accepted it or what it was made like."""

    def empty_like(self, tensor: Any) -> Any:
        """A new tensor of the same shape and dtype, on the same device."""

    def output(self, handle: int, index: int, like: Any) -> Any:
        """Output `index` of a finished request that had no output memory: a new tensor of the dtype and on the device
        of `like`."""

    def vector(self, values: Sequence[int], like: Any = None) -> Any:
        """A new one-dimensional int32 tensor, where `like` is."""


def adapter_of(tensor: Any) -> Adapter:
    """The adapter of the tensor's framework; TypeError if there is none.

    >>> import numpy; adapter_of(numpy.zeros(3)).describe(numpy.zeros(3))[2]
    (3,)
    """
    return _by_type.get(type(tensor)) or _find(tensor)


class _Bytes:
    """bytearray: how pickled objects travel."""

    def describe(self, tensor: bytearray) -> Described:
        return self.address(tensor), lib.UINT8, (len(tensor),), None

    def address(self, output: bytearray) -> int:
        return ctypes.addressof(ctypes.c_char.from_buffer(output)) if output else 0

    def empty_like(self, tensor: bytearray) -> bytearray:
        return bytearray(len(tensor))

    def output(self, handle: int, index: int, like: Any) -> bytes:
        memory, shape = lib.output(handle, index)
        return ctypes.string_at(ctypes.addressof(memory), shape[0])

    def vector(self, values: Sequence[int], like: Any = None) -> Any:
        return list(values)


class _Numpy:
    def __init__(self, numpy: Any) -> None:
        self.numpy = numpy
        self.type = numpy.ndarray
        self.codes = {numpy.dtype(name): code for code, name in enumerate(lib.DTYPES) if name != "bfloat16"}

    def empty_like(self, tensor: Any) -> Any:
        if tensor.nbytes >= lib.POOLED_BYTES and type(tensor) is self.type:
            memory = lib.alloc_output(tensor.nbytes)
            if memory is not None:
                return self._over(memory, tensor.shape, tensor)
        return self.numpy.empty_like(tensor)

    def describe(self, tensor: Any) -> Described:
        code = self.codes.get(tensor.dtype)
        if code is None:
            code = self._late_code(tensor.dtype)
        if not tensor.flags.c_contiguous:
            raise not_contiguous()
        return tensor.ctypes.data, code, tensor.shape, None

    def _late_code(self, dtype: Any) -> int:
        if dtype.name != "bfloat16":  # numpy has no bfloat16 of its own; ml_dtypes brings one
            raise unsupported(dtype)
        self.codes[dtype] = lib.BFLOAT16
        return lib.BFLOAT16

    def address(self, output: Any) -> int:
        if not output.flags.writeable:
            raise ValueError("The array is read-only; an operation in place needs one that is writeable.")
        return output.ctypes.data

    def output(self, handle: int, index: int, like: Any) -> Any:
        return self._over(*lib.output(handle, index), like)

    def _over(self, memory: lib.Memory, shape: Tuple[int, ...], like: Any) -> Any:
        count = _count(shape)
        return self.numpy.frombuffer(memory, like.dtype, count).reshape(shape) if count else \
            self.numpy.empty(shape, like.dtype)

    def vector(self, values: Sequence[int], like: Any = None) -> Any:
        return self.numpy.array(values, self.numpy.int32)


class _Torch:
    def __init__(self, torch: Any) -> None:
        self.torch = torch
        self.type = torch.Tensor
        self.codes = {getattr(torch, name): code for code, name in enumerate(lib.DTYPES) if hasattr(torch, name)}
        self.address = torch.Tensor.data_ptr
        self.empty_like = OutputPool(torch).empty_like

    def describe(self, tensor: Any) -> Described:
        code = self.codes.get(tensor.dtype)
        if code is None:
            raise unsupported(tensor.dtype)
        place = None if tensor.is_cpu else self._place(tensor)
        if tensor.layout is not self.torch.strided:
            raise ValueError(f"The tensor has layout {tensor.layout}; send tensor.to_dense().")
        if not tensor.is_contiguous():
            raise not_contiguous()
        if tensor.is_neg():  # z.conj().imag: its memory holds the numbers with the other sign
            raise ValueError("The tensor has PyTorch's negative bit; send tensor.resolve_neg().")
        return tensor.data_ptr(), code, tensor.shape, place

    def _place(self, tensor: Any) -> lib.Place:
        """A tensor needs no record_stream() because of lightcc: it lives until its request is done, and all that writes
        it is before what the stream of the request, and that of synchronize, is given afterwards. So for the caching
        allocator it is used on these two streams only, as the program itself uses it.
        """
        if not tensor.is_cuda:
            raise ValueError(f"The tensor is on {tensor.device}; this version of lightcc works on CPU and CUDA tensors."
                             " Send tensor.cpu().")
        return self._current(tensor.device)

    def _current(self, device: Any) -> lib.Place:
        return cuda_place(device.index, self.torch.cuda.current_stream(device).cuda_stream,
                          functools.partial(self._current, device))

    def output(self, handle: int, index: int, like: Any) -> Any:
        if not like.is_cpu:
            return output_on_gpu(handle, index, self._place(like), self.address, lambda shape: self.torch.empty(
                shape, dtype=like.dtype, device=like.device))
        memory, shape = lib.output(handle, index)
        count = _count(shape)
        return self.torch.frombuffer(memory, dtype=like.dtype, count=count).view(shape) if count else \
            self.torch.empty(shape, dtype=like.dtype, device="cpu")  # whatever the default device is

    def vector(self, values: Sequence[int], like: Any = None) -> Any:
        device = like.device if isinstance(like, self.type) else "cpu"
        return self.torch.tensor(values, dtype=self.torch.int32, device=device)


def cuda_place(device: int, stream: int, now: Callable[[], lib.Place], owner: Any = None) -> lib.Place:
    """A place of CUDA; stream: a cudaStream_t."""
    if stream == _PER_THREAD_STREAM:
        raise ValueError("CUDA's per-thread default stream cannot be the order of an operation, which other threads "
                         "work on; use another stream.")
    return lib.Place(device, lib.CUDA, 0 if stream == _LEGACY_STREAM else stream, now, owner)


_LEGACY_STREAM, _PER_THREAD_STREAM = 1, 2  # cudaStreamLegacy, which is what 0 is to lightcc, and cudaStreamPerThread


def output_on_gpu(handle: int, index: int, place: lib.Place, address: Callable[[Any], int],
                  empty: Callable[[Sequence[int]], Any]) -> Any:
    """Adapter.output for a GPU: the output is written to empty(shape), by the stream of the place."""
    output = empty(lib.output_shape(handle, index))
    lib.output_to(handle, index, place, address(output))
    return output


def _count(shape: Sequence[int]) -> int:
    count = 1
    for length in shape:
        count *= length
    return count


def not_contiguous() -> ValueError:
    return ValueError("Tensor is required to be contiguous.")


class MixedDevicesError(ValueError, RuntimeError):
    """Tensors of one operation, or parameters of one optimizer, are not all on one device. A wrong argument of this
    rank, as any ValueError; Horovod's is a RuntimeError, which programs catch."""


def expect_one_device(places: Sequence[Optional[lib.Place]]) -> None:
    """MixedDevicesError if not all places are on the same device."""
    devices = {None if place is None else place.device for place in places}
    if len(devices) > 1:
        on_gpus = sorted(device for device in devices if device is not None)
        named = ["cpu"] * (None in devices) + [f"cuda:{device}" for device in on_gpus]
        raise MixedDevicesError("The tensors of a grouped operation are not all on one device, but on "
                                f"{', '.join(named)}. Make a group of each device's.")


def unsupported(dtype: Any) -> ValueError:
    return ValueError(f"Tensor type {dtype} is not supported. Supported: {', '.join(lib.DTYPES)}.")


def _cupy(cupy: Any) -> Adapter:
    from lightcc.core import cuda_arrays  # late: it imports this module
    return cuda_arrays.Cupy(cupy)


_frameworks = {"torch": _Torch, "numpy": _Numpy, "cupy": _cupy}
_made: Dict[str, Any] = {}  # framework: its adapter
_by_type: Dict[type, Any] = {bytearray: _Bytes()}


def _find(tensor: Any) -> Adapter:
    adapter: Optional[Any] = None
    for framework, make in _frameworks.items():
        if framework in sys.modules:
            adapter = _made.get(framework) or _made.setdefault(framework, make(sys.modules[framework]))
            if isinstance(tensor, adapter.type):
                _by_type[type(tensor)] = adapter
                return adapter
    if hasattr(type(tensor), "__dlpack_device__"):
        from lightcc.core import cuda_arrays
        if cuda_arrays.is_on_gpu(tensor):
            return cuda_arrays.OTHERS
    raise TypeError(f"A {type(tensor).__name__} cannot be sent: give a torch.Tensor, a numpy.ndarray or a "
                    "cupy.ndarray.")
