"""DistributedDataParallel and DistributedOptimizer around the same parameters: the one writes p.grad while the other
sends it, so that the weights of the ranks part. The second of the two is refused when it is made.

DDP leaves p.grad alone in its no_sync(). Who makes the optimizer inside it says that every backward pass is, too.
"""
import functools
import gc
import weakref
from typing import Any, Iterator, List

import torch
from torch.nn.parallel import DistributedDataParallel

_optimizers: "weakref.WeakSet[Any]" = weakref.WeakSet()
_modules: "weakref.WeakSet[DistributedDataParallel]" = weakref.WeakSet()
_WHAT_TO_DO = ("DistributedDataParallel writes p.grad while DistributedOptimizer sends it, and the weights of the "
               "ranks part. Use one of them: hvd.DistributedOptimizer around the plain model; or "
               "DistributedDataParallel with the plain optimizer, and lightcc.torch.ddp.comm_hook if lightcc is to "
               "average.")


def refuse_ddp(optimizer) -> List["weakref.ref[DistributedDataParallel]"]:
    """ValueError if a parameter that this new DistributedOptimizer exchanges is in a DistributedDataParallel. Returns
    those of them that are in no_sync() now."""
    _watch_modules()
    _optimizers.add(optimizer)
    around = _around(optimizer)
    if any(ddp.require_backward_grad_sync for ddp in around):
        around.clear()
        gc.collect()  # one that was dropped may be a part of a circle of references
        around = _around(optimizer)
    for ddp in around:
        expect_no_sync(ddp, optimizer)
    return [weakref.ref(ddp) for ddp in around]


def expect_no_sync(ddp, optimizer) -> None:
    """ValueError if that module, with parameters of the optimizer, would reduce gradients now. None: it is gone."""
    if ddp is not None and ddp.require_backward_grad_sync:
        raise ValueError(f"DistributedOptimizer: the parameter {next(_in_both(ddp.module, optimizer))} is in a "
                         f"DistributedDataParallel. {_WHAT_TO_DO} If every backward pass is inside ddp.no_sync(), make "
                         "the DistributedOptimizer inside it, too.")


def _around(optimizer) -> List[DistributedDataParallel]:
    return [ddp for ddp in list(_modules) if any(_in_both(ddp.module, optimizer))]


def _in_both(module: torch.nn.Module, optimizer) -> Iterator[str]:
    """The names of parameters that DistributedDataParallel(module) and an optimizer exchange."""
    ignored = getattr(module, "_ddp_params_and_buffers_to_ignore", ())
    exchanged = {p for group in optimizer.param_groups for p in group["params"] if id(p) not in optimizer._local}
    return (name for name, p in module.named_parameters() if p.requires_grad and name not in ignored and p in exchanged)


@functools.lru_cache(maxsize=None)  # once
def _watch_modules() -> None:
    """Finds the modules there are, and sees to it that later ones are known."""
    plain = DistributedDataParallel.__init__

    @functools.wraps(plain)
    def init(self, module, *arguments, **options):
        _refuse_optimizers(module)
        plain(self, module, *arguments, **options)
        _modules.add(self)

    DistributedDataParallel.__init__ = init  # type: ignore[method-assign]
    if torch.distributed.is_available() and torch.distributed.is_initialized():  # else there is none
        _modules.update(one for one in gc.get_objects() if issubclass(type(one), DistributedDataParallel))


def _refuse_optimizers(module: torch.nn.Module) -> None:
    """ValueError if DistributedDataParallel(module) would have a parameter that an optimizer exchanges."""
    if any(any(_in_both(module, optimizer)) for optimizer in list(_optimizers)):
        gc.collect()  # as above
    for optimizer in list(_optimizers):
        for name in _in_both(module, optimizer):
            raise ValueError(f"DistributedDataParallel: the parameter {name} is in a DistributedOptimizer of lightcc. "
                             f"{_WHAT_TO_DO}")
