"""The fixtures that the checks of tests/python/test_gpu_*.py take there from a double of CUDA (gpu_fixtures.py), with
tensors of a real GPU: PyTorch's, and CuPy's if it is there. Ranks share a GPU where there are too few.
LIGHTCC_GPU_TEST_SHORT=1: a few dtypes of PyTorch only.
"""
import contextlib
import importlib.util
import os
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from two_hosts import become_own_host

sys.path.append(str(Path(__file__).parents[1] / "python"))
from cases import FLOATS, INTEGERS, Case  # noqa: E402  where the tests of Python are
from frameworks import Numpy, Torch  # noqa: E402

become_own_host()
SHORT = os.environ.get("LIGHTCC_GPU_TEST_SHORT") == "1"


class TorchOnGpu(Torch):
    dtypes = ("int64", "float32", "bfloat16", "bool") if SHORT else Torch.dtypes

    def __init__(self, device):
        super().__init__()
        self.device = device

    def tensor(self, values, dtype):
        return super().tensor(values, dtype).to(f"cuda:{self.device}")

    on_host = Torch.tensor

    def values(self, tensor):
        return super().values(tensor.cpu())

    def array(self, tensor):
        return super().array(tensor.cpu())


class CupyOnGpu(Numpy):
    def __init__(self, device):
        super().__init__()
        import cupy
        self.cupy, self.device = cupy, device

    def tensor(self, values, dtype):
        with self.cupy.cuda.Device(self.device):
            return self.cupy.asarray(super().tensor(values, dtype))

    on_host = Numpy.tensor

    def values(self, tensor):
        return super().values(self.array(tensor))

    def array(self, tensor):
        return tensor if isinstance(tensor, np.ndarray) else self.cupy.asnumpy(tensor)


KINDS = {"torch": TorchOnGpu}
if importlib.util.find_spec("cupy") and not SHORT:
    KINDS["cupy"] = CupyOnGpu


class Streams:
    """What checks use of gpu_double.Double: streams, which are numbers, 0 the default one."""

    def __init__(self):
        self._kept = {}

    def new_stream(self, device):
        stream = torch.cuda.Stream(device)
        self._kept[stream.cuda_stream] = stream
        return stream.cuda_stream

    @contextlib.contextmanager
    def on(self, device, stream):
        """Makes a stream the current one of both frameworks."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.cuda.stream(self._kept[stream] if stream else torch.cuda.default_stream(device)))
            if "cupy" in KINDS:
                import cupy
                stack.enter_context(cupy.cuda.ExternalStream(stream, device) if stream else cupy.cuda.Stream.null)
            yield stream


@pytest.fixture(scope="module")
def double():
    return Streams()


@pytest.fixture(scope="module")
def job():
    import lightcc.numpy as hvd
    hvd.init()
    torch.cuda.set_device(hvd.rank() % torch.cuda.device_count())
    yield hvd
    hvd.shutdown()


@pytest.fixture
def device(job):
    return torch.cuda.current_device()


def pytest_exception_interact(node):
    node.has_failed = True


@pytest.fixture(autouse=True)
def all_ranks_end_it(request, job):
    """A check that fails on a rank may leave others in the middle of it: all begin another epoch then, with the next
    check."""
    yield
    with contextlib.suppress(job.HorovodInternalError, ValueError):
        if not getattr(request.node, "has_failed", False):
            return job.barrier()
    job.shutdown()
    job.init()


@pytest.fixture(params=KINDS)
def framework(request, device):
    return KINDS[request.param](device)


handled = framework


def _cases(dtypes):
    pairs = [(name, dtype) for name, framework in KINDS.items() for dtype in framework.dtypes if dtype in dtypes]
    return {"params": pairs, "ids": ["-".join(pair) for pair in pairs]}


@pytest.fixture(**_cases(INTEGERS + FLOATS + ("bool",)))
def case(request, device):
    return Case(KINDS[request.param[0]](device), request.param[1])


@pytest.fixture(**_cases(INTEGERS + FLOATS))
def number(request, device):
    return Case(KINDS[request.param[0]](device), request.param[1])


@pytest.fixture
def boolean(framework):
    return Case(framework, "bool")
