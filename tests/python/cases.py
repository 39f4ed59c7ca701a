"""What checks on ranks (see ranks.py) have in common: the frameworks and dtypes, values, and how results are compared.
Values are float64 outside the frameworks: it holds all that is used here."""
import numpy as np

INTEGERS = ("uint8", "int8", "uint16", "int16", "int32", "int64")
FLOATS = ("float16", "float32", "float64", "bfloat16")
TOLERANCE = {"float16": 1e-3, "bfloat16": 8e-3, "float32": 1e-6, "float64": 1e-14}


class Framework:
    """A framework's tensors, from and to values."""

    def expect(self, tensor, values, dtype):
        """Asserts dtype, shape and values of a tensor: exactly, but for the rounding of floats."""
        values = np.asarray(values, np.float64)
        assert (self.dtype(tensor), tuple(tensor.shape)) == (dtype, values.shape)
        got = self.values(tensor)
        close = abs(got - values) <= TOLERANCE.get(dtype, 0) * abs(values)
        assert close.all(), f"{got} is not {values}; the first difference is at {np.argwhere(~close)[0]}"

    def expect_identical(self, tensor):
        """Asserts that a tensor has the same bits on all ranks."""
        every = np.asarray(self.hvd.allgather(self.bits(tensor))).reshape(self.hvd.size(), -1)
        assert (every == every[0]).all(), "the ranks' results differ in bits"


class Numpy(Framework):
    dtypes = INTEGERS + FLOATS[:3] + ("bool",)

    def __init__(self):
        import lightcc.numpy
        self.hvd = lightcc.numpy

    def tensor(self, values, dtype):
        return np.array(values).astype(dtype, order="C")

    def values(self, tensor):
        return tensor.astype(np.float64)

    def dtype(self, tensor):
        return tensor.dtype.name

    def bits(self, tensor):
        return np.frombuffer(tensor.tobytes(), np.uint8)


class Torch(Framework):
    def __init__(self):
        import torch

        import lightcc.torch
        self.torch, self.hvd = torch, lightcc.torch

    dtypes = INTEGERS + FLOATS + ("bool",)

    def tensor(self, values, dtype):
        return self.torch.tensor(values, dtype=self.torch.float64).to(getattr(self.torch, dtype))

    def values(self, tensor):
        return tensor.detach().to(self.torch.float64).numpy()

    def dtype(self, tensor):
        return str(tensor.dtype).split(".")[-1]

    def bits(self, tensor):
        return tensor.detach().reshape(-1).view(self.torch.uint8)


class Case:
    """A framework and a dtype."""

    def __init__(self, framework, dtype):
        self.framework, self.dtype, self.hvd = framework, dtype, framework.hvd
        self.is_number, self.is_integer = dtype != "bool", dtype in INTEGERS

    def values(self, shape, rank):
        """What a rank contributes: so small that sums over a few ranks are exact."""
        i = np.arange(int(np.prod(shape)), dtype=np.float64).reshape(shape)
        if not self.is_number:
            return np.float64((i + rank) % 3 == 0)
        return (7 * i + 5 * rank) % 8 - (0 if self.dtype.startswith("u") else 3)

    def factors(self, shape, rank):
        """Likewise for products."""
        i = np.arange(int(np.prod(shape)), dtype=np.float64).reshape(shape)
        if not self.is_number:
            return self.values(shape, rank)
        return (1 + (i + rank) % 2) * (1 if self.dtype.startswith("u") else np.where(i % 3, 1, -1))

    def tensor(self, values):
        return self.framework.tensor(values, self.dtype)

    def mine(self, shape):
        """This rank's tensor of values()."""
        return self.tensor(self.values(shape, self.hvd.rank()))

    def all(self, shape):
        """values() of all ranks, stacked."""
        return np.stack([self.values(shape, rank) for rank in range(self.hvd.size())])

    def expect(self, tensor, values):
        self.framework.expect(tensor, values, self.dtype)

    def expect_all(self, tensors, all_values):
        assert len(tensors) == len(all_values)
        for tensor, values in zip(tensors, all_values):
            self.expect(tensor, values)


FRAMEWORKS = {"numpy": Numpy, "torch": Torch}
