"""conftest.py's fixtures for frameworks on the GPUs of the double. A file that imports these runs its checks there,
rank r on device r, each without a fault of order."""
import contextlib

import cases
import gpu_double
import gpu_frameworks
import pytest
from cases import FLOATS, INTEGERS, Case

KINDS = {"cupy": gpu_frameworks.Cupy, "standard": gpu_frameworks.Standard}
if "torch" in cases.FRAMEWORKS:
    KINDS["torch"] = gpu_frameworks.TorchOnGpu


@pytest.fixture(scope="module")
def double():
    return gpu_double.Double()


@pytest.fixture(scope="module")
def job(double):
    import lightcc.numpy as hvd
    with contextlib.ExitStack() as stack:
        variables = stack.enter_context(pytest.MonkeyPatch.context())
        variables.setenv("LIGHTCC_CUDA_LIBRARY", gpu_double.PATH)
        variables.setenv("LIGHTCC_NCCL", "0")  # the double is no device for it
        stack.enter_context(gpu_double.as_cupy(double))
        if "torch" in KINDS:
            stack.enter_context(gpu_frameworks.as_torch_on_gpu(double))
        hvd.init()
        yield hvd
        hvd.shutdown()


@pytest.fixture
def device(job):
    return job.rank()


@pytest.fixture(autouse=True)
def no_faults(double, job):
    """The faults that a check may leave."""
    known = set(double.faults())
    yield known
    faults = [fault for fault in double.faults() if fault not in known]
    assert not faults, "\n".join([f"LIGHTCC_TEST_SEED={double.seed()}", *faults])


@pytest.fixture(params=KINDS)
def framework(request, double, device):
    return KINDS[request.param](double, device)


handled = framework


def _cases(dtypes):
    pairs = [(name, dtype) for name, framework in KINDS.items() for dtype in framework.dtypes if dtype in dtypes]
    return {"params": pairs, "ids": ["-".join(pair) for pair in pairs]}


@pytest.fixture(**_cases(INTEGERS + FLOATS + ("bool",)))
def case(request, double, device):
    return Case(KINDS[request.param[0]](double, device), request.param[1])


@pytest.fixture(**_cases(INTEGERS + FLOATS))
def number(request, double, device):
    return Case(KINDS[request.param[0]](double, device), request.param[1])


@pytest.fixture
def boolean(framework):
    return Case(framework, "bool")
