"""Elastic training with TensorFlow: the job goes on when workers are lost or come. docs/elastic.md has a program."""
import contextlib
import re
from typing import Any, Callable, ContextManager, Iterator, List, Sequence, Tuple

import tensorflow as tf

from lightcc._keras.elastic import TensorFlowKerasState, VariablesState
from lightcc.core.elastic_state import ObjectState, run_fn, run_translated
from lightcc.core.exceptions import HorovodInternalError
from lightcc.tensorflow.functions import broadcast_object, broadcast_object_fn, broadcast_variables
from lightcc.tensorflow.gradient_aggregation import SUMS
from lightcc.tensorflow.mpi_ops import init, rank, shutdown

__all__ = ["HorovodInternalError", "ObjectState", "TensorFlowKerasState", "TensorFlowState", "broadcast_object",
           "broadcast_object_fn", "broadcast_variables", "init", "rank", "run", "run_fn", "shutdown"]

_OURS = re.compile(r"\b(Horovod|LightccEmbedding)[A-Z]\w*( on rank \d+)?: ")  # how the texts of our operations begin


def run(func: Callable[..., Any]) -> Callable[..., Any]:
    """Decorates the function that trains, which takes the state first: it is called again whenever the members of the
    job have changed, with a state that all have.

    As lightcc.torch.elastic.run, which describes it. A lost member is a tf.errors.UnknownError where a graph or a
    tf.function runs: one of lightcc's operations counts as HorovodInternalError. Source: horovod.tensorflow.elastic.

    >>> x = tf.Variable(0.0)
    >>> @hvd.elastic.run
    ... def train(state):
    ...     while state.batch < 3:
    ...         x.assign_add(hvd.allreduce(tf.constant(2.0)))
    ...         state.batch += 1
    ...         state.commit()
    ...     return float(x)
    >>> train(hvd.elastic.TensorFlowState([x], batch=0))
    6.0
    """
    return run_translated(func, _reset, _translated)


class TensorFlowState(VariablesState):
    """The state of some variables, and of plain values as in ObjectState.

    variables: tf.Variable, or Keras variables that have been built; those of tables of embeddings bring these along;
    default: the global variables of a v1 graph, and none in eager mode. session: of the v1 graph that the variables are
    in, in which they have been initialised; default tf.compat.v1.get_default_session(). kwargs: plain values.
    Errors: ValueError for variables of a graph without a session; from sync() if the ranks' variables differ.
    Source: horovod.tensorflow.elastic.

    >>> x = tf.Variable(1.0)
    >>> state = hvd.elastic.TensorFlowState([x], batch=0)
    >>> x.assign(2.0); state.batch = 1; state.restore(); float(x), state.batch  # doctest: +ELLIPSIS
    <tf.Variable ...>
    (1.0, 0)
    """

    def __init__(self, variables=None, session=None, **kwargs: Any):
        self.variables = list(tf.compat.v1.global_variables() if variables is None else variables)
        self.session = session or tf.compat.v1.get_default_session()
        if self.session is None and not tf.executing_eagerly():
            raise ValueError("TensorFlowState: variables of a graph live in a session; give session=.")
        super().__init__(_Session(self.session) if self.session else None, **kwargs)

    def reset(self) -> None:
        """Drops the gradients that a v1 optimizer adds up for backward_passes_per_step: of the world before."""
        self._drop_sums()

    def own_variables(self) -> List[Any]:
        return self.variables

    def _keep_own(self) -> None:
        with self._graph():
            super()._keep_own()

    def _give_own_back(self) -> None:
        with self._graph():
            super()._give_own_back()
        self._drop_sums()

    def _make_own_equal(self) -> None:
        with self._graph():
            super()._make_own_equal()

    def _drop_sums(self) -> None:
        if self.session:
            for variable in self.session.graph.get_collection(SUMS):
                self.session.run(variable.initializer)

    def _graph(self) -> ContextManager[Any]:
        return self.session.graph.as_default() if self.session else contextlib.nullcontext()


class _Session:
    """Reads and writes variables as keras.backend does. Their graph is not changed: it may be finalized."""

    def __init__(self, session: Any):
        self._session = session

    def batch_get_value(self, variables: List[Any]) -> List[Any]:
        return self._session.run(variables)

    def batch_set_value(self, pairs: Sequence[Tuple[Any, Any]]) -> None:
        for variable, value in pairs:  # by its initializer, which is fed
            self._session.run(variable.initializer, {variable.initializer.inputs[1]: value})


@contextlib.contextmanager
def _translated() -> Iterator[None]:
    try:
        yield
    except tf.errors.UnknownError as error:
        if isinstance(error, HorovodInternalError) or not _OURS.search(error.message):
            raise
        raise HorovodInternalError(error.message) from error


def _reset() -> None:
    shutdown()
    init()
