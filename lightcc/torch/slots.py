"""Slots for gradients: where each lies in memory that the ranks of a host share, and in which form it travels."""
import ctypes
from typing import List, NamedTuple, Sequence

import torch

from lightcc import _core
from lightcc.adapter import adapter_of

_ALIGNMENT = 64  # no two slots share a cache line


class Slot(NamedTuple):
    tensor: torch.Tensor  # keeps the slab alive
    address: int
    bytes: int


def wire_form(name: str, parameter: torch.Tensor, compression, casts: bool) -> torch.Tensor:
    """A tensor without memory, of the dtype, shape and layout in which the gradient of a parameter travels.

    casts: the compression only changes the dtype. ValueError if such a gradient cannot be reduced.
    """
    if not parameter.is_cpu:
        raise ValueError(f"Parameter {name} is on {parameter.device}; this version of lightcc works on CPU tensors "
                         "only.")
    with torch.no_grad():
        example = torch.zeros_like(parameter, device="meta" if casts else None)  # keeps any dense layout
        form = torch.empty_like(compression.compress(example)[0], device="meta")
    try:
        adapter_of(form).describe(torch.empty(0, dtype=form.dtype))
    except ValueError as error:
        raise ValueError(f"The gradient of {name} cannot be reduced: {error}") from None
    return form


def in_one_slab(forms: Sequence[torch.Tensor]) -> List[Slot]:
    """A slot for each of these forms, which have one dtype, side by side in new shared memory."""
    sizes = [form.numel() * form.element_size() for form in forms]
    offsets = [0]
    for size in sizes:
        offsets.append(offsets[-1] + -(-size // _ALIGNMENT) * _ALIGNMENT)
    slab = _core.alloc(offsets[-1] + _ALIGNMENT)  # + : the last slot may be empty, and yet has an address
    slots = []
    for form, offset, size in zip(forms, offsets, sizes):
        tensor = torch.empty_like(form, device="cpu") if form.numel() == 0 else torch.frombuffer(
            slab, dtype=form.dtype, count=form.numel(), offset=offset).as_strided(form.shape, form.stride())
        slots.append(Slot(tensor, ctypes.addressof(slab) + offset, size))
    return slots
