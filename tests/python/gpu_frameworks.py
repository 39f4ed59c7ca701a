"""Frameworks (frameworks.py) whose tensors are in the memory of the double's GPUs (gpu_double.py)."""
import contextlib
import ctypes
import functools
import importlib.util
import sys
import weakref

import gpu_double
import numpy as np
from frameworks import FLOATS, INTEGERS, Numpy, Torch

_HAS_BFLOAT16 = importlib.util.find_spec("ml_dtypes") is not None


class _Arrays(Numpy):
    dtypes = INTEGERS + FLOATS[:3 + _HAS_BFLOAT16] + ("bool",)

    def __init__(self, double, device, kind):
        super().__init__()
        self.double, self.device, self.kind = double, device, kind

    def tensor(self, values, dtype):
        if dtype == "bfloat16":
            import ml_dtypes
            dtype = ml_dtypes.bfloat16
        return self.kind.of(self.double, self.device, super().tensor(values, dtype))

    on_host = Numpy.tensor

    def values(self, tensor):
        return super().values(self.array(tensor))

    def array(self, tensor):
        return tensor if isinstance(tensor, np.ndarray) else tensor.get()


class Cupy(_Arrays):
    def __init__(self, double, device):
        super().__init__(double, device, sys.modules["cupy"].ndarray)


class Standard(_Arrays):
    dtypes = ("uint8", "float32")  # the others are numpy's, as with CuPy

    def __init__(self, double, device):
        super().__init__(double, device, gpu_double.StandardArray)


class TorchOnGpu(Torch):
    """torch without CUDA: its tensors on the CPU, over memory of the double."""

    dtypes = ("int64", "float32", "bfloat16", "bool")

    def __init__(self, double, device):
        super().__init__()
        self.double, self.device = double, device

    def tensor(self, values, dtype):
        host = super().tensor(values, dtype)
        tensor = new_tensor(self.torch, self.double, self.device, host.shape, host.dtype)
        if host.numel():
            self.double.write(self.device, tensor.data_ptr(), super().array(host))
        if dtype == "int32":  # splits, which lightcc reads by torch's own functions: those of the CPU wait for no GPU
            self.double.read(self.device, 0, np.empty(0))
        return tensor

    on_host = Torch.tensor

    def values(self, tensor):
        return super().values(self._copied(tensor))

    def array(self, tensor):
        return super().array(self._copied(tensor))

    def _copied(self, tensor):
        if memory_of(tensor) is None:
            return tensor
        host = self.torch.empty(tensor.shape, dtype=tensor.dtype)
        if host.numel():
            self.double.read(self.device, tensor.data_ptr(), super().array(host))
        return host


_memory = {}  # by the address of a storage: its device
_memories = weakref.WeakValueDictionary()  # the same: the gpu_double.Memory


def new_tensor(torch, double, device, shape, dtype):
    count = int(np.prod(shape))
    memory = gpu_double.Memory(double, device, count * torch.empty(0, dtype=dtype).element_size() + 8)
    raw = (ctypes.c_char * memory.count).from_address(memory.address)
    raw.memory = memory  # torch keeps what it was given
    _memory[memory.address], _memories[memory.address] = device, memory
    return torch.frombuffer(raw, dtype=dtype, count=count + 1)[:count].view(shape)


def memory_of(tensor):
    """The device of a tensor of new_tensor(), else None."""
    on_host = tensor.is_cpu and not tensor.is_sparse
    return _memory.get(tensor.untyped_storage().data_ptr()) if on_host else None


def keep_for(tensor, stream):
    """torch.Tensor.record_stream, for tensors of new_tensor()."""
    if memory_of(tensor) is not None:
        _memories[tensor.untyped_storage().data_ptr()].kept_for.add(stream)


@contextlib.contextmanager
def as_torch_on_gpu(double):
    """Tensors of new_tensor() are a GPU's here."""
    import torch

    from lightcc.core import adapter

    class Adapter(adapter._Torch):
        def __init__(self):
            super().__init__(torch)
            new_on_host = self.empty_like
            self.empty_like = lambda tensor: new_on_host(tensor) if memory_of(tensor) is None else new_tensor(
                torch, double, memory_of(tensor), tensor.shape, tensor.dtype)

        def describe(self, tensor):
            address, dtype, shape, place = super().describe(tensor)
            return address, dtype, shape, place if memory_of(tensor) is None else self._place(tensor)

        def _place(self, tensor):
            return super()._place(tensor) if memory_of(tensor) is None else self._on(memory_of(tensor))

        def _on(self, device):
            return adapter.cuda_place(device, double.stream(device), functools.partial(self._on, device))

        def output(self, handle, index, like):
            if memory_of(like) is None:
                return super().output(handle, index, like)
            return adapter.output_on_gpu(handle, index, self._place(like), self.address, lambda shape: new_tensor(
                torch, double, memory_of(like), shape, like.dtype))

    before = adapter.adapter_of(torch.empty(0))
    adapter._made["torch"] = adapter._by_type[torch.Tensor] = Adapter()
    try:
        yield
    finally:
        adapter._made["torch"] = adapter._by_type[torch.Tensor] = before
