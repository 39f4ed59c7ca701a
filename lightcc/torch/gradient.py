"""One gradient that is reduced, or a group of them; how they are described to the core, and by which names."""
from typing import Any, Dict, Iterable, List, Optional, Sequence, Tuple

import torch

from lightcc.core import lib, request
from lightcc.core.adapter import adapter_of
from lightcc.torch import slots


class Gradient:
    """One parameter's gradient."""

    __slots__ = ("parameter", "given_name", "name", "optimizer", "group", "home", "passes_left", "sent", "sparse_dims",
                 "local", "compressed", "form", "slot", "address", "bytes", "stream", "copied_late", "dtype", "layout",
                 "prepared", "handle", "context", "gathered", "count", "outside", "__weakref__")

    def __init__(self, parameter: torch.Tensor, name: str):
        self.parameter = parameter
        self.given_name = str(name)
        self.name = self.given_name                # by which ranks match it
        self.optimizer: Any = None                 # a weak reference to the one whose gradient this is
        self.group: Optional[Group] = None
        self.home: Optional[Group] = None          # the group, also while it is sparse and so not in it
        self.passes_left = 1                       # backward passes until it is sent
        self.sent = False                          # since the last finish
        self.sparse_dims = 0                       # its sparse dimensions, if its form is settled as sparse: that in
                                                   # which p.grad ends, and unless sparse_as_dense also travels
        self.local = False                         # it stays on this rank
        self.compressed = False                    # it travels compressed by the core
        self.form: Any = None                      # the parameter's, when the slot was made (slots.form_of)
        self.slot: Optional[torch.Tensor] = None   # of the parameter's shape and layout, in the wire's dtype
        self.address = self.bytes = 0              # of the slot
        self.stream: Any = None                    # of a slot on a GPU: lightcc.torch.slot_stream.SlotStream
        self.copied_late = False                   # it waits for others to be copied together
        self.dtype: Optional[torch.dtype] = None   # of the slot, unless more than a copy stands between
        self.layout: Any = None                    # one of p.grad with the slot's order of elements (has_layout)
        self.prepared = 0                          # the core's id of its request, unless it is in a group
        self.handle = 0                            # of its request, once that is started; in a group it is the group's
        self.context: Any = None                   # for a user's compressor to undo its work
        self.gathered: Any = None                  # of all ranks: the sparse gradient; if sparse_as_dense its places
        self.count: Optional[int] = None           # p.grad._version when its reduction started; None: not looked at
        self.outside: Optional[torch.Tensor] = None  # p.grad then, unless that is the slot

    def has_layout(self, grad: torch.Tensor) -> bool:
        """Whether its bytes are those that the slot shall have, and on the slot's device."""
        layout = grad.shape, grad.stride(), grad.get_device(), grad.is_neg()
        if layout == self.layout:
            return True
        slot = self.slot
        if slot is None or grad.shape != slot.shape or grad.is_neg() or slots.device_of(grad) != slots.device_of(slot):
            return False
        if any(mine != theirs for count, mine, theirs in zip(slot.shape, slot.stride(), grad.stride()) if count > 1):
            return False
        self.layout = layout
        return True


class Group:
    """Gradients that are reduced as one unit, once the last of them is ready.

    Their order is that of the list which all ranks have, turned round as backward makes the last one first. A member's
    place in it is all that tells the ranks which of their gradients belong together.
    """

    def __init__(self, name: str, parameters_first_to_last: Sequence[Gradient]):
        self.given_name = self.name = name
        self._all = tuple(reversed(parameters_first_to_last))
        self.members = list(self._all)
        self.missing = len(self.members)
        self.pack: Optional[request.Pack] = None
        self.handle = 0  # of its request, while that is in flight
        for member in self._all:
            member.group = member.home = self

    def index_of(self, member: Gradient) -> int:
        """The member's place while none has left."""
        return self._all.index(member)

    def is_compressed(self) -> bool:
        """By its places the core finds again what was left behind, so none may have left."""
        return len(self.members) == len(self._all) and all(member.compressed for member in self._all)

    def close(self) -> None:
        """Must come before the group is sent, whenever members or their slots have changed."""
        self.pack = request.Pack([described(member) for member in self.members],
                                 [member.address for member in self.members])

    def leave(self, member: Gradient) -> None:
        """A member that is not sent yet will travel by itself."""
        self.members.remove(member)
        self.missing -= 1
        member.group = None
        self.close()

    def take_back(self, member: Gradient) -> None:
        """One that has left travels with the others again, from its old place in their order."""
        member.group, member.copied_late = self, False
        self.members = [one for one in self._all if one.group is self]
        self.missing += 1
        self.close()


def in_order_of_slots(gradients: Iterable[Gradient]) -> List[Gradient]:
    """These, members of a group side by side and in its order, as the core looks for neighbours."""
    remaining = {id(gradient): gradient for gradient in gradients}
    ordered = []
    for gradient in list(remaining.values()):
        members = [gradient] if gradient.group is None else gradient.group.members
        ordered += [member for member in members if remaining.pop(id(member), None) is not None]
    return ordered


def described(gradient: Gradient) -> Tuple[int, int, List[int], Optional[lib.Place]]:
    """A slot as Adapter.describe has it; dimensions in the order of memory, so that other layouts are a mismatch."""
    slot = gradient.slot
    assert slot is not None  # whoever sends it has made it
    order = sorted(range(slot.dim()), key=lambda i: -slot.stride(i))
    return (gradient.address, adapter_of(slot).describe(torch.empty(0, dtype=slot.dtype, device="cpu"))[1],
            [slot.shape[i] for i in order], gradient.stream and gradient.stream.place)


def is_part(grad: Optional[torch.Tensor]) -> bool:
    """Whether p.grad is a part of memory that the program keeps, such as one buffer for all gradients, and must stay
    that: what is reduced is copied into it. Neither autograd nor lightcc makes a p.grad that is a view.

    >>> flat = torch.zeros(4)
    >>> is_part(flat[:2]), is_part(flat), is_part(None)
    (True, False, False)
    """
    return grad is not None and grad._base is not None and grad.layout is torch.strided and not grad.requires_grad \
        and 0 not in grad.stride()  # expanded: it cannot be written to


class Names:
    """Two optimizers may name their parameters alike, and have gradients on their way at the same time. So each that
    has a name in common with one before it gets a number, and its names end in ".1", ".2" and so on: in the order in
    which they are first used in an epoch, which must be the same on all ranks."""

    def __init__(self):
        self._epoch = 0
        self._free: Dict[Tuple[str, int], int] = {}  # by name and process set: the lowest number for the next optimizer

    def take(self, names: Sequence[str], process_set_id: int, number: int) -> int:
        """Returns the number for these names of one optimizer, which has that number so far."""
        if self._epoch != lib.epoch:
            self._epoch = lib.epoch
            self._free.clear()
        keys = [(name, process_set_id) for name in names]
        number = max([number, *(self._free.get(key, 0) for key in keys)])
        self._free.update(dict.fromkeys(keys, number + 1))
        return number
