"""Requests as Python fills them in: laid out as csrc/api/lightcc.h has it, and one buffer for each call that is made at
a time."""
import ctypes
import re
import threading
from pathlib import Path

import numpy
import pytest

import lightcc.numpy as hvd
from lightcc.core import lib, request, request_buffer

HEADER = (Path(__file__).parents[2] / "csrc" / "api" / "lightcc.h").read_text()
TYPES = {"int32_t": ctypes.c_int32, "uint32_t": ctypes.c_uint32, "int64_t": ctypes.c_int64, "double": ctypes.c_double}
DEADLINE_S = 200


def mirror_of(name):
    """A ctypes.Structure with the fields that the header declares."""
    text = re.search(rf"typedef struct {name} {{\n(.*?)}} {name};", HEADER, re.DOTALL)[1]
    fields = []
    for line in re.sub(r"/\*.*?\*/", "", text, flags=re.DOTALL).split(";"):
        function = re.fullmatch(r"\s*void\*? \(\*(\w+)\)\(.*\)", line)
        plain = re.fullmatch(r"\s*((?:const )?\w+\*?) (\w+)", line)
        if function:
            fields.append((function[1], ctypes.c_void_p))
        elif plain:
            kind = ctypes.c_void_p if plain[1].endswith("*") else TYPES.get(plain[1]) or mirror_of(plain[1])
            fields.append((plain[2], kind))
        else:
            assert not line.strip(), f"{name}: {line!r} is no field that this test knows"
    return type(name, (ctypes.Structure,), {"_fields_": fields})


REQUEST, TENSOR = mirror_of("lightcc_request"), mirror_of("lightcc_tensor")
WORDS = [name for name, _ in REQUEST._fields_]


def seen_by_c(address):
    """The request at this address, field by field, and its tensors."""
    found = REQUEST.from_address(address)
    assert found.tensor_size == ctypes.sizeof(TENSOR)
    tensors = (TENSOR * found.count).from_address(found.tensors) if found.count else []
    return ({name: getattr(found, name) for name in WORDS if name != "tensors"},
            [{name: getattr(tensor, name) for name, _ in TENSOR._fields_} for tensor in tensors])


def expect_tensor(found, expected):
    place = found.pop("place")
    assert bytes(place) == bytes(ctypes.sizeof(place))
    assert found == expected


def request_fields(**changed):
    fields = dict.fromkeys(WORDS, 0)
    fields.update(size=ctypes.sizeof(REQUEST), tensor_size=ctypes.sizeof(TENSOR), prescale=1.0, postscale=1.0)
    fields.update(dict.fromkeys(("done", "allocate", "received", "context", "name", "splits"), None))
    fields.pop("tensors")
    return {**fields, **changed}


def test_the_header_has_these_structs():
    assert request_buffer.REQUEST_SIZE == ctypes.sizeof(REQUEST) and request_buffer.TENSOR_SIZE == ctypes.sizeof(TENSOR)
    assert {"size", "tensor_size", "codec", "set", "splits"} <= set(WORDS)


@pytest.mark.parametrize("name, ours", [("lightcc_codec", lib._Codec), ("lightcc_residual", lib._Residual)])
def test_structs_of_ctypes_are_laid_out_as_in_the_header(name, ours):
    def layout(structure):
        return [(field, getattr(structure, field).offset, getattr(structure, field).size)
                for field, _ in structure._fields_]
    assert layout(ours) == layout(mirror_of(name)) and ctypes.sizeof(ours) == ctypes.sizeof(mirror_of(name))


def test_one_tensor_is_where_c_reads_it():
    def check(address):
        found, (tensor,) = seen_by_c(address)
        assert found == request_fields(count=1, kind=1, flags=2, group=3, name=4 << 40, op=5, root=-6, prescale=7.5,
                                       postscale=8.5, splits=9 << 40, codec=16, set=17)
        expect_tensor(tensor, {"input": 10 << 40, "output": 11 << 40, "shape": 12 << 40, "dtype": 13, "ndim": 14})
        return 15
    assert request_buffer.call(check, 1, 1, 2, 3, 4 << 40, 5, -6, 7.5, 8.5, 9 << 40, 10 << 40, 11 << 40, 12 << 40,
                               13, 14, 16, 17) == 15


def test_none_is_where_c_reads_it():
    expected = request_fields(kind=lib.BARRIER, flags=1, group=2, name=3), []
    assert request_buffer.call(lambda address: seen_by_c(address) == expected, 0, lib.BARRIER, 1, 2, 3)


@pytest.mark.parametrize("count", (0, 1, 3))
def test_several_tensors_are_where_c_reads_them(count):
    buffer = request_buffer.RequestBuffer(count)
    for index in range(count):
        buffer.set_tensor(index, 10 + index, 20 + index, 30 + index, 40 + index, 50 + index)
    for name in (1, 2):  # the tensors stay, the rest is as the last call has it
        buffer.set_request(3, 4, 5, name, 6, 7, 8.5, 9.5, 10, 11, 12)
        found, tensors = seen_by_c(buffer.address)
        assert found == request_fields(count=count, kind=3, flags=4, group=5, name=name, op=6, root=7, prescale=8.5,
                                       postscale=9.5, splits=10, codec=11, set=12)
        assert len(tensors) == count
        for index, tensor in enumerate(tensors):
            expect_tensor(tensor, {"input": 10 + index, "output": 20 + index, "shape": 30 + index, "dtype": 40 + index,
                                   "ndim": 50 + index})


def call(function, number):
    return request_buffer.call(function, 1, 0, 0, 0, 0, root=number)


def test_a_call_inside_of_a_call_has_another_buffer():
    def outer(address):
        inner = call(lambda inner: inner, 2)
        assert inner != address and REQUEST.from_address(address).root == 1
        return address

    def fails(address):
        raise KeyboardInterrupt
    before = {call(outer, 1) for _ in range(3)}
    with pytest.raises(KeyboardInterrupt):
        call(fails, 3)
    assert before == {call(outer, 1)}, "the buffers of calls that are over are used again"


def test_threads_have_buffers_of_their_own():
    together, found = threading.Barrier(4), []

    def hold(address):
        together.wait(DEADLINE_S)
        found.append((address, REQUEST.from_address(address).root))
        return together.wait(DEADLINE_S)
    threads = [threading.Thread(target=call, args=(hold, number)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(number for _, number in found) == [0, 1, 2, 3]
    assert len({address for address, _ in found}) == 4


def test_an_operation_inside_of_another_disturbs_neither(job, monkeypatch):
    """As a signal handler would start it, between the filling in of a request and its submission."""
    submit, x, y = lib.submit, numpy.arange(3.0), numpy.arange(5, dtype="int32")

    def interrupted(address):
        monkeypatch.setattr(lib, "submit", submit)
        numpy.testing.assert_array_equal(hvd.allreduce(y, op=hvd.Sum, name="inner"), y)
        return submit(address)
    for operation in (lambda: hvd.allreduce(x, op=hvd.Sum, name="outer", prescale_factor=2.0),
                      lambda: hvd.grouped_allreduce([x], op=hvd.Sum, name="outer", prescale_factor=2.0)[0]):
        monkeypatch.setattr(lib, "submit", interrupted)
        numpy.testing.assert_array_equal(operation(), 2 * x)


def test_names_and_shapes_are_kept_up_to_a_bound(job):
    for number in range(2 * request._KEPT):
        hvd.allreduce(numpy.zeros((number, 0)), name=f"name {number}")
    assert len(request._names) <= request._KEPT and len(request._shapes) <= request._KEPT
    for name in (["unhashable"], 7):
        with pytest.raises(TypeError, match="give a str, or None"):
            hvd.allreduce(numpy.zeros(1), name=name)
    hvd.allreduce(numpy.zeros(1), name="name 0")
