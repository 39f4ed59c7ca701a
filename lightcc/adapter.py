"""What a collective must know about a framework's tensors: one small class a framework, found by the tensor's type.

No framework is imported here: if a tensor of it exists, it has been imported already.
"""
import ctypes
import sys
from typing import Any, Dict, Optional, Protocol, Sequence, Tuple

from lightcc import _core
from lightcc._torch_outputs import OutputPool


class Adapter(Protocol):
    """The five questions. A tensor belongs to its framework; an adapter keeps none."""

    def describe(self, tensor) -> Tuple[int, int, Tuple[int, ...]]:
        """Address, dtype code and shape of a tensor that can be sent; ValueError for any other."""

    def address(self, output) -> int:
        """Address of a tensor that is to be written; describe has accepted it or what it was made like."""

    def empty_like(self, tensor):
        """A new tensor of the same shape and dtype."""

    def adopt(self, memory: _core.Memory, shape: Sequence[int], like):
        """A tensor over memory of the core, which it keeps alive, with the dtype of `like`."""

    def vector(self, values: Sequence[int], like=None):
        """A new one-dimensional int32 tensor, where `like` is."""


def adapter_of(tensor) -> Adapter:
    """The adapter of the tensor's framework; TypeError if there is none.

    >>> import numpy; adapter_of(numpy.zeros(3)).describe(numpy.zeros(3))[2]
    (3,)
    """
    return _by_type.get(type(tensor)) or _find(tensor)


class _Bytes:
    """bytearray: how pickled objects travel."""

    def describe(self, tensor: bytearray):
        return self.address(tensor), _core.UINT8, (len(tensor),)

    def address(self, output: bytearray) -> int:
        return ctypes.addressof(ctypes.c_char.from_buffer(output))

    def empty_like(self, tensor: bytearray) -> bytearray:
        return bytearray(len(tensor))

    def adopt(self, memory, shape, like) -> bytes:
        return ctypes.string_at(ctypes.addressof(memory), shape[0])

    def vector(self, values, like=None):
        return list(values)


class _Numpy:
    def __init__(self, numpy):
        self.numpy = numpy
        self.type = numpy.ndarray
        self.codes = {numpy.dtype(name): code for code, name in enumerate(_core.DTYPES) if name != "bfloat16"}

    def empty_like(self, tensor):
        if tensor.nbytes >= _core.POOLED_BYTES and type(tensor) is self.type:
            memory = _core.alloc_output(tensor.nbytes)
            if memory is not None:
                return self.adopt(memory, tensor.shape, tensor)
        return self.numpy.empty_like(tensor)

    def describe(self, tensor):
        code = self.codes.get(tensor.dtype)
        if code is None:
            code = self._late_code(tensor.dtype)
        if not tensor.flags.c_contiguous:
            raise _not_contiguous()
        return tensor.ctypes.data, code, tensor.shape

    def _late_code(self, dtype) -> int:
        if dtype.name != "bfloat16":  # numpy has no bfloat16 of its own; ml_dtypes brings one
            raise _unsupported(dtype)
        self.codes[dtype] = _core.BFLOAT16
        return _core.BFLOAT16

    def address(self, output) -> int:
        if not output.flags.writeable:
            raise ValueError("The array is read-only; an operation in place needs one that is writeable.")
        return output.ctypes.data

    def adopt(self, memory, shape, like):
        count = _count(shape)
        return self.numpy.frombuffer(memory, like.dtype, count).reshape(shape) if count else \
            self.numpy.empty(shape, like.dtype)

    def vector(self, values, like=None):
        return self.numpy.array(values, self.numpy.int32)


class _Torch:
    def __init__(self, torch):
        self.torch = torch
        self.type = torch.Tensor
        self.codes = {getattr(torch, name): code for code, name in enumerate(_core.DTYPES) if hasattr(torch, name)}
        self.address = torch.Tensor.data_ptr
        self.empty_like = OutputPool(torch).empty_like

    def describe(self, tensor):
        code = self.codes.get(tensor.dtype)
        if code is None:
            raise _unsupported(tensor.dtype)
        if not tensor.is_cpu:
            raise ValueError(f"The tensor is on {tensor.device}; this version of lightcc works on CPU tensors only. "
                             "Send tensor.cpu().")
        if tensor.layout is not self.torch.strided:
            raise ValueError(f"The tensor has layout {tensor.layout}; send tensor.to_dense().")
        if not tensor.is_contiguous():
            raise _not_contiguous()
        return tensor.data_ptr(), code, tensor.shape

    def adopt(self, memory, shape, like):
        count = _count(shape)
        return self.torch.frombuffer(memory, dtype=like.dtype, count=count).view(shape) if count else \
            self.torch.empty(shape, dtype=like.dtype, device="cpu")  # whatever the default device is

    def vector(self, values, like=None):
        device = like.device if isinstance(like, self.type) else "cpu"
        return self.torch.tensor(values, dtype=self.torch.int32, device=device)


def _count(shape: Sequence[int]) -> int:
    count = 1
    for length in shape:
        count *= length
    return count


def _not_contiguous() -> ValueError:
    return ValueError("Tensor is required to be contiguous.")


def _unsupported(dtype) -> ValueError:
    return ValueError(f"Tensor type {dtype} is not supported. Supported: {', '.join(_core.DTYPES)}.")


_frameworks = {"torch": _Torch, "numpy": _Numpy}
_made: Dict[str, Any] = {}  # framework: its adapter
_by_type: Dict[type, Any] = {bytearray: _Bytes()}


def _find(tensor) -> Adapter:
    adapter: Optional[Any] = None
    for framework, make in _frameworks.items():
        if framework in sys.modules:
            adapter = _made.get(framework) or _made.setdefault(framework, make(sys.modules[framework]))
            if isinstance(tensor, adapter.type):
                _by_type[type(tensor)] = adapter
                return adapter
    raise TypeError(f"A {type(tensor).__name__} cannot be sent: give a torch.Tensor or a numpy.ndarray.")
