"""Making the ranks equal at the start: parameters, optimizer state, any object. Names as in horovod.torch.functions."""
from typing import Any, Dict, List, Mapping, NamedTuple, Tuple

import torch

from lightcc import objects, ops
from lightcc.objects import broadcast_object
from lightcc.torch.mpi_ops import rank


def allgather_object(obj, name=None):
    """Returns the objects of all ranks, in rank order; pickled with cloudpickle. Errors as for allgather.

    >>> hvd.allgather_object(hvd.rank()) == list(range(hvd.size()))
    True
    """
    return objects.allgather_object(obj, name)


def broadcast_parameters(params, root_rank):
    """Overwrites parameters with the root's, in place.

    params: a dict such as model.state_dict() (sent in the order of its keys), or a list of tensors or of
    (name, tensor), such as model.named_parameters(). Tensors need not be contiguous. root_rank: a world rank.
    Errors: ValueError for anything else; those of broadcast_async_.

    >>> model = torch.nn.Linear(2, 2); hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    """
    if isinstance(params, Mapping):
        named = sorted(params.items())
    elif isinstance(params, (str, torch.Tensor)):
        raise ValueError(f"broadcast_parameters: give a dict or a list of tensors, not a {type(params).__name__}.")
    else:
        try:
            named = [entry if isinstance(entry, tuple) else (None, entry) for entry in params]
        except TypeError as error:
            raise ValueError("broadcast_parameters: give a dict or a list of tensors, not a "
                             f"{type(params).__name__}.") from error
    for entry in named:
        if len(entry) != 2 or not isinstance(entry[1], torch.Tensor):
            raise ValueError(f"broadcast_parameters: {entry[0]!r} is not a tensor; send it with broadcast_object.")
    _broadcast_in_place(named, root_rank)


def _broadcast_in_place(named: List[Tuple[Any, torch.Tensor]], root_rank: int) -> None:
    with torch.no_grad():
        sent = [(tensor, tensor.contiguous()) for _, tensor in named]
        handles = [ops.broadcast_async_(dense, root_rank, name) for (name, _), (_, dense) in zip(named, sent)]
        for handle, (tensor, dense) in zip(handles, sent):
            ops.synchronize(handle)
            if dense is not tensor:
                tensor.copy_(dense)


class _Tensor(NamedTuple):
    """Stands for a tensor in a pickled state; the tensor itself follows by broadcast."""
    shape: Tuple[int, ...]
    dtype: torch.dtype


def broadcast_optimizer_state(optimizer, root_rank, model=None):
    """Makes the state and the options (learning rate, ...) of the optimizer equal to the root's on every rank.

    Tensors are overwritten in place where there are some of the right shape; a state that the root has and another rank
    not is made there; nothing is made that the root does not have. model: not needed; Horovod has it.
    Errors: ValueError for LBFGS and if the ranks' parameters differ in number.

    >>> optimizer = torch.optim.Adam([torch.ones(2, requires_grad=True)], lr=0.1 * (hvd.rank() + 1))
    >>> hvd.broadcast_optimizer_state(optimizer, root_rank=0); optimizer.param_groups[0]["lr"]
    0.1
    """
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError("broadcast_optimizer_state: the state of LBFGS cannot be broadcast; create it on all ranks "
                         "after broadcast_parameters.")
    params = [p for group in optimizer.param_groups for p in group["params"]]
    index = {id(p): i for i, p in enumerate(params)}
    state = {index.get(id(key), key): value for key, value in optimizer.state.items()}
    options = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    mine = {"sizes": [len(group["params"]) for group in optimizer.param_groups], "options": options, "state": state}
    outline = broadcast_object(_outline(mine), root_rank, "optimizer_state")
    if outline["sizes"] != mine["sizes"]:
        raise ValueError(f"broadcast_optimizer_state: rank {root_rank} has {outline['sizes']} parameters in its "
                         f"groups, rank {rank()} {mine['sizes']}.")
    tensors: List[torch.Tensor] = []
    theirs = mine if rank() == root_rank else _filled(outline, mine)
    _collect(theirs, tensors)
    _broadcast_in_place([(f"optimizer_state.{i}", tensor) for i, tensor in enumerate(tensors)], root_rank)
    if rank() != root_rank:
        for group, new in zip(optimizer.param_groups, theirs["options"]):
            group.update(new)
        optimizer.state.clear()
        for key, value in theirs["state"].items():
            optimizer.state[params[key] if isinstance(key, int) else key] = value


def _outline(value: Any) -> Any:
    """The value with a _Tensor in place of each tensor."""
    return _map(value, lambda tensor: _Tensor(tuple(tensor.shape), tensor.dtype), torch.Tensor)


def _collect(value: Any, tensors: List[torch.Tensor]) -> None:
    _map(value, tensors.append, torch.Tensor)


def _map(value: Any, function, kind: type) -> Any:
    """Applies a function to all instances of `kind` in nested dicts, lists and tuples."""
    if isinstance(value, kind):
        return function(value)
    if isinstance(value, Mapping):
        return {key: _map(entry, function, kind) for key, entry in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_map(entry, function, kind) for entry in value)
    return value


def _filled(outline: Any, mine: Any) -> Any:
    """The outline with tensors to receive into: mine where they fit, else new ones."""
    if isinstance(outline, _Tensor):
        fits = isinstance(mine, torch.Tensor) and _outline(mine) == outline
        return mine if fits else torch.empty(outline.shape, dtype=outline.dtype)
    if isinstance(outline, Mapping):
        have: Dict[Any, Any] = mine if isinstance(mine, Mapping) else {}
        return {key: _filled(entry, have.get(key)) for key, entry in outline.items()}
    if type(outline) in (list, tuple):
        some = mine if type(mine) is type(outline) and len(mine) == len(outline) else [None] * len(outline)
        return type(outline)(_filled(entry, own) for entry, own in zip(outline, some))
    return outline
