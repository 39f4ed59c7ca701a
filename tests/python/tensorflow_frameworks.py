"""TensorFlow as frameworks of tests: at once, in a tf.function, and in a graph of version 1 with a session."""
import functools
import re

import numpy as np
from frameworks import FLOATS, INTEGERS, Framework


class TensorFlow(Framework):
    """Collectives run at once."""

    module = "tensorflow"
    dtypes = INTEGERS + FLOATS + ("bool",)
    has_handles = False
    odd_name = "two/2"  # in a graph a name must be one of nodes

    def __init__(self):
        import tensorflow as tf

        import lightcc.tensorflow
        self.tf = tf
        self.plain = lightcc.tensorflow
        self.invalid = self.unsupported = (ValueError, tf.errors.InvalidArgumentError)  # ValueError as a graph is built
        self.refused, self.lost = tf.errors.FailedPreconditionError, tf.errors.UnknownError
        self.hvd = _Hvd(lightcc.tensorflow, self.verb)

    def verb(self, name):
        """A collective, to be called with tensors of tensor()."""
        return getattr(self.plain, name)

    def run(self, call, xs):
        """call(*xs), in this framework's way."""
        return call(*xs)

    def forms(self, verb, in_place=False):
        if in_place:
            return
        hvd, grouped = self.plain, f"grouped_{verb}"
        yield lambda xs, *args, **options: self.run(
            lambda *xs: [getattr(hvd, verb)(x, *args, **options) for x in xs], xs)
        if hasattr(hvd, grouped):
            yield lambda xs, *args, **options: self.run(
                lambda *xs: getattr(hvd, grouped)(list(xs), *args, **options), xs)

    def together(self, verb):
        return next(self.forms(verb))

    def message(self, error):
        return re.search(r"Horovod\w+ on rank \d+: (.*?)( \[Op:.*)?$", str(error), re.MULTILINE)[1]

    def gradients(self, call, xs, above):
        def run(*tensors):
            xs, above = list(tensors[:count]), list(tensors[count:])
            with self.tf.GradientTape() as tape:
                tape.watch(xs)
                ys = list(call(self.plain, *xs))
            return tape.gradient(ys, xs, output_gradients=above)

        count = len(xs)
        return self.run(run, [*xs, *above])

    def tensor(self, values, dtype):
        return self.tf.constant(np.asarray(values).astype(self.tf.as_dtype(dtype).as_numpy_dtype))

    def array(self, tensor):
        return np.asarray(tensor.numpy())

    def values(self, tensor):
        return self.array(tensor).astype(np.float64)

    def dtype(self, tensor):
        return tensor.dtype.name


class _InGraph(TensorFlow):
    dtypes = ("int32", "float32", "bool")  # the others have the same kernels as at once

    def name_pattern(self, name):
        """Of a node."""
        return ".*" + (re.sub("[^A-Za-z0-9_.]", "_", name) if name else "Horovod")


class TensorFlowFunction(_InGraph):
    """In a tf.function: a verb by itself is traced again when dtypes or options change, and soon for any shape."""

    def verb(self, name):
        return _traced(self.plain, name)

    def run(self, call, xs):
        return self.tf.function(call, autograph=False)(*xs)


class TensorFlowV1(_InGraph):
    """In a graph of its own, fed through placeholders. Tensors are arrays outside of it."""

    def verb(self, name):
        def run(*args, **options):
            tf = self.tf
            leaves = tf.nest.flatten((args, options))
            tensors = [leaf for leaf in leaves if isinstance(leaf, np.ndarray)]
            known = repr(tf.nest.map_structure(
                lambda leaf: (leaf.dtype, leaf.shape) if isinstance(leaf, np.ndarray) else leaf, (args, options)))

            def call(*xs):
                fed = iter(xs)
                args, options = tf.nest.pack_sequence_as(
                    structure, [next(fed) if isinstance(leaf, np.ndarray) else leaf for leaf in leaves])
                return getattr(self.plain, name)(*args, **options)

            structure = (args, options)
            if (name, known) not in _graphs:
                _graphs[name, known] = _Graph(tf, call, tensors)
            return _graphs[name, known].run(tensors)
        return run

    def run(self, call, xs):
        return _Graph(self.tf, call, xs).run(xs)

    def tensor(self, values, dtype):
        return np.array(values).astype(self.tf.as_dtype(dtype).as_numpy_dtype, order="C")

    def array(self, tensor):
        return np.asarray(tensor)


class _Hvd:
    """lightcc.tensorflow, its collectives run in a framework's way."""

    VERBS = {"allreduce", "grouped_allreduce", "allgather", "grouped_allgather", "broadcast", "alltoall",
             "reducescatter", "grouped_reducescatter", "barrier", "join"}

    def __init__(self, plain, verb):
        self._plain, self._verb = plain, verb

    def __getattr__(self, name):
        return self._verb(name) if name in self.VERBS else getattr(self._plain, name)


@functools.lru_cache(maxsize=None)
def _traced(plain, name):
    import tensorflow as tf

    def barrier(process_set=plain.global_process_set):
        plain.barrier(process_set)  # an operation, which a function cannot return

    return tf.function(barrier if name == "barrier" else getattr(plain, name), autograph=False, reduce_retracing=True)


_graphs = {}


class _Graph:
    """One call, built once."""

    def __init__(self, tf, call, xs):
        with tf.Graph().as_default() as graph:
            self.feeds = [tf.compat.v1.placeholder(tf.as_dtype(x.dtype), x.shape) for x in xs]
            self.fetches = call(*self.feeds)
        self.session = tf.compat.v1.Session(graph=graph)

    def run(self, xs):
        return self.session.run(self.fetches, dict(zip(self.feeds, xs)))
