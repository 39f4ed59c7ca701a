"""Slots for gradients: where each lies, and in which form it travels. Those of parameters on the CPU lie in memory that
the ranks of a host share, those of a GPU in its own."""
import ctypes
from typing import List, NamedTuple, Sequence, Tuple

import torch

from lightcc.core import lib
from lightcc.core.adapter import adapter_of

_ALIGNMENT = 64  # no two slots share a cache line


class Slot(NamedTuple):
    tensor: torch.Tensor  # keeps the slab alive
    address: int
    bytes: int


def gradient_dtype(parameter: torch.Tensor) -> torch.dtype:
    """The dtype of p.grad: that of the parameter, unless the program has set another one (p.grad_dtype of newer
    PyTorch).

    >>> gradient_dtype(torch.ones(1))
    torch.float32
    """
    return getattr(parameter, "grad_dtype", None) or parameter.dtype


def wire_form(name: str, parameter: torch.Tensor, dtype: torch.dtype, compression, casts: bool) -> torch.Tensor:
    """A tensor without memory, of the dtype, shape and layout in which the gradient of a parameter travels.

    dtype: of the gradient. casts: the compression only changes the dtype. ValueError if such a gradient cannot be
    reduced.
    """
    if device_of(parameter).type not in ("cpu", "cuda"):
        raise ValueError(f"Parameter {name} is on {parameter.device}; this version of lightcc works on CPU and CUDA "
                         "tensors.")
    with torch.no_grad():
        example = torch.zeros_like(parameter, dtype=dtype, device="meta" if casts else None)  # keeps any dense layout
        form = torch.empty_like(compression.compress(example)[0], device="meta")
    try:
        adapter_of(form).describe(torch.empty(0, dtype=form.dtype, device="cpu"))
    except ValueError as error:
        raise ValueError(f"The gradient of {name} cannot be reduced: {error}") from None
    return form


def device_of(tensor: torch.Tensor) -> torch.device:
    """Where a tensor is. Tests replace this and new_slab, for GPUs that PyTorch does not know."""
    return tensor.device


def new_slab(count: int, device: torch.device) -> torch.Tensor:
    """`count` bytes of a GPU."""
    return torch.empty(count, dtype=torch.uint8, device=device)


def form_of(parameter: torch.Tensor) -> Tuple[torch.dtype, torch.dtype, torch.Size, torch.device]:
    """What a slot must fit: it is made anew when the parameter has changed in this."""
    return parameter.dtype, gradient_dtype(parameter), parameter.shape, device_of(parameter)


def in_one_slab(forms: Sequence[torch.Tensor], device: torch.device) -> List[Slot]:
    """A slot for each of these forms, which have one dtype, side by side in new memory."""
    sizes = [form.numel() * form.element_size() for form in forms]
    offsets = [0]
    for size in sizes:
        offsets.append(offsets[-1] + -(-size // _ALIGNMENT) * _ALIGNMENT)
    total = offsets[-1] + _ALIGNMENT  # + : the last slot may be empty, and yet has an address
    if device.type != "cpu":
        return _on_gpu(forms, offsets, sizes, new_slab(total, device))
    slab = lib.alloc(total)
    slots = []
    for form, offset, size in zip(forms, offsets, sizes):
        tensor = torch.empty_like(form, device="cpu") if form.numel() == 0 else torch.frombuffer(
            slab, dtype=form.dtype, count=form.numel(), offset=offset).as_strided(form.shape, form.stride())
        slots.append(Slot(tensor, ctypes.addressof(slab) + offset, size))
    return slots


def _on_gpu(forms: Sequence[torch.Tensor], offsets: Sequence[int], sizes: Sequence[int],
            slab: torch.Tensor) -> List[Slot]:
    slots = []
    for form, offset, size in zip(forms, offsets, sizes):
        tensor = slab[offset:offset + size].view(form.dtype).as_strided(form.shape, form.stride())
        slots.append(Slot(tensor, slab.data_ptr() + offset, size))
    return slots
