"""Spans of lightcc in torch.profiler, and ranges of NVTX, in a double of its library."""
import ctypes
import subprocess

import pytest
import torch

import lightcc.torch as hvd
import ranks
from lightcc.core import nvtx_library
from lightcc.torch import spans

DOUBLE = """
#include <stdio.h>
static char text[65536];
static int used;
int nvtxRangePushA(const char* name) { used += snprintf(text + used, sizeof text - used, "<%s", name); return 0; }
int nvtxRangePop(void) { used += snprintf(text + used, sizeof text - used, ">"); return 0; }
const char* said(void) { return text; }
"""


@pytest.mark.parametrize("np", (2,))
def test_on_ranks(np):
    ranks.run_checks(__file__, np)


def trained(steps=1):
    hvd.init()
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.ones(4, 8)).sum().backward()
        optimizer.step()


def check_a_step_has_its_spans():
    trained()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        trained(steps=2)
    found = {}
    for event in profile.events():
        if event.name.startswith("lightcc."):
            found.setdefault(event.name.split(":")[0], []).append(event)
    assert set(found) == {"lightcc.send", "lightcc.wait", "lightcc.synchronize"}
    assert [event.name for event in found["lightcc.send"]] == ["lightcc.send: 4 gradients, 324 bytes"] * 2
    assert [event.name for event in found["lightcc.wait"]] == ["lightcc.wait: 4 requests"] * 2
    for wait, synchronize in zip(found["lightcc.wait"], found["lightcc.synchronize"]):
        outer, inner = synchronize.time_range, wait.time_range
        assert outer.start <= inner.start <= inner.end <= outer.end


def check_an_error_ends_its_span():
    class Failing:
        @spans.spanned("lightcc.fails")
        def fail(self, *, why):
            raise ValueError(why)

    with torch.profiler.profile() as profile, pytest.raises(ValueError, match="because"):
        Failing().fail(why="because")
    assert [event.name for event in profile.events() if event.name.startswith("lightcc.")] == ["lightcc.fails"]


@pytest.fixture
def double(tmp_path, monkeypatch):
    """What was said to a double of NVTX's library, while a tool is there."""
    (tmp_path / "double.c").write_text(DOUBLE)
    path = str(tmp_path / "libnvToolsExt.so.1")
    subprocess.run(["cc", "-shared", "-fPIC", "-o", path, str(tmp_path / "double.c")], check=True)
    monkeypatch.setattr(nvtx_library, "_LIBRARIES", ("/no/such/library.so", path))
    monkeypatch.setattr(spans, "_asks_nvtx", True)
    spans.nvtx.cache_clear()
    library = ctypes.CDLL(path)
    library.said.restype = ctypes.c_char_p
    yield lambda: library.said().decode()
    spans.nvtx.cache_clear()


def check_ranges_of_nvtx(double):
    trained()
    assert double() == ("<lightcc.send: 4 gradients, 324 bytes><lightcc.synchronize<lightcc.wait: 4 requests>>")


def check_ranges_can_be_turned_off(double, monkeypatch):
    monkeypatch.setattr(nvtx_library, "knob", {"HOROVOD_DISABLE_NVTX_RANGES": "1"}.get)
    trained()
    assert double() == "" and spans.nvtx() is None


def check_without_the_library_there_are_no_ranges(double, monkeypatch):
    monkeypatch.setattr(nvtx_library, "_LIBRARIES", ("/no/such/library.so", "libc.so.6"))  # one lacks the functions
    trained()
    assert double() == "" and nvtx_library.find() is None


def test_a_tool_says_that_it_is_there(monkeypatch):
    monkeypatch.delenv("NVTX_INJECTION64_PATH", raising=False)
    assert not nvtx_library.is_asked()
    monkeypatch.setenv("NVTX_INJECTION64_PATH", "/opt/nsight/libToolsInjection64.so")
    assert nvtx_library.is_asked()
