"""What every Adapter must do (lightcc/core/adapter.py), over the frameworks that are there. A framework adds a row.
TensorFlow's tensors come by kernels of its own (csrc/api/tensorflow), and those of GPUs are in test_gpu_arrays.py.

1. What describe() says of a tensor is where its bytes are, and what they mean; whatever it cannot say is a ValueError.
2. New tensors are of the same dtype, have memory of their own and are ordinary tensors of the framework.
3. A refusal names the tensor, and says what would do. The next call works.
"""
import ctypes
import importlib.util

import numpy as np
import pytest
from frameworks import FLOATS, INTEGERS, Numpy, Torch

from lightcc.core import lib
from lightcc.core.adapter import adapter_of

pytestmark = pytest.mark.usefixtures("job")


class NumpyRow(Numpy):
    def strange(self):
        """Tensors that cannot be sent, and what is said of each."""
        x = np.ones((4, 6), np.float32)
        for cut in (x.T, x[:, :2], x[::2], x[::-1], np.broadcast_to(np.float32(1), 3), np.asfortranarray(x)):
            yield cut, "Tensor is required to be contiguous"
        for dtype in ("complex64", "U3", "O", "M8[s]", ">f4", "f4,i4"):
            yield np.zeros(2, dtype), "is not supported. Supported: uint8, "

    def read_only(self, dtype):
        x = self.tensor([1, 2], dtype)
        x.flags.writeable = False
        return x

    def subclass(self):
        return np.zeros(3, np.float32).view(type("Mine", (np.ndarray,), {}))


class TorchRow(Torch):
    def strange(self):
        torch = self.torch
        x = torch.ones(4, 6)
        for cut in (x.t(), x[:, :2], x[::2], torch.ones(1).expand(3)):
            yield cut, "Tensor is required to be contiguous"
        for dtype in (torch.complex64, torch.complex128):
            yield torch.zeros(2, dtype=dtype), f"{dtype} is not supported. Supported: uint8, "
        yield x.to_sparse(), "layout torch.sparse_coo; send tensor.to_dense()"
        yield torch.ones(1, dtype=torch.complex64).conj().imag, "negative bit; send tensor.resolve_neg()"
        yield torch.ones(2, device="meta"), "on meta; .*Send tensor.cpu()"

    def read_only(self, dtype):
        return None  # torch has none

    def subclass(self):
        return self.torch.nn.Parameter(self.torch.zeros(3))


ROWS = {"numpy": NumpyRow, **({"torch": TorchRow} if importlib.util.find_spec("torch") else {})}
CASES = [(name, dtype) for name, row in ROWS.items() for dtype in row.dtypes]
# No dimension, some, a long row of the pool, no elements, and as many dimensions as NumPy has.
SHAPES = ((), (1,), (3,), (2, 3), (lib.POOLED_BYTES,), (0,), (2, 0, 3), (1,) * 32)


@pytest.fixture(params=ROWS)
def row(request):
    return ROWS[request.param]()


@pytest.fixture(params=CASES, ids="-".join)
def of(request):
    """A function that makes tensors of a framework and dtype, from a shape."""
    name, dtype = request.param
    row = ROWS[name]()

    def make(shape):
        return row.tensor(np.arange(np.prod(shape, dtype=int)).reshape(shape) % 2, dtype)
    make.row, make.dtype = row, dtype
    return make


def bytes_of(row, tensor):
    return row.array(tensor).tobytes()


def test_all_dtypes_of_the_core_have_a_row():
    assert {dtype for _, dtype in CASES} >= set(lib.DTYPES) - {"bfloat16"}
    assert set(lib.DTYPES) == {*INTEGERS, *FLOATS, "bool"}


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_tensor_is_where_describe_says(of, shape):
    tensor = of(shape)
    address, code, described, place = adapter_of(tensor).describe(tensor)
    assert (lib.DTYPES[code], tuple(described), place) == (of.dtype, shape, None)
    expected = bytes_of(of.row, tensor)
    assert ctypes.string_at(address, len(expected)) == expected


def test_what_is_written_at_the_address_is_in_the_tensor(of):
    source, target = of((2, 3)), of((2, 3))
    written = bytes(reversed(bytes_of(of.row, source)))
    ctypes.memmove(adapter_of(target).address(target), written, len(written))
    assert bytes_of(of.row, target) == written


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_tensor_like_another_has_its_shape_and_dtype_and_memory_of_its_own(of, shape):
    tensor = of(shape)
    before = bytes_of(of.row, tensor)
    adapter = adapter_of(tensor)
    new = adapter.empty_like(tensor)
    assert (type(new), adapter.describe(new)[1:]) == (type(tensor), adapter.describe(tensor)[1:])
    ctypes.memset(adapter.address(new), 0xff, len(before))
    assert bytes_of(of.row, tensor) == before


@pytest.mark.parametrize("shape", [shape for shape in SHAPES if shape and len(shape) < 32], ids=str)
def test_an_output_of_the_core_is_an_ordinary_tensor_of_the_inputs_dtype(of, shape):
    tensor = of(shape)
    output = of.row.hvd.allgather(tensor)  # of one rank
    assert type(output) is type(tensor)
    assert adapter_of(output).describe(output)[1:3] == adapter_of(tensor).describe(tensor)[1:3]
    assert bytes_of(of.row, output) == bytes_of(of.row, tensor)
    ctypes.memset(adapter_of(output).address(output), 0, len(bytes_of(of.row, output)))  # it may be written


def test_a_vector_is_of_int32(row):
    like = row.tensor([1.5], "float32")
    for values in ([], [7], [1, -2, 2**31 - 1]):
        vector = adapter_of(like).vector(values, like)
        assert (type(vector), row.dtype(vector), row.values(vector).tolist()) == (type(like), "int32", values)


def test_a_subclass_is_sent_as_what_it_is_made_of(row):
    tensor = row.subclass()
    assert adapter_of(tensor) is adapter_of(row.tensor([1], "float32"))
    assert tuple(adapter_of(tensor).describe(tensor)[2]) == (3,)


def test_what_can_be_read_alone_is_sent_and_not_written(of):
    tensor = of.row.read_only(of.dtype)
    if tensor is None:
        return
    before = bytes_of(of.row, tensor)
    assert bytes_of(of.row, of.row.hvd.allgather(tensor)) == before
    for in_place in (lambda: of.row.hvd.broadcast_(tensor, 0, name="weights"),
                     lambda: of.row.hvd.broadcast_async_(tensor, 0, name="weights")):
        with pytest.raises(ValueError, match="broadcast of weights: The array is read-only; .* writeable"):
            in_place()
    with pytest.raises(ValueError, match="allreduce of tensor 1 of both: The array is read-only"):
        of.row.hvd.grouped_allreduce_([of((2,)), tensor], name="both")
    assert bytes_of(of.row, tensor) == before


def test_what_cannot_be_sent_is_refused_by_its_name(row):
    good = row.tensor([1, 2], "float32")
    for tensor, why in row.strange():
        for call, named in (
                (lambda: row.hvd.allgather(tensor, name="layer.7"), "allgather of layer.7: "),
                (lambda: row.hvd.allgather(tensor), "allgather of a tensor: "),
                (lambda: row.hvd.allgather_async(tensor, name="layer.7"), "allgather of layer.7: "),
                (lambda: row.hvd.broadcast_(tensor, 0, name="layer.7"), "broadcast of layer.7: "),
                (lambda: row.hvd.alltoall(tensor, name="layer.7"), "alltoall of layer.7: "),
                (lambda: row.hvd.grouped_allgather([good, tensor], name="pair"), "allgather of tensor 1 of pair: ")):
            with pytest.raises(ValueError, match=f"{named}.*{why}"):
                call()
        row.expect(row.hvd.allreduce(good, op=row.hvd.Sum, name="layer.7"), [1, 2], "float32")


@pytest.mark.parametrize("thing", [[1.0], (1,), 1.5, None, "text", {}, range(3), memoryview(b"abc")],
                         ids=lambda thing: type(thing).__name__)
def test_what_is_no_tensor_is_a_type_error_that_says_what_it_is(thing):
    with pytest.raises(TypeError, match=f"A {type(thing).__name__} cannot be sent: give a torch.Tensor"):
        adapter_of(thing)


def test_bytes_are_a_vector_of_uint8():
    for content in (b"", b"a", b"any bytes \x00 \xff"):
        tensor = bytearray(content)
        adapter = adapter_of(tensor)
        address, code, shape, place = adapter.describe(tensor)
        assert (lib.DTYPES[code], shape, place) == ("uint8", (len(content),), None)
        assert ctypes.string_at(address, len(content)) == content
        assert len(adapter.empty_like(tensor)) == len(content)
