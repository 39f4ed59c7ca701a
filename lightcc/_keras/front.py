"""What lightcc.keras and lightcc.tensorflow.keras have alike, each for its own Keras."""
from lightcc import _keras
from lightcc.compress.compressors import NoneCompressor
from lightcc.core.ops import Average
from lightcc.core.process_sets import global_process_set


class Front:
    """The functions of a package for Keras. keras: that which the package is for."""

    def __init__(self, keras):
        self._keras = keras

    def PartialDistributedOptimizer(self, optimizer, name=None, device_dense='', device_sparse='',
                                    compression=NoneCompressor, sparse_as_dense=False, gradient_predivide_factor=1.0,
                                    op=Average, backward_passes_per_step=1, average_aggregated_gradients=False,
                                    groups=None, process_set=global_process_set, local_layers=None,
                                    scale_local_gradients=True):
        """A DistributedOptimizer that leaves the gradients of some layers on this rank.

        local_layers: a Keras layer or a list of them. Their gradients are divided by the number of ranks, unless
        scale_local_gradients is False. Other arguments and errors: lightcc.tensorflow.keras.DistributedOptimizer;
        ValueError for anything but Keras layers. Source: horovod.keras, horovod.tensorflow.keras.

        >>> layer = keras.layers.Dense(1)
        >>> optimizer = hvd.PartialDistributedOptimizer(keras.optimizers.SGD(0.1), local_layers=layer)
        """
        distributed = _keras.create_distributed_optimizer(
            self._keras, optimizer, name, device_dense, device_sparse, compression, sparse_as_dense,
            gradient_predivide_factor, op, backward_passes_per_step, average_aggregated_gradients,
            _keras.checked_groups(groups), process_set, scale_local_gradients)
        _keras.keep_layers_local(distributed, local_layers)
        return distributed

    def broadcast_global_variables(self, root_rank):
        """Gives all variables of a v1 graph of TensorFlow the values of root_rank, in Keras's session.

        ValueError with Keras on torch; RuntimeError in eager mode. Source: horovod.keras, horovod.tensorflow.keras.

        >>> try: hvd.broadcast_global_variables(0)
        ... except (RuntimeError, ValueError): print("use hvd.callbacks.BroadcastGlobalVariablesCallback(0)")
        use hvd.callbacks.BroadcastGlobalVariablesCallback(0)
        """
        return _keras.broadcast_global_variables(self._keras.backend, root_rank)

    def allgather(self, value, name=None):
        """Concatenates the values of all ranks along dimension 0, in which they may differ, and returns a tensor.

        >>> hvd.allgather([1.0]).shape[0] == hvd.size()
        True
        """
        return _keras.allgather(self._keras.backend, value, name)

    def broadcast(self, value, root_rank, name=None):
        """Returns the value of root_rank as a tensor.

        >>> int(hvd.broadcast(hvd.rank(), root_rank=0))
        0
        """
        return _keras.broadcast(self._keras.backend, value, root_rank, name)

    def reducescatter(self, value, name=None, op=Average):
        """Reduces a value, then gives rank i the i-th part of dimension 0, as a tensor.

        >>> hvd.reducescatter([1.0] * hvd.size()).shape[0]
        1
        """
        return _keras.reducescatter(self._keras.backend, value, name, op)

    def check_weights(self, model, process_set=global_process_set):
        """Compares the weights of all ranks, bit by bit, by digests of 8 bytes. All ranks of the set must call it,
        between steps.

        model: a Keras model, whose trainable variables are compared (others differ where batch normalisation is each
        rank's own), or a list of variables, the same ones in the same order on all ranks. HOROVOD_CHECK_WEIGHTS=n has
        DistributedOptimizer compare its variables every n exchanges of gradients (docs/troubleshooting.md).

        Errors: RuntimeError on all ranks, with the variables that differ and the ranks that hold the same; those of
        allgather.

        >>> hvd.check_weights(keras.Sequential([keras.Input((2,)), keras.layers.Dense(1, kernel_initializer="ones")]))
        """
        _keras.check_weights(self._keras.backend, model, process_set)

    def load_model(self, filepath, custom_optimizers=None, custom_objects=None, compression=NoneCompressor,
                   legacy_opts=False):
        """Loads a saved model, with a DistributedOptimizer if it was saved with an optimizer.

        filepath: a file or folder of any format that Keras reads. custom_optimizers: a list of optimizer classes, and
        custom_objects: a dictionary by name, that the file needs. compression: what travels. legacy_opts: not used, the
        file says of which family its optimizer is.
        The optimizer goes on with the state that Keras reads: from .keras files, but not from all of the older formats.
        Errors: Keras's. Source: horovod.keras, horovod.tensorflow.keras.

        >>> model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        >>> model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse"); model.save("model.keras")
        >>> hasattr(hvd.load_model("model.keras").optimizer, "register_local_var")
        True
        """
        def wrapped(optimizer):
            return _keras.create_distributed_optimizer(self._keras, optimizer, None, "", "", compression, False, 1.0,
                                                       Average)
        return _keras.load_model(self._keras, wrapped, filepath, custom_optimizers, custom_objects, legacy_opts)
