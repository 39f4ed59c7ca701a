"""DistributedOptimizer: a v1 optimizer of TensorFlow whose compute_gradients gives the gradients of all ranks."""
from typing import Any, List

import tensorflow as tf

from lightcc.compress.variable_compression import WantedCompression
from lightcc.core.process_sets import global_process_set
from lightcc.core.wrapper_arguments import check_predivide, groups_of
from lightcc.tensorflow.compression import Compression
from lightcc.tensorflow.gradient_aggregation import LocalGradientAggregationHelper, local_variable, then_true
from lightcc.tensorflow.gradient_reducer import _make_allreduce_grads_fn, is_variable
from lightcc.tensorflow.mpi_ops import Adasum, Average, rank


def DistributedOptimizer(optimizer, name=None, use_locking=False, device_dense="", device_sparse="",
                         compression=Compression.none, sparse_as_dense=False, backward_passes_per_step=1, op=Average,
                         gradient_predivide_factor=1.0, average_aggregated_gradients=False, num_groups=0, groups=None,
                         process_set=global_process_set, scale_local_gradients=True):
    """Wraps a tf.compat.v1.train.Optimizer; passes any other on to lightcc.tensorflow.keras.DistributedOptimizer.

    compute_gradients returns reduced gradients; apply_gradients, slots and variables are the optimizer's own, so a
    checkpoint is that of the plain optimizer. Works in v1 graphs and eagerly. Lists of variables must be alike on all
    ranks, but for local ones. One more method: register_local_var(variable).

    name: of the wrapper, equal on all ranks; default "Distributed" and the optimizer's class. use_locking: Horovod's;
    the optimizer's own counts. device_dense, device_sparse, compression, op: as for allreduce. Adasum combines what the
    ranks' optimizers have made of the variables, not gradients. sparse_as_dense: sends tf.IndexedSlices as dense
    ones; else they travel by allgather. backward_passes_per_step: gradients of so many calls are added up on this rank
    before they travel (for v1 optimizers in graphs only; LocalGradientAggregationHelper); between, nothing is applied,
    but global_step is counted. With Adasum each call is applied, and every so many calls the ranks meet.
    average_aggregated_gradients: divides the sum by backward_passes_per_step. gradient_predivide_factor: divide by it
    before the sum and by size / factor after. groups: a number of groups, or lists of variables, that are reduced as
    one unit; num_groups is its old name. process_set: who takes part; on other ranks it is a plain optimizer.
    scale_local_gradients: divide gradients of local variables by the size of the process set.

    Errors: ValueError for wrong arguments, for an optimizer of lightcc.tensorflow.kv_variable, which averages gradients
    itself, for backward_passes_per_step > 1 in eager mode, for Adasum with a Keras optimizer or
    average_aggregated_gradients; NotImplementedError for Adasum with a process set; from running compute_gradients as
    from allreduce. Source: horovod.tensorflow.

    >>> x = tf.Variable(1.0); optimizer = hvd.DistributedOptimizer(tf.compat.v1.train.GradientDescentOptimizer(0.1))
    >>> optimizer.minimize(lambda: x * x, var_list=[x]); round(float(x), 6)
    0.8
    """
    if isinstance(optimizer, (_DistributedOptimizer, _DistributedAdasumOptimizer)):
        raise ValueError("The optimizer is a DistributedOptimizer already; wrap the plain optimizer, once.")
    if refusal := getattr(type(optimizer), "_not_to_be_distributed", ""):
        raise ValueError(f"DistributedOptimizer: {refusal}")
    check_predivide(gradient_predivide_factor, op)
    groups = groups_of(groups, num_groups, is_variable)
    if op == Adasum and average_aggregated_gradients:
        raise ValueError("Adasum does not support average_aggregated_gradients: it combines steps, not gradients.")
    if isinstance(optimizer, tf.compat.v1.train.Optimizer):
        if backward_passes_per_step <= 0:
            raise ValueError("backward_passes_per_step must be > 0.")
        if backward_passes_per_step > 1 and tf.executing_eagerly():
            raise ValueError("backward_passes_per_step > 1 is not supported for tf.compat.v1 optimizers in eager mode; "
                             "use a Keras optimizer, or build a graph.")
        name = name or f"Distributed{type(optimizer).__name__}"
        wanted = WantedCompression(compression, op, type(optimizer).__name__, process_set)
        allreduce_grads = _make_allreduce_grads_fn(name, device_dense, device_sparse, wanted, sparse_as_dense, op,
                                                   gradient_predivide_factor, groups, process_set)
        if op != Adasum:
            helper = LocalGradientAggregationHelper(
                backward_passes_per_step, allreduce_grads, sparse_as_dense, average_aggregated_gradients, rank(),
                LocalGradientAggregationHelper._OPTIMIZER_TYPE_LEGACY, process_set, scale_local_gradients, name)
            return _DistributedOptimizer(optimizer, name, use_locking, helper, wanted)
        if process_set is not global_process_set:
            raise NotImplementedError("Adasum is not supported with a process set.")
        return _DistributedAdasumOptimizer(optimizer, name, use_locking, allreduce_grads, backward_passes_per_step)
    if not hasattr(optimizer, "get_config") or not hasattr(optimizer, "apply_gradients"):
        raise ValueError(f"DistributedOptimizer wraps a tf.compat.v1.train.Optimizer or an optimizer of Keras, not "
                         f"{type(optimizer).__name__}.")
    if op == Adasum:
        raise ValueError("op=Adasum is not supported with Keras optimizers; use DistributedGradientTape(op=Adasum).")
    from lightcc.tensorflow.keras import DistributedOptimizer as keras_optimizer  # late: it is built on this package
    return keras_optimizer(optimizer, name=name, device_dense=device_dense, device_sparse=device_sparse,
                           compression=compression, sparse_as_dense=sparse_as_dense,
                           gradient_predivide_factor=gradient_predivide_factor, op=op,
                           backward_passes_per_step=backward_passes_per_step,
                           average_aggregated_gradients=average_aggregated_gradients, groups=groups,
                           process_set=process_set, scale_local_gradients=scale_local_gradients)


class _Wrapper(tf.compat.v1.train.Optimizer):
    """A v1 optimizer around another, whose slots and variables it shows."""

    def __init__(self, optimizer, name: str, use_locking: bool):
        super().__init__(use_locking, name)
        self._optimizer = optimizer

    def compute_gradients(self, *args, **kwargs):
        """The optimizer's own."""
        return self._optimizer.compute_gradients(*args, **kwargs)

    def apply_gradients(self, *args, **kwargs):
        """The optimizer's own."""
        return self._optimizer.apply_gradients(*args, **kwargs)

    def get_slot(self, *args, **kwargs):
        """The optimizer's own."""
        return self._optimizer.get_slot(*args, **kwargs)

    def get_slot_names(self, *args, **kwargs):
        """The optimizer's own."""
        return self._optimizer.get_slot_names(*args, **kwargs)

    def variables(self, *args, **kwargs):
        """The optimizer's own."""
        return self._optimizer.variables(*args, **kwargs)


class _DistributedOptimizer(_Wrapper):
    """What DistributedOptimizer makes of a v1 optimizer."""

    def __init__(self, optimizer, name: str, use_locking: bool, helper: LocalGradientAggregationHelper,
                 wanted: WantedCompression):
        super().__init__(optimizer, name, use_locking)
        self._agg_helper, self._wanted_compression = helper, wanted

    def register_local_var(self, var) -> None:
        """Keeps the gradient of a variable on this rank: it is only divided by the size of the process set, unless
        scale_local_gradients=False was given. Call it before compute_gradients."""
        self._agg_helper.register_local_var(var)

    def compute_gradients(self, *args, **kwargs):
        """The optimizer's own gradients, reduced over the ranks. Arguments are the optimizer's."""
        pairs = self._optimizer.compute_gradients(*args, **kwargs)
        variables = [variable for _, variable in pairs]
        return list(zip(self._agg_helper.compute_gradients([grad for grad, _ in pairs], variables), variables))

    def apply_gradients(self, *args, **kwargs):
        """The optimizer's own; with backward_passes_per_step > 1 only after a reduction."""
        return self._agg_helper.apply_gradients(lambda: self._optimizer.apply_gradients(*args, **kwargs),
                                                self._optimizer, *args, **kwargs)


class _DistributedAdasumOptimizer(_Wrapper):
    """What DistributedOptimizer(op=Adasum) makes of a v1 optimizer: each rank makes its own steps; then each variable,
    on all ranks, becomes

        start + Adasum over the ranks of (variable - start),   start: the variable before these steps.

    What an optimizer with momentum makes of a gradient is not its direction, so it is steps that are compared. A
    variable without gradient is left out, so it must have none on any rank. Source: Maleki et al., MLSys 2021.
    """

    def __init__(self, optimizer, name: str, use_locking: bool, allreduce_grads, passes: int):
        super().__init__(optimizer, name, use_locking)
        self._allreduce_grads, self._passes = allreduce_grads, passes

    def register_local_var(self, var) -> None:
        """ValueError: with Adasum it is steps that are exchanged, not gradients."""
        raise ValueError("register_local_var is not supported with op=Adasum: what is exchanged is what a step has "
                         "changed. Give the variable to an optimizer of its own.")

    def apply_gradients(self, grads_and_vars, *args, **kwargs):
        """The optimizer's own step, then the exchange of what it has changed, in every call or every so many."""
        pairs = list(grads_and_vars)
        variables = [variable for grad, variable in pairs if grad is not None]

        def step():
            return self._optimizer.apply_gradients(pairs, *args, **kwargs)

        if self._passes == 1:
            starts = [_copy(variable) for variable in variables]
            with tf.control_dependencies(starts):
                done = step()
            with tf.control_dependencies(_operations(done)):
                return self._combine(variables, starts)
        counter = local_variable(tf.TensorShape([]), tf.int32, "steps")
        starts = [local_variable(variable.shape, variable.dtype.base_dtype, "start") for variable in variables]

        def keep():
            return [start.assign(_copy(variable), read_value=False) for start, variable in zip(starts, variables)]

        with tf.control_dependencies([tf.cond(tf.equal(counter.read_value(), 0), then_true(keep), then_true(list))]):
            done = step()
        with tf.control_dependencies(_operations(done)):
            count = counter.assign((counter.read_value() + 1) % self._passes)
        return tf.group(tf.cond(tf.equal(count, 0),
                                then_true(lambda: self._combine(variables, [start.read_value() for start in starts])),
                                then_true(list)))

    def _combine(self, variables: List[Any], starts: List[tf.Tensor]):
        deltas = self._allreduce_grads([variable.read_value() - start for variable, start in zip(variables, starts)],
                                       variables)
        return tf.group([variable.assign(start + delta)
                         for variable, start, delta in zip(variables, starts, deltas)])


def _copy(variable) -> tf.Tensor:
    """A variable's value now; a plain read of a v1 graph's variable may show what is assigned to it later."""
    return tf.raw_ops.DeepCopy(x=variable.read_value())


def _operations(done) -> List[Any]:
    """What an optimizer's apply_gradients returns, as control dependencies: nothing in eager mode."""
    return [] if done is None else [done]
