"""backward_passes_per_step for v1 optimizers: gradients are added up in variables of this rank and travel once."""
from typing import Any, Callable, Dict, List, Optional, Tuple

import tensorflow as tf

from lightcc.core.process_sets import ProcessSet, global_process_set
from lightcc.tensorflow.gradient_reducer import AllreduceGradients, LocalVariables, dense, key_of
from lightcc.tensorflow.mpi_ops import size_op  # noqa: F401


def apply_op_to_not_none_tensors(tensor_op: Callable[..., Any], tensors: List[Any], *args) -> List[Any]:
    """tensor_op(tensor, *args) of each tensor; None stays None.

    >>> [x if x is None else int(x) for x in apply_op_to_not_none_tensors(tf.add, [tf.constant(1), None], 2)]
    [3, None]
    """
    return [None if tensor is None else tensor_op(tensor, *args) for tensor in tensors]


def get_not_none_from_list(tensor_list: List[Any]) -> List[Any]:
    """The list without None.

    >>> get_not_none_from_list([1, None, 2])
    [1, 2]
    """
    return [tensor for tensor in tensor_list if tensor is not None]


class LocalGradientAggregationHelper:
    """Adds up gradients for backward_passes_per_step calls of compute_gradients, then reduces the sums.

    backward_passes_per_step: 1 reduces at each call. allreduce_func: (gradients, variables) -> gradients over the
    ranks. sparse_as_dense: IndexedSlices are added up as dense tensors; without it they are a ValueError.
    average_aggregated_gradients: divides the sums by backward_passes_per_step. rank: not used. optimizer_type:
    _OPTIMIZER_TYPE_LEGACY (v1; iterations are counted by global_step) or _OPTIMIZER_TYPE_KERAS (by its `iterations`).
    process_set, scale_local_gradients: whose size divides gradients of local variables, and whether. name: a name
    scope. The first, third and fourth are attributes too. Sums and `counter`, the calls since the last reduction, are
    in the collection LOCAL_VARIABLES of a v1 graph: neither saved nor broadcast;
    tf.compat.v1.local_variables_initializer() makes them, as monitored sessions do.

    Errors: ValueError for backward_passes_per_step <= 0. Source: horovod.tensorflow.gradient_aggregation.

    >>> helper = LocalGradientAggregationHelper(2, lambda grads, vars: [100 * grad for grad in grads], False, False, 0,
    ...                                         LocalGradientAggregationHelper._OPTIMIZER_TYPE_KERAS)
    >>> x = tf.Variable(0.0)
    >>> [float(helper.compute_gradients([tf.constant(grad)], [x])[0]) for grad in (1.0, 2.0, 3.0, 4.0)]
    [1.0, 300.0, 3.0, 700.0]
    """

    _OPTIMIZER_TYPE_KERAS = "optimizer_type_keras"
    _OPTIMIZER_TYPE_LEGACY = "optimizer_type_legacy"

    def __init__(self, backward_passes_per_step: int, allreduce_func: AllreduceGradients, sparse_as_dense: bool,
                 average_aggregated_gradients: bool, rank: int, optimizer_type: str,
                 process_set: ProcessSet = global_process_set, scale_local_gradients: bool = True, name: str = ""):
        if backward_passes_per_step <= 0:
            raise ValueError("backward_passes_per_step must be > 0.")
        self.backward_passes_per_step, self._allreduce, self._name = backward_passes_per_step, allreduce_func, name
        self.sparse_as_dense, self.average_aggregated_gradients = sparse_as_dense, average_aggregated_gradients
        self._optimizer_type = optimizer_type
        self._local = LocalVariables(process_set, scale_local_gradients)
        self._sums: Dict[int, Tuple[Any, tf.Variable]] = {}  # by key: the variable, kept so that the key is its own
        self._counter: Optional[tf.Variable] = None

    @property
    def counter(self) -> tf.Variable:
        """How many calls of compute_gradients have come since the last reduction."""
        if self._counter is None:
            self._counter = local_variable(tf.TensorShape([]), tf.int32, "counter")
        return self._counter

    @property
    def local_variables(self) -> List[tf.Variable]:
        """What it has made so far: all zeros as after a reduction."""
        made = [self._counter, *(total for _, total in self._sums.values())]
        return [variable for variable in made if variable is not None]

    def register_local_var(self, var) -> None:
        """Excludes a variable from the reduction; its sum is only divided by the size of the process set.

        >>> helper = LocalGradientAggregationHelper(1, lambda grads, vars: grads, False, False, 0, "")
        >>> helper.register_local_var(tf.Variable(0.0))
        """
        self._local.add(var)

    def compute_gradients(self, grads: List[Any], vars: List[Any]) -> List[Any]:
        """Adds the gradients to the sums. On the last pass it returns the reduced sums and clears them; before, it
        returns this pass's own gradients.

        grads: one for each variable; None: it has none in this pass. Errors: ValueError for IndexedSlices without
        sparse_as_dense; from the last pass as from allreduce.
        """
        if self.backward_passes_per_step == 1:
            return self._local.around(self._allreduce, grads, vars)
        grads = [self._dense(grad, var) for grad, var in zip(grads, vars)]
        sums = [self._sum(grad, var) for grad, var in zip(grads, vars)]
        summed = [i for i, total in enumerate(sums) if total is not None]  # also one without a gradient in this pass
        if not summed:
            return grads
        with tf.name_scope(self._name or "LocalGradientAggregation") as scope:
            added = [sums[i].assign_add(grads[i], read_value=False) for i in summed if grads[i] is not None]
            with tf.control_dependencies([self.counter.assign_add(1, read_value=False), *added]):
                last = tf.equal(self.counter.read_value(), self.backward_passes_per_step)

            def reduced():
                with tf.name_scope(scope):  # of v1 graphs a branch does not inherit it; collectives are named by it
                    return self._reduced([sums[i] for i in summed], [vars[i] for i in summed])

            def unreduced():
                return [tf.zeros_like(sums[i]) if grads[i] is None else tf.identity(grads[i]) for i in summed]

            results = iter(tf.cond(last, reduced, unreduced))
        return [grad if total is None else next(results) for grad, total in zip(grads, sums)]

    def apply_gradients(self, apply_grads_closure: Callable[[], Any], optimizer, *args, **kwargs):
        """Calls the closure if the last compute_gradients has reduced, else just counts the iteration.

        args, kwargs: those of the optimizer's apply_gradients, which the closure has, too. Returns the operation that
        does it, in a graph; with backward_passes_per_step=1 what the closure returns.
        """
        if self.backward_passes_per_step == 1:
            return apply_grads_closure()
        grads = [thing for thing in tf.nest.flatten((args, kwargs)) if isinstance(thing, tf.Tensor)]
        with tf.control_dependencies(grads):  # which are there once the counter has been cleared
            ready = tf.equal(self.counter.read_value(), 0)
        return tf.group(tf.cond(ready, then_true(apply_grads_closure),
                                then_true(lambda: self._count(optimizer, *args, **kwargs))))

    def _dense(self, grad, var):
        if isinstance(grad, tf.IndexedSlices) and not self.sparse_as_dense:
            raise ValueError(f"backward_passes_per_step={self.backward_passes_per_step}: the gradient of {var.name} is "
                             "sparse (tf.IndexedSlices), which cannot be added up; pass sparse_as_dense=True.")
        return dense(grad)

    def _sum(self, grad, var) -> Optional[tf.Variable]:
        """The sum of a variable's gradients; None if it has had none yet."""
        key = key_of(var)
        if key not in self._sums and grad is not None:
            self._sums[key] = var, local_variable(var.shape, grad.dtype, "aggregated_gradient")
        return self._sums.get(key, (var, None))[1]

    def _reduced(self, sums: List[tf.Variable], vars: List[Any]) -> List[Any]:
        totals = [total.read_value() for total in sums]
        with tf.control_dependencies(totals):
            cleared = [total.assign(tf.zeros_like(value), read_value=False) for total, value in zip(sums, totals)]
            cleared.append(self.counter.assign(0, read_value=False))
        if self.average_aggregated_gradients:
            totals = [total / tf.cast(self.backward_passes_per_step, total.dtype) for total in totals]
        results = self._local.around(self._allreduce, totals, vars)
        with tf.control_dependencies(cleared):
            return [tf.identity(result) for result in results]

    def _count(self, optimizer, grads_and_vars=None, global_step=None, *_, **__):
        step = global_step if self._optimizer_type == self._OPTIMIZER_TYPE_LEGACY else optimizer.iterations
        return None if step is None else step.assign_add(1)


SUMS = "lightcc_sums"  # a collection of v1 graphs: the variables of all helpers, zeros after a reduction


def local_variable(shape: tf.TensorShape, dtype: tf.DType, name: str) -> tf.Variable:
    """A variable of zeros, made once, outside of the function or branch that is traced."""
    with tf.init_scope():
        return tf.compat.v1.Variable(lambda: tf.zeros(shape, dtype), trainable=False, use_resource=True, name=name,
                                     collections=[tf.compat.v1.GraphKeys.LOCAL_VARIABLES, SUMS])


def then_true(action: Callable[[], Any]) -> Callable[[], tf.Tensor]:
    """A branch of tf.cond for an action: branches must return alike."""
    def branch():
        done = [thing for thing in tf.nest.flatten(action()) if isinstance(thing, tf.Operation) or hasattr(thing, "op")]
        with tf.control_dependencies(done):
            return tf.constant(True)
    return branch
