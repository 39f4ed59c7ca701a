"""check_weights: whether the ranks hold the same parameters, of PyTorch.

The digest of a tensor is, of its n values as integers of the same bits and in 64-bit arithmetic that wraps,
    sum over i of h (2 h + 1),   h = value i + K i.
h (2 h + 1) is a permutation of the integers of 64 bits (as in the cipher RC6), so that no change of one value goes
unseen; K i makes a value count otherwise in each place. It is a sum of integers: the same in any order, on any device.
"""
from typing import Any, Dict, Iterable, List, Mapping, Sequence, Tuple, Union

import torch

from lightcc.core import weights
from lightcc.core.process_sets import ProcessSet, global_process_set
from lightcc.core.wrapper_arguments import stays_here

_K = -0x61C8864680B583EB  # 2^64 divided by the golden ratio, as a signed integer
_CHUNK = 1 << 18          # values at once: their integers of 64 bits fit a cache
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_places: Dict[torch.device, torch.Tensor] = {}


def check_weights(model: Union[torch.nn.Module, Mapping[str, Any], Iterable[Tuple[str, torch.Tensor]]],
                  process_set: ProcessSet = global_process_set) -> None:
    """Compares the weights of all ranks, bit by bit, by digests of 8 bytes; all ranks of the set must call it.

    model: a module, whose parameters are compared; or a dictionary, as model.state_dict(), or pairs (name, tensor), of
    which all tensors are: buffers too, which differ where batch normalisation is each rank's own. Tensors: any dtype,
    layout and device. HOROVOD_CHECK_WEIGHTS=n has DistributedOptimizer compare its parameters every n exchanges of
    gradients (docs/troubleshooting.md).

    Errors: RuntimeError on all ranks, with the names that differ and the ranks that hold the same; those of allgather.

    >>> hvd.check_weights({"weight": torch.ones(2, 3)})
    """
    if isinstance(model, torch.nn.Module):
        named: Iterable[Tuple[str, Any]] = model.named_parameters()
    else:
        named = model.items() if isinstance(model, Mapping) else model
    if not stays_here(process_set):
        weights.compare(digests([(name, value) for name, value in named if isinstance(value, torch.Tensor)]),
                        "check_weights", process_set)


def check_parameters(optimizer: torch.optim.Optimizer, names: Dict[torch.Tensor, str], local: Iterable[int],
                     exchange: int, process_set: ProcessSet) -> None:
    """check_weights of an optimizer's parameters but for those whose ids are local; an error names the exchange."""
    parameters = [p for group in optimizer.param_groups for p in group["params"] if id(p) not in local]
    named = [(names.get(p, f"parameter {i}"), p) for i, p in enumerate(parameters)]
    weights.compare(digests(named), weights.at(exchange), process_set)


def digests(named: Sequence[Tuple[str, torch.Tensor]]) -> Dict[str, int]:
    """By name the digests of tensors.

    >>> digests([("a", torch.tensor([0])), ("b", torch.tensor([1]))])
    {'a': 0, 'b': 3}
    """
    found: List[torch.Tensor] = [_digest(tensor.detach()) for _, tensor in named]
    by_device: Dict[torch.device, List[int]] = {}
    for i, digest in enumerate(found):
        by_device.setdefault(digest.device, []).append(i)
    values = [0] * len(found)
    for indices in by_device.values():  # one copy from each device
        for i, value in zip(indices, torch.stack([found[i] for i in indices]).tolist()):
            values[i] = value
    return {name: value for (name, _), value in zip(named, values)}


def _digest(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of one int64, on the same device."""
    if tensor.layout is not torch.strided:
        tensor = tensor.to_dense()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    bits = tensor.resolve_neg().contiguous().view(-1).view(_INTEGERS[tensor.element_size()])
    places = _places_on(tensor.device)
    total = places.new_zeros(())
    for start in range(0, bits.numel(), _CHUNK):
        values = bits[start:start + _CHUNK]
        h = torch.add(places[:len(values)], values)
        if start:
            h += _wrapped(start * _K)
        total += h.addcmul_(h, h, value=2).sum()
    return total


def _places_on(device: torch.device) -> torch.Tensor:
    if device not in _places:
        _places[device] = torch.arange(_CHUNK, device=device) * _K
    return _places[device]


def _wrapped(number: int) -> int:
    """As arithmetic of 64 bits has it."""
    return (number + (1 << 63)) % (1 << 64) - (1 << 63)
