"""What compression has left behind of an optimizer's gradients: in its state_dict, from all ranks, in numbers."""
from typing import Any, Dict, Optional

from lightcc.compress import codec
from lightcc.compress.residuals import KEY
from lightcc.core.wrapper_class import is_made_with


class SavedResiduals:
    """A base of _DistributedOptimizer: state_dict and load_state_dict with what compression has left behind."""

    _as_plain: Any
    _reducer: Any

    def state_dict(self, *args, **kwargs):
        """The optimizer's own, and "lightcc_residuals": what compression has left behind on this rank, or after
        hvd.gather_residuals on all ranks. A plain optimizer loads it too, and does not look at that."""
        state = self._as_plain.state_dict(*args, **kwargs)
        compressed = self._reducer and self._reducer.compressed
        residuals = compressed and compressed.to_save()
        return {**state, KEY: residuals} if residuals else state

    def load_state_dict(self, state_dict, *args, **kwargs) -> None:
        """The optimizer's own, and what is in "lightcc_residuals"; what is not begins at zero, which is logged."""
        self._as_plain.load_state_dict({key: value for key, value in state_dict.items() if key != KEY}, *args, **kwargs)
        if self._reducer and self._reducer.compressed:
            self._reducer.compressed.load(state_dict.get(KEY))


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
    reducer = _reducer_of(optimizer, "gather_residuals")
    if optimizer._waiting():
        raise ValueError("gather_residuals: gradients are on their way; call synchronize() or step() first.")
    return reducer.compressed.gather() if reducer and reducer.compressed else None


def share_residuals(optimizer) -> None:
    """Gives all ranks what compression has left behind on any of them, after the members of the job have changed. All
    ranks call it; it does nothing for another optimizer, and for one that compresses nothing. What ranks that are gone
    had left behind begins at zero.

    >>> share_residuals(torch.optim.SGD([torch.ones(1, requires_grad=True)], lr=0.1))
    """
    reducer = optimizer._reducer if is_made_with(SavedResiduals, optimizer) else None
    if reducer and reducer.compressed:
        saved = reducer.compressed.gather()
        if saved:
            reducer.compressed.load({**saved, "size": len(saved["ranks"])})  # those that are there are all


def compression_stats(optimizer=None) -> Dict[str, Any]:
    """What Compression.topk and int8 have done on this rank for an optimizer since it was made or last loaded.

    optimizer: a DistributedOptimizer; None: all that this process compresses. Returns a dict:
    gradient_bytes of the tensors that were exchanged compressed; sent_bytes to other nodes for them; dense_sent_bytes,
    what would have been sent without compression; ratio of these two, 1 if nothing was sent; density, the share of
    elements that were sent; residual_norm, the Euclidean norm of what is left behind here; dense, why gradients travel
    dense, or "". ValueError for another optimizer.

    >>> hvd.compression_stats()["ratio"]
    1.0
    """
    if optimizer is None:
        return codec.all_stats()
    reducer = _reducer_of(optimizer, "compression_stats")
    if reducer is None:
        return codec.stats([], "this rank exchanges no gradients")
    if reducer.compressed is None:
        return codec.stats([], "the optimizer compresses nothing")
    return reducer.compressed.stats()


def _reducer_of(optimizer, what: str):
    if not is_made_with(SavedResiduals, optimizer):
        raise ValueError(f"{what}: give a DistributedOptimizer, not a {type(optimizer).__name__}.")
    return optimizer._reducer
