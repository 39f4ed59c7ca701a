"""The operations of csrc/embedding/tensorflow, as TensorFlow has them, and the numbers by which graphs name tables."""
import ctypes
import itertools
import weakref
from ctypes import c_char_p, c_int, c_int64, c_void_p
from typing import Set

import tensorflow as tf

from lightcc.core import lib as core
from lightcc.core import request
from lightcc.embedding.table import DTYPES, Table
from lightcc.tensorflow._library import run_stateful as run  # noqa: F401  it also says if TensorFlow lacks something

_PATH = core.library_beside("_lightcc_embedding_tensorflow.so")


def _load() -> ctypes.CDLL:
    library = ctypes.CDLL(_PATH)
    bind, unbind = library.lightcc_embedding_tensorflow_bind, library.lightcc_embedding_tensorflow_unbind
    bind.restype, bind.argtypes = None, [c_int64, c_void_p, c_void_p, c_char_p, c_int, c_int64]
    unbind.restype, unbind.argtypes = None, [c_int64]
    library.lightcc_embedding_tensorflow_calls.restype = c_int64
    return library


operations = tf.load_op_library(_PATH)
_library = _load()
_numbers = itertools.count(1)
_live: Set[int] = set()  # numbers of tables that are there


def _leave() -> None:
    """Operations refuse the tables of a world that was left, until Table.enter has taken them into the next one."""
    for number in list(_live):
        _library.lightcc_embedding_tensorflow_unbind(number)


core.after_epoch.append(_leave)


def number_of(table: Table) -> int:
    """By which operations know the table, through all changes of its handle; until it is closed or gone.

    >>> from lightcc import embedding
    >>> number_of(embedding.Table("user", 4)) < number_of(embedding.Table("item", 4))
    True
    """
    number, known = next(_numbers), weakref.ref(table)

    def tell() -> None:
        one = known()
        if one is None or one.is_closed:
            _library.lightcc_embedding_tensorflow_unbind(number)
        else:
            _library.lightcc_embedding_tensorflow_bind(number, one.group.handle, one.handle,
                                                       request.encoded(one.name), DTYPES[one.dtype], one.dim)

    tell()
    table.on_handle.append(tell)
    _live.add(number)
    weakref.finalize(table, _gone, number).atexit = False  # type: ignore[misc]  # after the table's, so called before
    return number


def forget_lookups(table: Table) -> None:
    """Of a table of the present world: gradients of lookups that there were are refused."""
    if core.initialized() and table.epoch == core.epoch:
        table.tell()


def _gone(number: int) -> None:
    _live.discard(number)
    _library.lightcc_embedding_tensorflow_unbind(number)


def calls() -> int:
    """How many exchanges (lookups and updates) the operations of this process have made.

    >>> calls() >= 0
    True
    """
    return _library.lightcc_embedding_tensorflow_calls()
