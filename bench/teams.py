"""Teams of processes that live as long as a benchmark: one works while the others sleep, each waiting at its pipe."""
import multiprocessing
import os
import traceback
from typing import Any, Callable, List

_context = multiprocessing.get_context("spawn")
_ANSWER_S = 300
_END_S = 20


class Team:
    """`size` processes that each make a worker, factory(rank, size, *arguments), and call its methods when asked."""

    def __init__(self, name: str, size: int, factory: Callable[..., Any], arguments: tuple):
        self.name = name
        self._start = _context.Barrier(size)
        pairs = [_context.Pipe() for _ in range(size)]
        self._pipes = [ours for ours, _ in pairs]
        self._processes = [_context.Process(target=_serve, daemon=True, args=(theirs, self._start, factory, rank, size,
                                                                              arguments))
                           for rank, (_, theirs) in enumerate(pairs)]
        for process, (_, theirs) in zip(self._processes, pairs):
            process.start()
            theirs.close()  # so that we see when the process has died
        self._answers()

    def ask(self, method: str, *arguments: Any) -> List[Any]:
        """The results of worker.method(*arguments), which all ranks begin together; RuntimeError if one fails."""
        for pipe in self._pipes:
            pipe.send((method, arguments))
        return self._answers()

    def end(self) -> None:
        for pipe in self._pipes:
            pipe.send((None, ()))
        for process in self._processes:
            process.join(_END_S)
            if process.is_alive():
                process.kill()

    def _answers(self) -> List[Any]:
        answers = []
        for rank, pipe in enumerate(self._pipes):
            try:
                if not pipe.poll(_ANSWER_S):
                    raise RuntimeError(f"{self.name}, rank {rank}: no answer for {_ANSWER_S} s")
                answer, failure = pipe.recv()
            except EOFError:
                raise RuntimeError(f"{self.name}, rank {rank}: the process has died") from None
            if failure:
                raise RuntimeError(f"{self.name}, rank {rank}:\n{failure}")
            answers.append(answer)
        return answers


def _serve(pipe, start, factory, rank: int, size: int, arguments: tuple) -> None:
    try:
        os.environ.update(OMP_NUM_THREADS="1")
        worker = factory(rank, size, *arguments)
        pipe.send((None, None))
        while True:
            method, arguments = pipe.recv()
            if method is None:
                return worker.end()
            start.wait(_ANSWER_S)
            pipe.send((getattr(worker, method)(*arguments), None))
    except Exception:
        pipe.send((None, traceback.format_exc()))


def become_rank(rank: int, size: int, folder: str) -> None:
    """Tells lightcc which rank this process is, as a launcher would. The folder, one for each job, names the job."""
    os.environ.update(HOROVOD_RANK=str(rank), HOROVOD_SIZE=str(size), HOROVOD_LOCAL_RANK=str(rank),
                      HOROVOD_LOCAL_SIZE=str(size), LIGHTCC_JOB_ID=folder.replace("/", "-"))
