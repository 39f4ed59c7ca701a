"""One gradient on its way, or a group of them; how they are described to the core, and what the ranks meet by."""
from typing import Any, Dict, List, Optional, Sequence, Tuple

import torch

from lightcc import _core, request
from lightcc.adapter import adapter_of


class Gradient:
    """One parameter's gradient."""

    __slots__ = ("parameter", "given_name", "name", "optimizer", "group", "home", "passes_left", "sent", "sparse_dims",
                 "local", "form", "slot", "address", "bytes", "dtype", "prepared", "context", "__weakref__")

    def __init__(self, parameter: torch.Tensor, name: str):
        self.parameter = parameter
        self.given_name = str(name)
        self.name = self.given_name                # what the ranks meet by
        self.optimizer: Any = None                 # a weak reference to the one whose gradient this is
        self.group: Optional[Group] = None
        self.home: Optional[Group] = None          # the group, also while it is sparse and so not in it
        self.passes_left = 1                       # backward passes until it is sent
        self.sent = False                          # since the last finish
        self.sparse_dims = 0                       # its sparse dimensions, if its form is settled as sparse
        self.local = False                         # it stays on this rank
        self.form: Any = None                      # the parameter's dtype and shape, when the slot was made
        self.slot: Optional[torch.Tensor] = None   # of the parameter's shape and layout, in the wire's dtype
        self.address = self.bytes = 0              # of the slot
        self.dtype: Optional[torch.dtype] = None   # of the slot, unless more than a copy stands between
        self.prepared = 0                          # the core's id of its request, unless it is in a group
        self.context: Any = None                   # for a user's compressor to undo its work; what was gathered


class Group:
    """Gradients that are reduced as one unit, once the last of them is ready."""

    def __init__(self, name: str, members: List[Gradient]):
        self.given_name = self.name = name
        self.members = members
        self.missing = len(members)
        self.pack: Optional[request.Pack] = None
        for member in members:
            member.group = member.home = self

    def close(self) -> None:
        """Must come before the group is sent, whenever members or their slots have changed."""
        self.members.sort(key=lambda member: member.address)  # side by side, as the core looks for neighbours
        self.pack = request.Pack([described(member) for member in self.members])

    def leave(self, member: Gradient) -> None:
        """A member that is not sent yet will travel by itself."""
        self.members.remove(member)
        self.missing -= 1
        member.group = None
        self.close()


def described(gradient: Gradient) -> Tuple[int, int, List[int]]:
    """Address, dtype and shape of a slot; dimensions in the order of memory, so that other layouts are a mismatch."""
    slot = gradient.slot
    order = sorted(range(slot.dim()), key=lambda i: -slot.stride(i))
    return gradient.address, adapter_of(slot).describe(slot.new_empty(0))[1], [slot.shape[i] for i in order]


class Names:
    """Two optimizers may name their parameters alike, and have gradients on their way at the same time. So each that
    has a name in common with one before it gets a number, and its names end in ".1", ".2" and so on: in the order in
    which they are first used in an epoch, which must be the same on all ranks."""

    def __init__(self):
        self._epoch = 0
        self._free: Dict[Tuple[str, int], int] = {}  # by name and process set: the lowest number for the next optimizer

    def take(self, names: Sequence[str], process_set_id: int, number: int) -> int:
        """Returns the number for these names of one optimizer, which has that number so far."""
        if self._epoch != _core.epoch:
            self._epoch = _core.epoch
            self._free.clear()
        keys = [(name, process_set_id) for name in names]
        number = max([number, *(self._free.get(key, 0) for key in keys)])
        self._free.update(dict.fromkeys(keys, number + 1))
        return number
