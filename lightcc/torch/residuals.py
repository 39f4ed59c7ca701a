"""What compression has left behind of an optimizer's gradients: in its state_dict, from all ranks, in numbers."""
from typing import Any, Dict, List, Optional

from lightcc.compress import codec
from lightcc.compress.residuals import KEY, Saved
from lightcc.core.wrapper_class import is_made_with
from lightcc.torch.gradient_compression import GradientCompression


class SavedResiduals:
    """A base of _DistributedOptimizer: state_dict and load_state_dict with what compression has left behind."""

    _as_plain: Any
    _reducer: Any

    def state_dict(self, *args, **kwargs):
        """The optimizer's own, and "lightcc_residuals": what compression has left behind on this rank, or after
        hvd.gather_residuals on all ranks. A plain optimizer loads it too, and does not look at that."""
        state = self._as_plain.state_dict(*args, **kwargs)
        residuals = together([reducer.compressed.to_save() for reducer in self._compressing()])
        return {**state, KEY: residuals} if residuals else state

    def load_state_dict(self, state_dict, *args, **kwargs) -> None:
        """The optimizer's own, and what is in "lightcc_residuals"; what is not begins at zero, which is logged."""
        self._as_plain.load_state_dict({key: value for key, value in state_dict.items() if key != KEY}, *args, **kwargs)
        load_into(self._compressing(), state_dict.get(KEY))

    def _compressing(self) -> List[Any]:
        """The reducers of which the core compresses something; also those of an optimizer inside."""
        inside = getattr(self._as_plain, "_compressing", list)()
        return [*([self._reducer] if self._reducer and self._reducer.compressed else []), *inside]


def together(saved: List[Optional[Saved]]) -> Optional[Saved]:
    """What several reducers of this rank have left behind, of gradients with different names; None: nothing."""
    there = [one for one in saved if one]
    if len(there) == 1:
        return there[0]
    tensors = {name: tensor for one in there for name, tensor in one["tensors"].items()}
    return {**there[0], "tensors": tensors} if there else None


def load_into(reducers: List[Any], saved: Optional[Saved]) -> None:
    """Gives each reducer what was saved of its gradients, and the last one what is nobody's, of which that will say
    so."""
    rest = dict(saved["tensors"]) if saved else {}
    for reducer in reducers:
        names = rest.keys() if reducer is reducers[-1] else {gradient.given_name for gradient in reducer.gradients}
        of_reducer = {name: rest.pop(name) for name in list(rest) if name in names}
        reducer.compressed.load(saved and {**saved, "tensors": of_reducer})


def gather_residuals(optimizer) -> Optional[Dict[str, Any]]:
    """Gathers what compression has left behind on all ranks: until the next step, optimizer.state_dict() holds it all.

    optimizer: a DistributedOptimizer with Compression.topk or int8, between two steps. All ranks of its process set
    call it, before the rank that writes the checkpoint calls state_dict(). Memory on each rank: 4 bytes an element of
    each compressed gradient and node. Returns what state_dict() holds as "lightcc_residuals"; None if there is nothing.
    ValueError for another optimizer, and while gradients are on their way.

    >>> model = torch.nn.Linear(2, 1)
    >>> optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    >>> hvd.gather_residuals(optimizer), sorted(optimizer.state_dict())
    (None, ['param_groups', 'state'])
    """
    _expect_distributed(optimizer, "gather_residuals")
    if optimizer._waiting():
        raise ValueError("gather_residuals: gradients are on their way; call synchronize() or step() first.")
    return together([reducer.compressed.gather() for reducer in optimizer._compressing()])


def share_residuals(optimizer) -> None:
    """Gives all ranks what compression has left behind on any of them, after the members of the job have changed. All
    ranks call it; it does nothing for another optimizer, and for one that compresses nothing. What ranks that are gone
    had left behind begins at zero.

    >>> share_residuals(torch.optim.SGD([torch.ones(1, requires_grad=True)], lr=0.1))
    """
    for reducer in optimizer._compressing() if is_made_with(SavedResiduals, optimizer) else ():
        saved = reducer.compressed.gather()
        if saved:
            reducer.compressed.load({**saved, "size": len(saved["ranks"])})  # those that are there are all


def compression_stats(optimizer=None) -> Dict[str, Any]:
    """What Compression.topk and int8 have done on this rank for an optimizer since it was made or last loaded.

    optimizer: a DistributedOptimizer; None: all that this process compresses. Returns a dict:
    gradient_bytes of the tensors that were exchanged compressed; sent_bytes to other nodes for them; dense_sent_bytes,
    what would have been sent without compression; ratio of these two, 1 if nothing was sent; density, the share of
    elements that were sent; residual_norm, the Euclidean norm of what is left behind here; route, what has made the
    messages last: "host", "gpu" or "nccl" (a GPU, LIGHTCC_GPU_COMPRESSION, and the host or NCCL has exchanged them),
    "gpu, host" if that differs among tensors, "" if nothing has; dense, why gradients travel dense, or "". What is left
    behind on a GPU is read for it. ValueError for another optimizer.

    >>> hvd.compression_stats()["ratio"]
    1.0
    """
    if optimizer is None:
        return codec.all_stats()
    _expect_distributed(optimizer, "compression_stats")
    compressing = optimizer._compressing()
    if not compressing:
        return codec.stats([], "the optimizer compresses nothing" if optimizer._reducer else
                           "this rank exchanges no gradients")
    return GradientCompression.stats_of([reducer.compressed for reducer in compressing])


def _expect_distributed(optimizer, what: str) -> None:
    if not is_made_with(SavedResiduals, optimizer):
        raise ValueError(f"{what}: give a DistributedOptimizer, not a {type(optimizer).__name__}.")
