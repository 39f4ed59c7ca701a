"""Elastic training with PyTorch: the job goes on when workers are lost or come. docs/elastic.md has a program."""
from typing import Any, Callable

from lightcc.core.elastic_state import run_fn
from lightcc.torch.compiling import keep_out as _keep_out
from lightcc.torch.elastic.sampler import ElasticSampler
from lightcc.torch.elastic.state import TorchState
from lightcc.torch.mpi_ops import init, shutdown

__all__ = ["ElasticSampler", "TorchState", "init", "run", "run_fn", "shutdown"]


def run(func: Callable[..., Any]) -> Callable[..., Any]:
    """Decorates the function that trains, which takes the state first: it is called again whenever the members of the
    job have changed, with a state that all have.

    Before the first call all ranks get rank 0's state. A lost member (HorovodInternalError) takes the state back to the
    last commit; new or lost hosts, which state.commit() notices, leave it as it is. Then lightcc is initialised anew,
    so rank and size may have changed, reset callbacks run, all ranks get the state of rank 0, and the function begins
    again: it must look up in the state where it was. Returns what the function returns; any other exception ends this
    worker. Source: horovod.torch.elastic.

    >>> model = torch.nn.Linear(2, 1); optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    >>> @hvd.elastic.run
    ... def train(state):
    ...     while state.batch < 3:
    ...         optimizer.zero_grad(); model(torch.ones(1, 2)).sum().backward(); optimizer.step()
    ...         state.batch += 1
    ...         state.commit()
    ...     return state.batch
    >>> train(hvd.elastic.TorchState(model, optimizer, batch=0))
    3
    """
    return run_fn(func, _reset)


def _reset() -> None:
    shutdown()
    init()


_keep_out()
