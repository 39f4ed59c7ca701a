"""The reduction of gradients that DistributedGradientTape and all DistributedOptimizers share.

In a graph (tf.function, v1) every gradient is a collective of its own, which starts as soon as the gradient is there,
while others are still computed; the core makes buckets of them, and as those of one call are a set
(core/request.py, new_set), it learns in which order they come. Eager calls follow one another, so there all gradients
travel in one call.

Gradients are lists, with None where a variable has none; a gradient's place in the list is what the ranks know it by,
so lists must be alike on all ranks. Variables are tf.Variable or Keras 3's.
"""
from typing import Any, Callable, Dict, List, Optional, Sequence

import tensorflow as tf

from lightcc.compress.variable_compression import Gradient, VariableCompression, WantedCompression, parts_of
from lightcc.core import lib
from lightcc.core.process_sets import ProcessSet, global_process_set
from lightcc.core.request import new_set
from lightcc.core.util import split_list
from lightcc.core.wrapper_arguments import Groups, stays_here
from lightcc.tensorflow import compressed
from lightcc.tensorflow.compression import Compression
from lightcc.tensorflow.mpi_ops import Average, size_op
from lightcc.tensorflow.reductions import _allreduce_in_set, _grouped_allreduce_in_set
from lightcc.tensorflow.weights import compared

AllreduceGradients = Callable[[Sequence[Any], Optional[Sequence[Any]]], List[Any]]


def _make_allreduce_grads_fn(name: str, device_dense: str = "", device_sparse: str = "", compression=Compression.none,
                             sparse_as_dense: bool = False, op: int = Average, gradient_predivide_factor: float = 1.0,
                             groups: Groups = None, process_set: ProcessSet = global_process_set
                             ) -> AllreduceGradients:
    """Makes the function (gradients, variables=None) -> gradients that reduces gradients over the ranks of the set.

    name: the collectives' first name; equal on all ranks. groups: as core.wrapper_arguments.groups_of returns it:
    how many units, or lists of variables that are a unit each; in eager mode everything is one. sparse_as_dense:
    IndexedSlices travel as dense tensors; else by allgather, as in allreduce. gradient_predivide_factor: with Average
    only; divides before the sum, and the sum by size / factor. The rest: as for allreduce; compression: a
    WantedCompression, too. Without variables the core compresses nothing.
    In a world of one (unless it may grow: HOROVOD_ELASTIC=1) and on a rank outside the set, gradients stay as they are.
    Errors: from the function, as from allreduce. Source: _make_allreduce_grads_fn of horovod.tensorflow.

    >>> reduce = _make_allreduce_grads_fn("Example"); [float(grad) for grad in reduce([tf.constant(2.0)])]
    [2.0]
    """
    wanted = compression if isinstance(compression, WantedCompression) else WantedCompression(
        compression, op, name, process_set)
    options = {"device_dense": device_dense, "device_sparse": device_sparse, "op": op,
               "prescale_factor": 1.0 / gradient_predivide_factor, "postscale_factor": gradient_predivide_factor,
               "process_set": process_set, "ignore_name_scope": True}

    def allreduce_grads(grads: Sequence[Any], vars: Optional[Sequence[Any]] = None) -> List[Any]:
        reduced = [dense(grad) if sparse_as_dense else grad for grad in grads]
        present = [i for i, grad in enumerate(reduced) if grad is not None]
        if not present or stays_here(process_set):
            return reduced
        if wanted.needs_init:
            raise lib.not_initialised()
        with tf.name_scope(f"{name}_Allreduce") as scope:
            # Where nodes end up in the graph that runs may differ between ranks, by the writing of summaries on one of
            # them, say; the scope here does not. It tells apart what two tapes in a graph send.
            prefix = scope.rstrip("/").replace("/", ".")
            units = {prefix: present} if tf.executing_eagerly() else _units(prefix, present, groups, vars)
            set_ = new_set() if len(units) > 1 else 0  # of each call, as each is other nodes of the graph
            chosen = _chosen(wanted.core, grads, vars)
            for unit, members in units.items():
                rest, of_core = parts_of(members, chosen)
                if of_core:
                    through_core(set_, prefix if len(of_core) == 1 else f"{unit}.compressed", of_core, chosen, reduced)
                plain = wanted.plain  # as it is while this is traced
                if len(rest) == 1:
                    reduced[rest[0]] = _allreduce_in_set(set_, reduced[rest[0]], name=unit, compression=plain,
                                                         **options)
                elif rest:
                    results = _grouped_allreduce_in_set(set_, [reduced[i] for i in rest], name=unit, compression=plain,
                                                        **options)
                    for i, result in zip(rest, results):
                        reduced[i] = result
        return reduced

    def through_core(set_: int, unit: str, members: List[int], chosen: Dict[int, str], reduced: List[Any]) -> None:
        core, tensors = wanted.core, [reduced[i] for i in members]
        request = core.request(unit, [chosen[i] for i in members], [tensor.shape.num_elements() for tensor in tensors])
        with tf.device(device_dense):
            results = compressed.allreduce(tensors, request, op, options["prescale_factor"],
                                           options["postscale_factor"], process_set, core.codec, core.compression,
                                           set_)
        for i, result in zip(members, results):
            reduced[i] = result

    return allreduce_grads


def _chosen(core: Optional[VariableCompression], grads: Sequence[Any], vars: Optional[Sequence[Any]]) -> Dict[int, str]:
    """The gradients that the core compresses, by their places, and what it knows them by. Those of variables, whose
    shape is known as the graph is built, and not sparse."""
    if core is None or vars is None:
        return {}
    return core.choose({
        i: Gradient(getattr(variable, "_value", variable), name_of(variable), grad.shape.as_list(), grad.dtype.name)
        for i, (grad, variable) in enumerate(zip(grads, vars))
        if tf.is_tensor(grad) and not isinstance(grad, tf.IndexedSlices) and grad.shape.is_fully_defined() and
        is_variable(variable)})


def _units(prefix: str, present: List[int], groups: Groups, vars: Optional[Sequence[Any]]) -> Dict[str, List[int]]:
    """Which gradients, by their places, travel as one unit, and the units' names."""
    if groups is None:
        together = []
    elif isinstance(groups, int):
        together = split_list(present, min(groups, len(present)))
    else:
        place = {} if vars is None else {key_of(vars[i]): i for i in present}
        together = [[place[key] for key in map(key_of, group) if key in place] for group in groups]
    units = {f"{prefix}.group_{i}": members for i, members in enumerate(together) if members}
    grouped = {i for members in units.values() for i in members}
    units.update({f"{prefix}.gradient_{i}": [i] for i in present if i not in grouped})
    return units


class LocalVariables:
    """The variables whose gradients stay on this rank.

    scale_local_gradients: whether these are divided by the size of the process set: that is the gradient of the average
    of the ranks' losses with respect to what only this rank has.

    >>> local = LocalVariables(global_process_set); own = tf.Variable(1.0); local.add(own)
    >>> reduce = _make_allreduce_grads_fn("Example")
    >>> [float(grad) * hvd.size() for grad in local.around(reduce, [tf.constant(3.0)], [own])]
    [3.0]
    """

    def __init__(self, process_set: ProcessSet = global_process_set, scale_local_gradients: bool = True):
        self._process_set, self._scale = process_set, scale_local_gradients
        self._variables: Dict[int, Any] = {}  # by key; kept, so that no other variable gets the key

    def add(self, variable: Any) -> None:
        """Makes a variable local."""
        self._variables[key_of(variable)] = variable

    def __contains__(self, variable: Any) -> bool:
        return key_of(variable) in self._variables

    def __len__(self) -> int:
        return len(self._variables)

    def around(self, allreduce_grads: AllreduceGradients, grads: Sequence[Any], vars: Sequence[Any]) -> List[Any]:
        """Reduces the gradients of the other variables by allreduce_grads(grads, vars) and scales those of local ones.

        To allreduce_grads the local ones are not there: they are nothing to ranks that lack the variable.
        """
        if not self._variables:
            return compared(list(allreduce_grads(grads, vars)), vars, self._process_set)
        local = [variable in self for variable in vars]
        others = [pair for pair, here in zip(zip(grads, vars), local) if not here]
        theirs = [variable for _, variable in others]
        reduced = iter(compared(list(allreduce_grads([grad for grad, _ in others], theirs)), theirs, self._process_set))
        return [self._scaled(grad) if here else next(reduced) for grad, here in zip(grads, local)]

    def _scaled(self, grad):
        if grad is None or not self._scale or stays_here(self._process_set):
            return grad
        count = tf.cast(size_op(self._process_set.process_set_id), grad.dtype)  # an op: the world may grow
        if isinstance(grad, tf.IndexedSlices):
            return tf.IndexedSlices(grad.values / count, grad.indices, grad.dense_shape)
        return grad / count


def dense(grad: Any) -> Any:
    """IndexedSlices as a dense tensor; anything else as it is."""
    return tf.convert_to_tensor(grad) if isinstance(grad, tf.IndexedSlices) else grad


def key_of(variable: Any) -> int:
    """What identifies a variable: the same for a variable of Keras 3 and the tf.Variable it holds."""
    inner = getattr(variable, "_value", None)
    return id(variable if inner is None else inner)


def name_of(variable: Any) -> str:
    """A variable's name in its model: Keras 3's path, or the name without ":0"."""
    return getattr(variable, "path", None) or variable.name.rpartition(":")[0] or variable.name


def is_variable(thing: Any) -> bool:
    """Whether it is a tf.Variable or holds one, as Keras 3's variables do."""
    return isinstance(getattr(thing, "_value", thing), tf.Variable)
