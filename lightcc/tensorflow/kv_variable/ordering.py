"""The order of lookups and updates in a graph of TensorFlow 1's style, where operations that need nothing of each other
run in any order. All ranks must make them in the same one, so control dependencies fix it.

A function of TensorFlow 2 needs none of this: it runs what is stateful in the order of the program.
"""
import contextlib
import logging
from typing import Any, ContextManager, Dict, Iterable, List, Set

import tensorflow as tf

_LOOKUP = "LightccEmbeddingLookup"
_LAST, _UPDATE = "_lightcc_kv_lookups", "_lightcc_kv_update"  # attributes of a graph
_logger = logging.getLogger("lightcc")


def _is_graph() -> bool:
    return not tf.executing_eagerly() and not tf.compat.v1.get_default_graph().building_function


def after_earlier(ids: tf.Tensor) -> ContextManager[Any]:
    """Where a lookup comes after those before it in the graph that have ids of the same batch: from the same iterator
    or placeholder. Others may be of another part of the graph, which this one's run must not run too.

    >>> with after_earlier(tf.constant([3])): pass
    """
    if not _is_graph():
        return contextlib.nullcontext()
    last = _last()
    return tf.control_dependencies(list({last[source] for source in _sources(ids.op) if source in last}))


def remember(lookup: tf.Tensor, ids: tf.Tensor) -> None:
    """A lookup, by one of its outputs, for those that come later. One inside of a tf.cond may not run.

    >>> remember(tf.constant([1.0]), tf.constant([3]))
    """
    if _is_graph() and lookup.op._get_control_flow_context() is None:
        _last().update((source, lookup.op) for source in _sources(ids.op))


def in_order(needs: Iterable[Any]) -> List[Any]:
    """Has all lookups that some tensors need run in the order in which they were made, and returns the last of them,
    or nothing: what must come after all of them.

    >>> in_order([tf.constant(1.0)])
    []
    """
    tensors = [tensor for tensor in needs if tf.is_tensor(tensor)]
    if not tensors or not _is_graph():
        return []
    needed = ancestors(tensor.op for tensor in tensors)
    lookups = [op for op in tensors[0].graph.get_operations() if op.type == _LOOKUP and op in needed and
               op._get_control_flow_context() is None]
    for before, after in zip(lookups, lookups[1:]):
        if before not in after.control_inputs:
            after._add_control_input(before)
    return lookups[-1:]


def warn_of_two(update: Any, ranks: int) -> None:
    """If an update and the one made before it in its graph may run in any order, though ranks must agree.

    >>> warn_of_two(None, 1)
    """
    if not _is_graph():
        return
    before = getattr(update.graph, _UPDATE, None)
    setattr(update.graph, _UPDATE, update)
    if ranks > 1 and before is not None and before not in ancestors([update]):
        _logger.warning("A graph has two updates of kv variables, and nothing says which comes first; where one run "
                        "has both, make the second under tf.control_dependencies([first]).")


def _last() -> Dict[Any, Any]:
    graph = tf.compat.v1.get_default_graph()
    if not hasattr(graph, _LAST):
        setattr(graph, _LAST, {})
    return getattr(graph, _LAST)


def _sources(op: Any) -> Set[Any]:
    """Where a batch comes from: placeholders and what yields other values each time, as iterators do. None: nowhere."""
    return {one for one in ancestors([op]) if one.type.startswith("Placeholder") or _yields(one)} or {None}


def _yields(op: Any) -> bool:
    """Handles of variables, of iterators and of hash tables do not; all of a graph's parts may share them."""
    return op.op_def.is_stateful and any(tensor.dtype != tf.resource for tensor in op.outputs)


def ancestors(ops: Iterable[Any]) -> Set[Any]:
    """Everything these operations wait for, and themselves.

    >>> ancestors([])
    set()
    """
    found, waiting = set(), list(ops)
    while waiting:
        op = waiting.pop()
        if op not in found:
            found.add(op)
            waiting.extend(tensor.op for tensor in op.inputs)
            waiting.extend(op.control_inputs)
    return found
