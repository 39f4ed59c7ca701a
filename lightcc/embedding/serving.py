"""A rank whose data have ended goes on answering for its rows, until all ranks' data have ended; of no framework."""
import threading
from typing import Callable, List, Optional

from lightcc.core.process_sets import ProcessSet
from lightcc.embedding import exchange, lib

_LAST_STEP_S = 30  # in which a dense step ends that others make, too


def _nothing() -> None:
    pass


def answer(process_set: ProcessSet, dense: Optional[Callable[[], None]] = None,
           begun: Optional[List[exchange.Served]] = None, updated: Callable[[], None] = _nothing) -> None:
    """Takes part in the others' calls until all ranks of the process set do so.

    dense: makes this rank's part in a dense step of the others, with gradients of zero; in a thread. begun: calls in
    which this rank takes part already. updated: called after each update of tables.
    Errors: HorovodInternalError, if a rank has died or the others' calls fail on all ranks; what `dense` raises;
    ValueError for a process set without this rank, and if the others have begun a step by a lookup and ended without
    making their part of the dense one.

    >>> from lightcc.core.process_sets import global_process_set
    >>> answer(global_process_set)
    """
    steps, begun = _Steps(dense), begun or []
    try:
        while (served := (begun.pop(0) if begun else exchange.Served(process_set)).finish()) != lib.SERVED_END:
            if served == lib.SERVED_TRAINING:
                steps.begin()
            elif served in (lib.SERVED_UPDATE, lib.SERVED_APPLY):
                steps.of_tables_done()
                updated()
    except BaseException:
        steps.is_over()  # so that it does not go on beside what the caller does then
        raise
    if not steps.is_over():
        raise ValueError("serve: the other ranks have looked up rows to train them and ended without a step of the "
                         "dense optimizer, for which this rank waits. Evaluate without training (in PyTorch, in eval() "
                         "or under torch.no_grad(); in TensorFlow, with training=False), and drop() what was "
                         "prefetched in vain before the last step.")
    steps.wait()


class _Steps:
    """Calls dense() in a thread, once for each step of the others: a step begins with its first training lookup."""

    def __init__(self, dense: Optional[Callable[[], None]]):
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
        self._thread = threading.Thread(target=self._step, args=[self._dense], name="lightcc.embedding.serve",
                                        daemon=True)
        self._thread.start()

    def of_tables_done(self) -> None:
        self._begun = False

    def is_over(self) -> bool:
        """At the end, whether no dense step is under way. One that all ranks have made, or that fails with the others'
        calls, ends soon; one that the others have begun and not made waits for nobody."""
        if self._thread is not None:
            self._thread.join(_LAST_STEP_S)
        return self._thread is None or not self._thread.is_alive()

    def wait(self) -> None:
        """The dense step that is under way; raises what it failed with."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._failed:
            raise self._failed.pop()

    def _step(self, dense: Callable[[], None]) -> None:
        try:
            dense()
        except BaseException as error:  # wait() raises it in the thread of the caller
            self._failed.append(error)
