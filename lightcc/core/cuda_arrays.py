"""Adapters (core/adapter.py) for arrays in the memory of a GPU: CuPy's, and those of any other library that have
__dlpack_device__ and __cuda_array_interface__.
"""
import functools
from typing import Any, Dict, Optional, Sequence, Tuple

import numpy

from lightcc.core import lib, nccl_library
from lightcc.core.adapter import Described, cuda_place, not_contiguous, output_on_gpu, unsupported

_DLPACK_CUDA = 2  # kDLCUDA
_CODES = {name: code for code, name in enumerate(lib.DTYPES)}


class Cupy:
    """cupy.ndarray. Memory and streams of CuPy belong to the device that is current when they are asked for."""

    def __init__(self, cupy: Any) -> None:
        self.cupy = cupy
        self.type = cupy.ndarray
        self.codes: Dict[Any, int] = {}  # by dtype, as its name takes longer
        nccl_library.load()

    def describe(self, tensor: Any) -> Described:
        code = self.codes.get(tensor.dtype)
        if code is None:
            code = self.codes[tensor.dtype] = _code_of(tensor.dtype)
        if not tensor.flags.c_contiguous:
            raise not_contiguous()
        return tensor.data.ptr, code, tensor.shape, self._place(tensor.device.id)

    def _place(self, device: int) -> lib.Place:
        stream = self.cupy.cuda.get_current_stream(device)
        return cuda_place(device, stream.ptr, functools.partial(self._place, device), stream)

    def address(self, output: Any) -> int:
        return output.data.ptr

    def empty_like(self, tensor: Any) -> Any:
        with tensor.device:
            return self.cupy.empty_like(tensor)

    def output(self, handle: int, index: int, like: Any) -> Any:
        with like.device:
            return output_on_gpu(handle, index, self._place(like.device.id), self.address,
                                 lambda shape: self.cupy.empty(shape, like.dtype))

    def vector(self, values: Sequence[int], like: Any = None) -> Any:
        if not isinstance(like, self.type):
            return numpy.array(values, numpy.int32)
        with like.device:
            return self.cupy.array(values, numpy.int32)


class _Others:
    """Their interface names the stream that orders what they hold (none: the default stream), and what makes new arrays
    is found by the array API standard."""

    def __init__(self) -> None:
        self._immutable: Dict[type, bool] = {}  # by type of what is read-only: whether new arrays are that, too

    def describe(self, tensor: Any) -> Described:
        interface = tensor.__cuda_array_interface__
        if interface["data"][1] and self._is_immutable(tensor):
            raise _immutable(tensor)
        if interface["typestr"].startswith(">"):
            raise unsupported(interface["typestr"])
        shape = tuple(interface["shape"])
        if not _is_contiguous(shape, interface.get("strides"), int(interface["typestr"][2:])):
            raise not_contiguous()
        return interface["data"][0], _code_of(tensor.dtype), shape, self._place(tensor)

    def _place(self, tensor: Any) -> lib.Place:
        nccl_library.load()
        return cuda_place(int(tensor.__dlpack_device__()[1]), tensor.__cuda_array_interface__.get("stream") or 0,
                          functools.partial(self._place, tensor))

    def address(self, output: Any) -> int:
        address, is_read_only = output.__cuda_array_interface__["data"]
        if is_read_only:
            raise ValueError("The array is read-only; an operation in place needs one that is writeable.")
        return address

    def empty_like(self, tensor: Any) -> Any:
        return self._namespace(tensor).empty_like(tensor)

    def output(self, handle: int, index: int, like: Any) -> Any:
        empty = self._namespace(like).empty
        return output_on_gpu(handle, index, self._place(like), self.address,
                             lambda shape: empty(shape, dtype=like.dtype, device=like.device))

    def vector(self, values: Sequence[int], like: Any = None) -> Any:
        return numpy.array(values, numpy.int32)

    def _is_immutable(self, tensor: Any) -> bool:
        """Whether its library makes only arrays that nobody may write, and so no outputs, as JAX does."""
        kind = type(tensor)
        if kind not in self._immutable:
            find = getattr(tensor, "__array_namespace__", None)
            new = None if find is None else find().empty((1,), dtype=tensor.dtype, device=tensor.device)
            self._immutable[kind] = new is not None and bool(new.__cuda_array_interface__["data"][1])
        return self._immutable[kind]

    def _namespace(self, tensor: Any) -> Any:
        find = getattr(tensor, "__array_namespace__", None)
        if find is None:
            raise ValueError(f"lightcc does not know how to make a new {type(tensor).__name__} for the output: use an "
                             "operation in place (allreduce_, broadcast_), or a cupy.ndarray over the same memory.")
        return find()


OTHERS = _Others()


def is_on_gpu(tensor: Any) -> bool:
    """Whether it is an array for OTHERS.

    >>> is_on_gpu(np.ones(1))
    False
    """
    return tensor.__dlpack_device__()[0] == _DLPACK_CUDA and hasattr(tensor, "__cuda_array_interface__")


def _immutable(tensor: Any) -> ValueError:
    kind = type(tensor)
    library = kind.__module__.partition(".")[0]
    return ValueError(f"A {kind.__name__} of {library} is immutable, as is every array that {library} makes: there is "
                      "nothing to write an output into. Send y = torch.from_dlpack(x) or cupy.from_dlpack(x), which is "
                      "the same memory, and take the result back by DLPack (jax.numpy.from_dlpack).")


def _code_of(dtype: Any) -> int:
    code = _CODES.get(getattr(dtype, "name", None) or str(dtype))
    if code is None:
        raise unsupported(dtype)
    return code


def _is_contiguous(shape: Tuple[int, ...], strides: Optional[Sequence[int]], item_bytes: int) -> bool:
    """Whether elements lie side by side in C's order. strides: in bytes; None says that they do."""
    if strides is None or 0 in shape:
        return True
    expected = item_bytes
    for length, stride in zip(reversed(shape), reversed(strides)):
        if length != 1 and stride != expected:
            return False
        expected *= length
    return True
