"""What stands between p.grad and its slot: how a gradient becomes what travels, and becomes p.grad once reduced."""
from typing import Any, Optional

import torch

from lightcc.torch import slots, sparse
from lightcc.torch.compression import Compression
from lightcc.torch.gradient import Gradient, is_part

_CASTS = Compression.none, Compression.fp16, Compression.bf16
_strided = torch.strided


class Wire:
    """The form in which the gradients of one reducer travel: that which a Compressor gives them."""

    def __init__(self, compression: Any, by_core: bool):
        """by_core: the core compresses, and slots have the gradients as they are."""
        self.compression = compression
        self.casts = by_core or compression in _CASTS  # no subclass of a user's: a copy into the slot is all it does

    def form(self, gradient: Gradient, dtype: torch.dtype) -> torch.Tensor:
        """slots.wire_form of a gradient of that dtype."""
        return slots.wire_form(gradient.given_name, gradient.parameter, dtype, self.compression, self.casts)

    # Into the slot

    def fill(self, gradient: Gradient, grad: Optional[torch.Tensor]) -> None:
        """Makes the slot, which fits the parameter, what this rank sends, whatever form its gradient has."""
        if grad is None and not self.casts:  # decompress needs a context of this step
            grad = torch.zeros_like(gradient.parameter, dtype=slots.gradient_dtype(gradient.parameter))
        if grad is None:
            gradient.slot.zero_()
            return
        if grad.requires_grad:  # create_graph: the gradient has a history, a slot never
            grad = grad.detach()
        if grad.layout is not _strided:
            grad = sparse.dense(grad)
        if not self.casts:
            grad, gradient.context = self.compression.compress(grad)
        if grad.data_ptr() != gradient.address:
            gradient.slot.copy_(grad)

    def fill_difference(self, gradient: Gradient, minuend: torch.Tensor, subtrahend: torch.Tensor) -> None:
        """Makes the slot the difference of two dense tensors."""
        if self.casts:
            torch.sub(minuend, subtrahend, out=gradient.slot)
        else:
            self.fill(gradient, minuend - subtrahend)

    def cast(self, grad: torch.Tensor) -> torch.Tensor:
        """A sparse gradient as it travels."""
        return sparse.with_values(grad, self.compression.compress(grad._values())[0]) if self.casts else grad

    # Out of the slot

    def reduced(self, gradient: Gradient) -> torch.Tensor:
        """What the slot has, decompressed; it may be the slot itself."""
        return gradient.slot if self.casts else self.compression.decompress(gradient.slot, gradient.context)

    def context_of(self, gradient: Gradient) -> Any:
        """What the Compressor's decompress needs beside what was reduced."""
        if self.compression is Compression.none:
            return None
        return slots.gradient_dtype(gradient.parameter) if self.casts else gradient.context

    def deliver(self, gradient: Gradient, grad: Optional[torch.Tensor]) -> None:
        """Makes p.grad, which is not the slot, the reduced gradient."""
        parameter, slot = gradient.parameter, gradient.slot
        if gradient.sparse_dims:
            where, gradient.gathered = gradient.gathered, None
            whole = self.reduced(gradient).detach()
            parameter.grad = sparse.at_places(whole, where, slots.gradient_dtype(parameter))
        elif is_part(grad):
            grad.data.copy_(self.reduced(gradient))  # .data: not counted as a change of other parts of the same memory
        elif not self.casts:
            whole = self.reduced(gradient).detach()  # the slot may be a view
            parameter.grad = whole.clone() if whole.data_ptr() == gradient.address else whole
        elif grad is None or grad.requires_grad or grad.layout is not _strided:
            parameter.grad = slot.detach().to(slots.gradient_dtype(parameter))
        elif slot.dtype != grad.dtype:
            grad.copy_(slot)
        else:
            grad.data = slot  # not a new tensor: who holds this p.grad already sees the reduced values
