"""A rank whose data have ended goes on answering for its rows, until all ranks' data have ended."""
import threading
from typing import Any, List, Optional

from lightcc.core.process_sets import ProcessSet, global_process_set
from lightcc.embedding import exchange, lib
from lightcc.torch.embedding import lookups


def serve(dense: Optional[Any] = None, process_set: ProcessSet = global_process_set) -> None:
    """This rank has no more data: answers the lookups and updates of the others for the rows that it owns, and returns
    when all ranks of the process set serve. Use it where a job without tables has hvd.join().

    dense: the DistributedOptimizer of the dense parameters; while this rank has no data it makes a step for each of the
    others' steps, with gradients of zero, so that its weights stay theirs. None: there is none. The other ranks may do
    nothing else together meanwhile, but for lookups, steps, clip_grad_norm_ and evaluations of the process set's
    tables: other collectives of theirs (averages of a loss, GradScaler) would wait for this rank. All ranks must have
    the same tables, as in lookups. Averages still divide by all ranks. The others must not
    prefetch.
    Errors: HorovodInternalError, if a rank has died or the others' calls fail on all ranks; ValueError for a process
    set without this rank. Ctrl-C ends the job on all ranks.

    >>> from lightcc.torch import embedding as E
    >>> user = E.HashEmbedding(4, name="user"); E.serve()
    """
    if lookups.under_way():
        raise ValueError("serve: a batch was prefetched and not looked up. The other ranks would wait for it; look it "
                         "up, or make steps without ids instead of serve().")
    steps = _Steps(dense)
    try:
        while (served := exchange.serve_one(process_set)) != lib.SERVED_END:
            if served == lib.SERVED_TRAINING:
                steps.begin()
            elif served in (lib.SERVED_UPDATE, lib.SERVED_APPLY):
                steps.of_tables_done()
    finally:
        steps.wait()


class _Steps:
    """Runs dense.step() in a thread, once for each step of the others: a step begins with its first training lookup."""

    def __init__(self, dense: Optional[Any]):
        self._dense = dense
        self._thread: Optional[threading.Thread] = None
        self._failed: List[BaseException] = []
        self._begun = False

    def begin(self) -> None:
        """A training lookup: of a new step, if tables were updated since the last one."""
        if self._begun or self._dense is None:
            return
        self.wait()
        self._begun = True
        self._thread = threading.Thread(target=self._step, args=[self._dense], name="lightcc.embedding.serve")
        self._thread.start()

    def of_tables_done(self) -> None:
        self._begun = False

    def wait(self) -> None:
        """The dense step that is under way; raises what it failed with."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._failed:
            raise self._failed.pop()

    def _step(self, dense: Any) -> None:
        try:
            dense.zero_grad()
            dense.step()
        except BaseException as error:  # wait() raises it in the thread of the caller
            self._failed.append(error)
