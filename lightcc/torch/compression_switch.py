"""Gradients that travel by another compression from one step to the next, as a policy of mixed precision has it.

Each compression has slots and requests of its own. Those of one that is not used are set aside, so that a later change
costs no more than to name them. What Top-K and int8 have left behind stays, too.
"""
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Sequence, Tuple

from lightcc.compress.compressors import CoreCompressor
from lightcc.core import ops
from lightcc.torch import slots
from lightcc.torch.gradient import Gradient

# What of a gradient depends on the compression that it travels by.
_BY_COMPRESSION = ("name", "form", "slot", "address", "bytes", "stream", "copied_late", "dtype", "layout", "prepared",
                   "context", "compressed")


class _Aside(NamedTuple):
    made_for: Any
    numbers: Tuple[int, int]
    fields: List[List[Any]]  # of each gradient
    group_names: List[str]


class SetAside:
    """What belongs to the compressions of one reducer that are not used now."""

    def __init__(self) -> None:
        self._of: Dict[Any, _Aside] = {}  # by compression

    def exchange(self, used: Any, wanted: Any, gradients: Sequence[Gradient], where: Any,
                 numbers: Tuple[int, int]) -> Optional[Tuple[int, int]]:
        """Sets aside what belongs to `used`, and gives gradients and their groups what belongs to `wanted`.

        where: what slots are good for beside their parameters. numbers: of the reducer, kept with the rest.
        Returns those that were kept with what belongs to `wanted`; None: there is nothing, or nothing that is still
        good, and all gradients need slots.
        """
        made_for = where, [(id(gradient), slots.form_of(gradient.parameter)) for gradient in gradients]
        groups = list({id(g.home): g.home for g in gradients if g.home is not None}.values())
        self._of[used] = _Aside(made_for, numbers, [[getattr(g, name) for name in _BY_COMPRESSION] for g in gradients],
                                [group.name for group in groups])
        kept = self._of.pop(wanted, None)
        if kept is None or kept.made_for != made_for:
            for gradient in gradients:
                gradient.compressed = False
            return None
        for gradient, values in zip(gradients, kept.fields):
            for name, value in zip(_BY_COMPRESSION, values):
                setattr(gradient, name, value)
            if gradient.sparse_dims:
                gradient.dtype = None
        for group, group.name in zip(groups, kept.group_names):
            group.close()
        return kept.numbers


class SwitchedCompression:
    """A base of _DistributedOptimizer."""

    _options: Dict[str, Any]
    _reducer: Any
    _waiting: Callable[[], bool]

    def use_compression(self, compression: Any) -> None:
        """Sends gradients by another compression from the next step on. All ranks call it, between the same two steps.

        compression: a Compressor, such as hvd.Compression.bf16, or the TopK or Int8 that the optimizer was made with;
        what these have left behind stays while another is used. Memory for slots is kept for each.
        Errors: ValueError for another TopK or Int8, with op=Adasum, and while gradients are on their way.

        >>> model = torch.nn.Linear(2, 1); optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
        >>> optimizer.use_compression(hvd.Compression.bf16)
        """
        made_with = self._options["compression"]
        if isinstance(compression, CoreCompressor) and compression != made_with:
            raise ValueError(f"use_compression: {compression} keeps what it leaves behind, so DistributedOptimizer "
                             f"must be made with it; this one has {made_with}.")
        if self._options["op"] == ops.ReduceOps.Adasum:
            raise ValueError("use_compression: op=Adasum has one compression.")
        if self._waiting():
            raise ValueError("use_compression: gradients are on their way; call this between two steps.")
        if self._reducer is not None:
            self._reducer.use(made_with if compression == made_with else compression)
