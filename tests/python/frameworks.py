"""The frameworks that one body of a check runs over: their tensors, and the ways in which they run a collective.
Values are float64 outside the frameworks: it holds all that is used in tests.
"""
import re

import numpy as np

from lightcc.core.exceptions import HorovodInternalError

INTEGERS = ("uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64")
FLOATS = ("float16", "float32", "float64", "bfloat16")
TOLERANCE = {"float16": 1e-3, "bfloat16": 8e-3, "float32": 1e-6, "float64": 1e-14}


class Framework:
    """`hvd`, and what a body must know of it. Tensors come from values by tensor(), and go back by values()."""

    has_handles = True              # and operations in place
    odd_name = "two.ü"              # one that is allowed

    # Raised where a call cannot be; is none of allgather and reducescatter; where the ranks disagree or there is no
    # job; and where a rank has left.
    invalid, unsupported, refused, lost = ValueError, HorovodInternalError, HorovodInternalError, HorovodInternalError

    def forms(self, verb, in_place=False):
        """Every way to run a verb on a list of tensors, which only one in place changes: functions of the list and of
        what else the verb takes."""
        hvd, suffix = self.hvd, "_" if in_place else ""
        one, one_async, group, group_async = (
            getattr(hvd, name + suffix, None)
            for name in (verb, f"{verb}_async", f"grouped_{verb}", f"grouped_{verb}_async"))
        yield lambda xs, *args, **options: [one(x, *args, **options) for x in xs]
        yield lambda xs, *args, **options: [hvd.synchronize(handle) for handle in
                                            [one_async(x, *args, **options) for x in xs]]
        if group:
            yield group
            yield lambda xs, *args, **options: hvd.synchronize(group_async(xs, *args, **options))

    def together(self, verb):
        """The form that starts all before it waits for any."""
        return list(self.forms(verb))[1]

    def message(self, error):
        """The core's words in an error."""
        return str(error)

    def name_pattern(self, name):
        """A regular expression for how messages call an operation of this name, or None."""
        return re.escape(name) if name else r"noname\."

    def expect(self, tensor, values, dtype):
        """Asserts dtype, shape and values of a tensor: exactly, but for the rounding of floats."""
        values = np.asarray(values, np.float64)
        assert (self.dtype(tensor), tuple(tensor.shape)) == (dtype, values.shape)
        got = self.values(tensor)
        close = abs(got - values) <= TOLERANCE.get(dtype, 0) * abs(values)
        assert close.all(), f"{got} is not {values}; the first difference is at {np.argwhere(~close)[0]}"

    def expect_identical(self, tensor):
        """Asserts that a tensor has the same bits on all ranks."""
        import lightcc.numpy
        mine = np.frombuffer(self.array(tensor).tobytes(), np.uint8)
        every = lightcc.numpy.allgather(mine).reshape(self.hvd.size(), -1)
        assert (every == every[0]).all(), "the ranks' results differ in bits"


class Numpy(Framework):
    module = "numpy"
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

    def array(self, tensor):
        return tensor


class Torch(Framework):
    module = "torch"
    dtypes = INTEGERS + FLOATS + ("bool",)

    def __init__(self):
        import torch

        import lightcc.torch
        self.torch, self.hvd = torch, lightcc.torch

    def tensor(self, values, dtype):
        return self.torch.tensor(values, dtype=self.torch.float64).to(getattr(self.torch, dtype))

    def values(self, tensor):
        return tensor.detach().to(self.torch.float64).numpy()

    def dtype(self, tensor):
        return str(tensor.dtype).split(".")[-1]

    def array(self, tensor):
        """A numpy array of the same bits."""
        tensor = tensor.detach()
        return (tensor.view(self.torch.int16) if tensor.dtype == self.torch.bfloat16 else tensor).numpy()

    def gradients(self, call, xs, above):
        """The gradients of the tensors `xs` where those of the list of tensors call(hvd, *xs) are `above`."""
        xs = [x.detach().requires_grad_() for x in xs]
        self.torch.autograd.backward(call(self.hvd, *xs), above)
        return [x.grad for x in xs]
