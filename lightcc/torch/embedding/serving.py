"""A rank whose data have ended goes on answering for its rows, until all ranks' data have ended."""
from functools import partial
from typing import Any, Optional

from lightcc.core.process_sets import ProcessSet, global_process_set
from lightcc.embedding.serving import answer
from lightcc.torch.embedding import lookups
from lightcc.torch.embedding.pipeline import expect_none_waiting


def serve(dense: Optional[Any] = None, process_set: ProcessSet = global_process_set) -> None:
    """This rank has no more data: answers the lookups and updates of the others for the rows that it owns, and returns
    when all ranks of the process set serve. Use it where a job without tables has hvd.join().

    dense: the DistributedOptimizer of the dense parameters; while this rank has no data it makes a step for each of the
    others' steps, with gradients of zero, so that its weights stay theirs. None: there is none. The other ranks may do
    nothing else together meanwhile, but for lookups, steps, clip_grad_norm_ and evaluations of the process set's
    tables: other collectives of theirs (averages of a loss, GradScaler) would wait for this rank. All ranks must have
    the same tables, as in lookups. Averages still divide by all ranks. Ranks that prefetch call prefetch([]) in their
    last step; those that have a Pipeline, its finish() on all ranks before one serves.
    Errors: HorovodInternalError, if a rank has died or the others' calls fail on all ranks; ValueError for a process
    set without this rank, while updates of a Pipeline wait, and if the others have begun a step of `dense` by a lookup
    and ended without making it. Ctrl-C ends the job on all ranks.

    >>> from lightcc.torch import embedding as E
    >>> user = E.HashEmbedding(4, name="user"); E.serve()
    """
    if lookups.under_way():
        raise ValueError("serve: a batch was prefetched and not looked up. The other ranks would wait for it; look it "
                         "up, or call prefetch([]) in the last step.")
    expect_none_waiting(process_set)
    answer(process_set, None if dense is None else partial(_step, dense), lookups.served(process_set))


def _step(dense: Any) -> None:
    dense.zero_grad()
    dense.step()
