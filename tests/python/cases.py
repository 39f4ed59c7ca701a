"""What checks on ranks (see ranks.py) have in common: the frameworks and dtypes, and values to work with.

FRAMEWORKS are all that are installed; or those that LIGHTCC_TEST_FRAMEWORKS names ("numpy,torch"), which then must be.
"""
import importlib.util
import os

import numpy as np
from frameworks import FLOATS, INTEGERS, TOLERANCE, Numpy, Torch  # noqa: F401
from tensorflow_frameworks import TensorFlow, TensorFlowFunction, TensorFlowV1

_FRAMEWORKS = {"numpy": Numpy, "torch": Torch, "tensorflow": TensorFlow, "tensorflow-function": TensorFlowFunction,
               "tensorflow-v1": TensorFlowV1}


def _present():
    wanted = os.environ.get("LIGHTCC_TEST_FRAMEWORKS")
    names = [name for name, framework in _FRAMEWORKS.items() if importlib.util.find_spec(framework.module)]
    missing = set(wanted.split(",") if wanted else ()) - set(names)
    if missing:
        raise ImportError(f"LIGHTCC_TEST_FRAMEWORKS={wanted}: {', '.join(sorted(missing))} cannot be imported here")
    return {name: _FRAMEWORKS[name] for name in names if not wanted or name in wanted.split(",")}


FRAMEWORKS = _present()


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
