"""DistributedGradientTape: a tf.GradientTape whose gradients are those of all ranks."""
import functools
from typing import Any, List, Tuple

import tensorflow as tf

from lightcc.compress.variable_compression import WantedCompression
from lightcc.core.process_sets import global_process_set
from lightcc.core.wrapper_arguments import check_predivide, groups_of, variables_of
from lightcc.core.wrapper_class import is_made_with, wrapper_class
from lightcc.tensorflow.compression import Compression
from lightcc.tensorflow.gradient_reducer import LocalVariables, _make_allreduce_grads_fn, is_variable
from lightcc.tensorflow.mpi_ops import Average


def DistributedGradientTape(gradtape, device_dense="", device_sparse="", compression=Compression.none,
                            sparse_as_dense=False, op=Average, gradient_predivide_factor=1.0, num_groups=0, groups=None,
                            process_set=global_process_set, scale_local_gradients=True):
    """Wraps a tf.GradientTape, also one that has recorded already: gradient() returns the reduced gradients.

    Returns an object of a subclass of the tape's class, of the same name, which shares the tape's recording. Lists of
    sources must be alike on all ranks, but for local ones. Works eagerly and in a tf.function; jacobian() and
    batch_jacobian() are not reduced.

    op: as for allreduce. gradient_predivide_factor: divide by it before the sum and by size / factor after.
    device_dense, device_sparse, compression: as for allreduce (topk, int8: docs/compression.md). sparse_as_dense:
    sends tf.IndexedSlices as dense ones; else they travel by allgather. groups: a number of groups, or lists of
    variables, that are reduced as one unit; num_groups is its old name; eagerly, all are one unit. process_set: who
    takes part; on other ranks it is a plain tape. scale_local_gradients: divide local gradients by the size of the
    process set.
    More methods: register_local_source(variable), get_local_and_global_gradients(target, sources).

    Errors: ValueError for wrong groups, a factor with another op than Average, or anything but a tape; from gradient()
    as from allreduce. Source: horovod.tensorflow.

    >>> x = tf.Variable(3.0)
    >>> with tf.GradientTape() as tape: loss = x * x
    >>> float(hvd.DistributedGradientTape(tape).gradient(loss, x))
    6.0
    """
    if not isinstance(gradtape, tf.GradientTape):
        raise ValueError(f"DistributedGradientTape wraps a tf.GradientTape, not {type(gradtape).__name__}.")
    if is_made_with(_DistributedGradientTape, gradtape):
        raise ValueError("The tape is a DistributedGradientTape already; wrap the plain tape, once.")
    check_predivide(gradient_predivide_factor, op)
    groups = groups_of(groups, num_groups, is_variable)
    cls = _distributed(type(gradtape))
    tape = cls.__new__(cls)
    tape.__dict__ = gradtape.__dict__  # the same recording: either may be stopped, reset or used up
    tape._local = LocalVariables(process_set, scale_local_gradients)
    tape._wanted_compression = WantedCompression(compression, op, "", process_set)
    tape._allreduce_grads = _make_allreduce_grads_fn("DistributedGradientTape", device_dense, device_sparse,
                                                     tape._wanted_compression, sparse_as_dense, op,
                                                     gradient_predivide_factor, groups, process_set)
    return tape


def PartialDistributedGradientTape(gradtape, device_dense="", device_sparse="", compression=Compression.none,
                                   sparse_as_dense=False, op=Average, gradient_predivide_factor=1.0, num_groups=0,
                                   groups=None, process_set=global_process_set, local_layers=None,
                                   scale_local_gradients=True):
    """DistributedGradientTape whose gradients for the given Keras layers stay on this rank.

    local_layers: one built layer or a list of them; their trainable variables become local sources. Other arguments
    and errors: as for DistributedGradientTape. ValueError for anything but Keras layers. Source: horovod.tensorflow.

    >>> layer = tf.keras.layers.Dense(1); layer.build((None, 2))
    >>> tape = hvd.PartialDistributedGradientTape(tf.GradientTape(), local_layers=layer)
    >>> with tape: loss = tf.reduce_sum(layer(tf.ones((1, 2)))) * hvd.size()
    >>> tape.gradient(loss, layer.bias).numpy()
    array([1.], dtype=float32)
    """
    local = variables_of(local_layers)
    tape = DistributedGradientTape(gradtape, device_dense, device_sparse, compression, sparse_as_dense, op,
                                   gradient_predivide_factor, num_groups, groups, process_set, scale_local_gradients)
    for variable in local:
        tape.register_local_source(variable)
    return tape


class _DistributedGradientTape:
    """What the class of what DistributedGradientTape returns has. See wrapper_class."""

    # Beside __dict__, which is shared with the plain tape.
    __slots__ = ("_allreduce_grads", "_local", "_wanted_compression")
    _as_plain: Any
    _allreduce_grads: Any
    _local: LocalVariables

    def gradient(self, target, sources, output_gradients=None, use_generic_names=False, **kwargs):
        """The tape's own gradients, reduced over the ranks, but for those of local sources.

        target, sources, output_gradients, kwargs (unconnected_gradients): the tape's. use_generic_names: Horovod then
        names what travels by its place in the list of sources, and not after the gradient's tensor, whose name may
        differ between ranks; here that is always so, and it changes nothing.

        >>> x = tf.Variable(3.0); tape = hvd.DistributedGradientTape(tf.GradientTape(), op=hvd.Sum)
        >>> with tape: loss = x * x
        >>> float(tape.gradient(loss, {"x": x})["x"]) == 6.0 * hvd.size()
        True
        """
        if isinstance(use_generic_names, (str, tf.UnconnectedGradients)):  # which is fourth in the tape's own method
            kwargs["unconnected_gradients"] = use_generic_names
        if output_gradients is not None:
            kwargs["output_gradients"] = output_gradients
        grads = self._as_plain.gradient(target, sources, **kwargs)
        flat = self._local.around(self._allreduce_grads, tf.nest.flatten(grads), tf.nest.flatten(sources))
        return tf.nest.pack_sequence_as(sources, flat)

    def register_local_source(self, source) -> None:
        """Keeps the gradient of a variable on this rank: it is only divided by the size of the process set, unless
        scale_local_gradients=False was given. For what only this rank has, or has otherwise than the others.

        >>> own = tf.Variable(3.0); tape = hvd.DistributedGradientTape(tf.GradientTape())
        >>> tape.register_local_source(own)
        >>> with tape: loss = own * own * hvd.size()
        >>> float(tape.gradient(loss, own))
        6.0
        """
        self._local.add(source)

    def get_local_and_global_gradients(self, target, sources, output_gradients=None, use_generic_names=False
                                       ) -> Tuple[List[Tuple[Any, Any]], List[Tuple[Any, Any]]]:
        """What gradient() returns, told apart: the pairs (source, gradient) of local sources, and those of all others.

        Arguments and errors: those of gradient(); sources in a structure come in its flat order.

        >>> a, b = tf.Variable(1.0), tf.Variable(2.0); tape = hvd.DistributedGradientTape(tf.GradientTape())
        >>> tape.register_local_source(b)
        >>> with tape: loss = a + b * hvd.size()
        >>> local, rest = tape.get_local_and_global_gradients(loss, [a, b])
        >>> [float(grad) for _, grad in local], [float(grad) for _, grad in rest], local[0][0] is b
        ([1.0], [1.0], True)
        """
        grads = self.gradient(target, sources, output_gradients, use_generic_names)
        pairs = list(zip(tf.nest.flatten(sources), tf.nest.flatten(grads)))
        return ([pair for pair in pairs if pair[0] in self._local],
                [pair for pair in pairs if pair[0] not in self._local])


@functools.lru_cache(maxsize=None)
def _distributed(cls: type) -> Any:
    """The subclass of a tape's class; one for all tapes of it, since scripts wrap a tape in every step."""
    return wrapper_class(cls, _DistributedGradientTape, "lightcc.tensorflow")
