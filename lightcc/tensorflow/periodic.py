"""LocalSGD and DiLoCo for loops of TensorFlow: objects that are told of each step, and change variables between
steps."""
from typing import Any, List, Sequence

import numpy as np
import tensorflow as tf

from lightcc.compress.compressors import NoneCompressor
from lightcc.core.process_sets import ProcessSet, global_process_set
from lightcc.periodic import arrays


class PeriodicVariables:
    """What LocalSGD and DiLoCo return: call step() after each step of this rank's own optimizer."""

    def __init__(self, what: str, variables: Sequence[tf.Variable], exchange: arrays.ArrayExchange):
        self._what, self._variables, self._exchange = what, list(variables), exchange
        if not self._variables:
            raise ValueError(f"{what}: there are no variables; build the model first.")
        self._expect_eager()

    def before_step(self) -> None:
        """Takes the variables' values as those from which all ranks begin. Must come before the first step; step()
        does itself what else is to be done before one."""
        self._expect_eager()
        if not self._exchange.started:
            labels = [str(getattr(v, "path", None) or v.name) for v in self._variables]
            self._exchange.start(self._read, self._write, labels)
        self._exchange.before_step()

    def step(self) -> None:
        """Counts a step that this rank has made, and exchanges what is due after it. RuntimeError without before_step.
        """
        self._expect_eager()
        if not self._exchange.started:
            raise RuntimeError(f"{self._what}: step() comes after a step; call before_step() before the first one.")
        self._exchange.before_step()
        self._exchange.after_step()

    def exchange_now(self) -> None:
        """All ranks get the average of their values, as at the end. All ranks call it."""
        self.before_step()
        self._exchange.now()

    def _read(self, indices: Sequence[int]) -> List[np.ndarray]:
        return [np.array(self._variables[index].numpy(), order="C") for index in indices]

    def _write(self, indices: Sequence[int], values: Sequence[np.ndarray]) -> None:
        for index, value in zip(indices, values):
            self._variables[index].assign(value)

    def _expect_eager(self) -> None:
        if not tf.executing_eagerly():
            raise ValueError(f"{self._what} works between steps, in eager mode: call it outside of tf.function and "
                             "without tf.compat.v1's graphs.")


def LocalSGD(variables: Sequence[Any], sync_every: int, delay: int = 0,
             process_set: ProcessSet = global_process_set) -> PeriodicVariables:
    """Averages variables over the ranks after every `sync_every` steps (docs/fewer_exchanges.md).

    variables: tf.Variables or Keras's, the same on all ranks and with the same values (broadcast_variables); those of
    optimizers are each rank's own. delay: the exchange runs behind so many further steps, and then each rank adds what
    the average was away from its own. Values travel through the host's memory.
    Returns an object with before_step(), for before the first step; step(), for after each; and exchange_now().
    Errors: ValueError for arguments out of their ranges, no variables, in graphs, and on all ranks if they differ in
    settings; those of allreduce. join() is refused, as a rank that has joined would add zeros.

    >>> weight = tf.Variable([0.0])
    >>> local = LocalSGD([weight], sync_every=2); local.before_step()
    >>> for step in range(2):
    ...     weight.assign_sub([hvd.rank() + 1.0]) and None; local.step()
    >>> float(weight[0]) == -(hvd.size() + 1)
    True
    """
    return PeriodicVariables("hvd.LocalSGD", variables, arrays.local_sgd("hvd.LocalSGD", sync_every, delay,
                                                                         process_set))


def DiLoCo(variables: Sequence[Any], sync_every: int = 100, fragments: int = 1, delay: int = 0,
           alpha: Any = None, outer_learning_rate: float = 0.7, outer_momentum: float = 0.9, nesterov: bool = True,
           compression: Any = NoneCompressor, process_set: ProcessSet = global_process_set) -> PeriodicVariables:
    """Exchanges outer gradients of variables after every `sync_every` steps (docs/fewer_exchanges.md).

    variables: as of LocalSGD. The outer optimizer is SGD with these arguments. compression: hvd.Compression.topk(...)
    or int8(), with what they leave behind. Others: those of lightcc.torch's DiLoCo. Memory of the host: three copies.
    In each new world of an elastic job the outer optimizer begins anew from the variables.
    Returns an object as LocalSGD does. Errors: as of LocalSGD, and ValueError for another compression.

    >>> weight = tf.Variable([0.0])
    >>> outer = DiLoCo([weight], sync_every=1, outer_learning_rate=1.0, outer_momentum=0.0, nesterov=False)
    >>> outer.before_step(); weight.assign_sub([hvd.rank() + 1.0]) and None; outer.step()
    >>> float(weight[0]) == -(hvd.size() + 1) / 2
    True
    """
    exchange = arrays.diloco("hvd.DiLoCo", sync_every, fragments, delay, alpha, outer_learning_rate, outer_momentum,
                             nesterov, compression, process_set)
    return PeriodicVariables("hvd.DiLoCo", variables, exchange)
