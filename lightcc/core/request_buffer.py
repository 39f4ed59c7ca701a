"""lightcc_request and lightcc_tensor of csrc/api/lightcc.h: the only place in Python that knows how they lie in memory.

Filling in a buffer with struct costs a third of a new ctypes.Structure, and a quarter of as many arguments of a ctypes
function. tests/python/test_request_buffer.py compares the layout with the header.
"""
import ctypes
from struct import Struct
from typing import Callable, List, Optional, Tuple

# Native sizes and alignment: struct aligns as C does, as long as it begins at a multiple of 8. What is "x" is zero.
_SIZES = Struct("IIP")               # size, tensor_size, tensors
# count, kind, flags, group, name, op, root, prescale, postscale, splits, codec, set; a tag, which is zero but of a send
# or a receive, and its space, which is zero
_REQUEST = Struct("iiIiPiiddPii40x")
_TAG = Struct("i4x")
_TENSOR = Struct("PPPii16x")         # input, output, shape, dtype, ndim; a place, which is zero unless it is a GPU's
_PLACE = Struct("iiP")               # device, kind, stream
_pack_one = Struct(_REQUEST.format + _TENSOR.format).pack_into
REQUEST_SIZE, TENSOR_SIZE = _SIZES.size + _REQUEST.size, _TENSOR.size
_PLACE_OF_ONE = REQUEST_SIZE + TENSOR_SIZE - _PLACE.size
_TAG_AT = REQUEST_SIZE - _TAG.size


class RequestBuffer:
    """A lightcc_request with `count` lightcc_tensors behind it, at `address`. All addresses in it are numbers, 0 for
    NULL: whoever fills it in keeps alive what they stand for while the core reads the request.
    """

    __slots__ = ("address", "memory", "_count")

    def __init__(self, count: int):
        self._count = count
        self.memory = bytearray(REQUEST_SIZE + count * TENSOR_SIZE)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))
        _SIZES.pack_into(self.memory, 0, REQUEST_SIZE, TENSOR_SIZE, self.address + REQUEST_SIZE)

    def set_tensor(self, index: int, address: int, output: int, shape: int, dtype: int, ndim: int,
                   place: Optional[Tuple] = None) -> None:
        """place: None for the host's memory, or a lib.Place."""
        begin = REQUEST_SIZE + index * TENSOR_SIZE
        _TENSOR.pack_into(self.memory, begin, address, output, shape, dtype, ndim)
        if place is not None:
            _PLACE.pack_into(self.memory, begin + TENSOR_SIZE - _PLACE.size, *place[:3])

    def set_request(self, kind: int, flags: int, group: int, name: int, op: int = 0, root: int = 0,
                    prescale: float = 1.0, postscale: float = 1.0, splits: int = 0, codec: int = 0,
                    set_: int = 0) -> None:
        _REQUEST.pack_into(self.memory, _SIZES.size, self._count, kind, flags, group, name, op, root, prescale,
                           postscale, splits, codec, set_)


# Those that no call is using. There come to be as many as there are calls at a time: one for each thread, and another
# for a call that is made inside of one, as by a signal handler.
_spare: List[RequestBuffer] = []


def call(function: Callable[[int], int], count: int, kind: int, flags: int, group: int, name: int, op: int = 0,
         root: int = 0, prescale: float = 1.0, postscale: float = 1.0, splits: int = 0, address: int = 0,
         output: int = 0, shape: int = 0, dtype: int = 0, ndim: int = 0, codec: int = 0, set_: int = 0,
         place: Optional[Tuple] = None, tag: int = 0) -> int:
    """function(address of a request). struct.error for what does not fit into a field.

    count: 1, or 0 for a request without tensors. For several there is RequestBuffer. place: None for the host's memory,
    or a lib.Place.
    """
    try:
        buffer = _spare.pop()
    except IndexError:
        buffer = RequestBuffer(1)
    try:  # set_request and set_tensor at once: this is the hot path
        _pack_one(buffer.memory, _SIZES.size, count, kind, flags, group, name, op, root, prescale, postscale, splits,
                  codec, set_, address, output, shape, dtype, ndim)
        if place is not None:
            _PLACE.pack_into(buffer.memory, _PLACE_OF_ONE, *place[:3])
        if tag:
            _TAG.pack_into(buffer.memory, _TAG_AT, tag)
        return function(buffer.address)
    finally:
        _spare.append(buffer)
