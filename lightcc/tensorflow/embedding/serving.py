"""A rank whose data have ended goes on answering for its rows: lightcc.embedding.serving says how."""
from typing import Any, Callable, Optional

from lightcc.core.process_sets import ProcessSet, global_process_set
from lightcc.embedding.serving import answer
from lightcc.tensorflow.embedding.optimizers import TableOptimizer


def serve(dense: Optional[Callable[[], Any]] = None, sparse: Optional[TableOptimizer] = None,
          process_set: ProcessSet = global_process_set) -> None:
    """This rank has no more data: answers the lookups and updates of the others for the rows that it owns, and returns
    when all ranks of the process set serve. Use it where a job without tables has hvd.join().

    dense: what this rank does for each of the others' steps: a function, called in a thread, that reduces gradients of
    zero under the names that the step has and applies them. A DistributedGradientTape takes its names from the graph:
    there give a tf.function, if the step is in one. None: there is nothing. sparse: the optimizer of tables, which
    counts the others' updates. The other ranks may do nothing else together meanwhile, but for lookups and updates of
    the process set's tables: other collectives of theirs (averages of a loss, commits) would wait for this rank.
    Averages still divide by all ranks.
    Errors: HorovodInternalError, if a rank has died or the others' calls fail on all ranks; what `dense` raises;
    ValueError for a process set without this rank, and if the others have looked up rows to train them and ended
    without their dense step.

    >>> from lightcc.tensorflow import embedding as E
    >>> user = E.HashEmbedding(4, name="user"); E.serve()
    """
    answer(process_set, dense, updated=lambda: sparse is not None and sparse.iterations.assign_add(1))
