"""The memory of the outputs of eager calls: used again once nobody refers to it, and never before."""
import numpy as np
import pytest
import tensorflow as tf

import lightcc.tensorflow as hvd
import ranks

pytestmark = pytest.mark.usefixtures("job")

FLOATS = 1 << 18  # 1 MiB
VERBS = {
    "allreduce": lambda x: hvd.allreduce(x, op=hvd.Max),
    "grouped_allreduce": lambda x: hvd.grouped_allreduce([x], op=hvd.Max)[0],
    "broadcast": lambda x: hvd.broadcast(x, 0),
    "allgather": hvd.allgather,
    "alltoall": hvd.alltoall,
    "reducescatter": lambda x: hvd.reducescatter(tf.repeat(x, hvd.size()), op=hvd.Average),
}
REFERENCES = {
    "the tensor": lambda y: y,
    "another name": tf.identity,
    "another shape": lambda y: tf.reshape(y, [2, -1]),
    "a buffer": memoryview,
    "a capsule": tf.experimental.dlpack.to_dlpack,
}


@pytest.mark.parametrize("np", (2,))
def test_on_ranks(np):
    ranks.run_checks(__file__, np)


def first(reference):
    if type(reference).__name__ == "PyCapsule":
        reference = tf.experimental.dlpack.from_dlpack(reference)
    return float(np.asarray(reference).ravel()[0])


@pytest.mark.parametrize("verb", VERBS)
def check_memory_is_used_again(verb):
    addresses = set()
    for i in range(12):
        y = VERBS[verb](tf.fill([FLOATS], float(i)))  # the former one is dropped after this one is made
        addresses.add(np.frombuffer(memoryview(y), np.float32).ctypes.data)
        assert first(y) == i and float(y[-1]) == i
    assert len(addresses) == 2


@pytest.mark.parametrize("kind", REFERENCES)
def check_memory_is_left_alone_while_anyone_refers_to_it(kind):
    y = hvd.allreduce(tf.fill([FLOATS], 5.0), op=hvd.Max)
    reference = REFERENCES[kind](y)
    del y
    later = [hvd.allreduce(tf.fill([FLOATS], 7.0), op=hvd.Max) for _ in range(3)]
    assert first(reference) == 5
    del later


def check_other_dtypes_and_empty_tensors():
    for dtype in (tf.bfloat16, tf.float16, tf.float64, tf.int8, tf.bool):
        x = tf.cast(tf.ones([1 << 21]), dtype)
        for _ in range(3):
            y = hvd.allgather(x)
            assert y.dtype == dtype and y.shape == [hvd.size() << 21]
            assert bool(tf.reduce_all(y == hvd.broadcast(y, 0)))
    assert hvd.allreduce(tf.ones([0, FLOATS])).shape == (0, FLOATS)
