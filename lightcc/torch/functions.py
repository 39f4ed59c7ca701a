"""Making the ranks equal at the start: parameters, optimizer state, any object. Names as in horovod.torch.functions."""
from typing import Any, Dict, Iterator, List, Mapping, NamedTuple, Optional, Tuple

import torch

from lightcc.core import lib, objects, ops
from lightcc.core.objects import broadcast_object
from lightcc.torch.mpi_ops import (  # noqa: F401  as Horovod's module has them
    ProcessSet,
    allgather,
    broadcast_,
    broadcast_async_,
    global_process_set,
    rank,
    size,
    synchronize,
)
from lightcc.torch.sparse import in_form


def allgather_object(obj, name=None):
    """Returns the objects of all ranks, in rank order; pickled with cloudpickle. Errors as for allgather.

    >>> hvd.allgather_object(hvd.rank()) == list(range(hvd.size()))
    True
    """
    return objects.allgather_object(obj, name)


def broadcast_parameters(params, root_rank):
    """Overwrites parameters with the root's, in place.

    params: a dict such as model.state_dict() (sent in the order of its keys), a list of tensors or of (name, tensor),
    or an iterator of such, like model.named_parameters(). Any strided layout, any dtype, also complex.
    root_rank: a world rank.
    Errors: ValueError for anything else; those of broadcast_async_.

    >>> model = torch.nn.Linear(2, 2); hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    """
    if isinstance(params, Mapping):
        named = sorted(params.items(), key=lambda entry: str(entry[0]))
    elif isinstance(params, (list, Iterator)):
        named = [entry if isinstance(entry, tuple) else (None, entry) for entry in params]
    else:
        raise ValueError("broadcast_parameters: give a dict, a list or an iterator of tensors or of (name, tensor), "
                         f"not a {type(params).__name__}.")
    for entry in named:
        if len(entry) != 2 or not isinstance(entry[1], torch.Tensor):
            raise ValueError(f"broadcast_parameters: {entry[0]!r} is not a tensor but a "
                             f"{type(entry[-1]).__name__}; send it with broadcast_object.")
        if entry[1].layout is not torch.strided:
            raise ValueError(f"broadcast_parameters: {entry[0]!r} has layout {entry[1].layout}; give tensors that are "
                             "dense.")
    _broadcast_in_place(named, root_rank)


def _broadcast_in_place(named: List[Tuple[Any, torch.Tensor]], root_rank: int) -> None:
    handles: List[int] = []
    with torch.no_grad():
        sent = [(tensor, tensor.contiguous()) for _, tensor in named]
        try:
            for (name, _), (_, dense) in zip(named, sent):
                handles.append(ops.broadcast_async_(_sendable(dense), root_rank, None if name is None else str(name)))
        finally:  # if one is refused, the others still write to their tensors
            for handle in handles:
                ops.synchronize(handle)
            for _, (tensor, dense) in zip(handles, sent):  # only now: they may be views of each other
                if dense is not tensor:
                    tensor.copy_(dense)


def _sendable(dense: torch.Tensor) -> torch.Tensor:
    """The tensor, or its bytes if the core does not know its dtype."""
    return dense if dense.dtype in _DTYPES else dense.view(-1).view(torch.uint8)


_DTYPES = {getattr(torch, name) for name in lib.DTYPES if hasattr(torch, name)}


class _Tensor(NamedTuple):
    """Stands for a tensor in a pickled state; the tensor itself follows by broadcast."""
    shape: Tuple[int, ...]
    stride: Tuple[int, ...]
    dtype: torch.dtype
    on_cpu: bool


def broadcast_optimizer_state(optimizer, root_rank, model=None):
    """Makes the state and the options (learning rate, ...) of the optimizer equal to the root's on every rank.

    Tensors are overwritten in place where there are some of the right shape; a state or option that the root has and
    another rank not is made there, one that the root does not have is removed. If the root has no state yet, parameters
    without gradient get zeros, as in Horovod; unlike there, no step is made with them, so that parameters and the
    count of steps stay. model: tells which embeddings are sparse, and so get a sparse gradient. What the root's
    DelayedGradients, LocalSGD or DiLoCo has under way becomes that of all ranks.
    Errors: on every rank, ValueError for LBFGS and if the ranks' parameters differ in number.

    >>> optimizer = torch.optim.Adam([torch.ones(2, requires_grad=True)], lr=0.1 * (hvd.rank() + 1))
    >>> hvd.broadcast_optimizer_state(optimizer, root_rank=0); optimizer.param_groups[0]["lr"]
    0.1
    """
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError("broadcast_optimizer_state: the state of LBFGS cannot be broadcast; create it on all ranks "
                         "after broadcast_parameters.")
    sizes = allgather_object([len(group["params"]) for group in optimizer.param_groups],
                             "broadcast_optimizer_state.sizes")
    if any(other != sizes[0] for other in sizes):
        raise ValueError("broadcast_optimizer_state: the ranks have other numbers of parameters in their groups: "
                         + ", ".join(f"rank {i} {size}" for i, size in enumerate(sizes)) + ".")
    params = [p for group in optimizer.param_groups for p in group["params"]]
    index = {id(p): i for i, p in enumerate(params)}
    state = {index.get(id(key), key): value for key, value in optimizer.state.items()}
    options = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    own = getattr(optimizer, "_own_state", None)  # of DelayedGradients, LocalSGD and DiLoCo
    mine = {"options": options, "state": state, "own": own() if own and rank() == root_rank else None}
    outline = broadcast_object(_outline(mine), root_rank, "broadcast_optimizer_state")
    tensors: List[torch.Tensor] = []
    theirs = mine if rank() == root_rank else _received_into(outline, mine, params)
    _collect(theirs, tensors)
    _broadcast_in_place([(f"broadcast_optimizer_state.{i}", tensor) for i, tensor in enumerate(tensors)], root_rank)
    if rank() != root_rank:
        for group, new in zip(optimizer.param_groups, theirs["options"]):
            for key in group.keys() - new.keys() - {"params"}:
                del group[key]
            group.update(new)
        optimizer.state.clear()
        for key, value in theirs["state"].items():
            optimizer.state[params[key] if isinstance(key, int) else key] = value
    if own:
        optimizer._load_own_state(theirs["own"])  # on the root too, whose names of what it sends must stay theirs
    if not theirs["state"]:
        _make_gradients(params, model, isinstance(optimizer, torch.optim.SparseAdam))


def _make_gradients(params: List[torch.Tensor], model: Optional[torch.nn.Module], all_sparse: bool) -> None:
    """Zeros for the parameters that have no gradient."""
    modules = model.modules() if model is not None else ()
    sparse = {id(m.weight) for m in modules
              if isinstance(m, (torch.nn.Embedding, torch.nn.EmbeddingBag)) and m.sparse}
    for p in params:
        if p.requires_grad and p.grad is None:
            if all_sparse or id(p) in sparse:
                p.grad = in_form(None, 1, p)
            else:
                p.grad = torch.zeros_like(p)


def _outline(value: Any) -> Any:
    """The value with a _Tensor in place of each tensor."""
    def stand_in(tensor: torch.Tensor) -> _Tensor:
        dense = torch.empty_like(tensor, device="meta")  # keeps a layout without holes, for any other a plain one
        return _Tensor(tuple(tensor.shape), dense.stride(), tensor.dtype, tensor.is_cpu)

    return _map(value, stand_in, torch.Tensor)


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


def _received_into(outline: Dict[str, Any], mine: Dict[str, Any], params: List[torch.Tensor]) -> Dict[str, Any]:
    """The outline with tensors to receive into. What the root has on a GPU is made where its parameter is."""
    first = params[0].device if params else torch.device("cpu")
    state = {key: _filled(entry, mine["state"].get(key), params[key].device if isinstance(key, int) else first)
             for key, entry in outline["state"].items()}
    return {"options": _filled(outline["options"], mine["options"], first), "state": state,
            "own": _filled(outline.get("own"), None, first)}


def _filled(outline: Any, mine: Any, device: torch.device) -> Any:
    """The outline with tensors to receive into: mine where they fit, else new ones."""
    if isinstance(outline, _Tensor):
        wanted = outline.shape, outline.dtype, outline.on_cpu
        fits = isinstance(mine, torch.Tensor) and (mine.shape, mine.dtype, mine.is_cpu) == wanted
        return mine if fits else torch.empty_strided(outline.shape, outline.stride, dtype=outline.dtype,
                                                     device="cpu" if outline.on_cpu else device)
    if isinstance(outline, Mapping):
        have: Dict[Any, Any] = mine if isinstance(mine, Mapping) else {}
        return {key: _filled(entry, have.get(key), device) for key, entry in outline.items()}
    if type(outline) in (list, tuple):
        some = mine if type(mine) is type(outline) and len(mine) == len(outline) else [None] * len(outline)
        return type(outline)(_filled(entry, own, device) for entry, own in zip(outline, some))
    return outline
