"""States of elastic jobs that have more than rank 0 could send to all: what is spread over the ranks, a share on each.

A SharingState has plain values and what its subclass keeps, which are rank 0's in each new world, and parts, which are
no rank's alone. What holds for them beside what elastic_state.py says:
1. Nobody saves a step that others have not come to: their shares could not follow.
2. A rank that is lost may let some ranks know that all have come and others not. These are in doubt: restore() leaves
   them as they are, and the next sync() finds out whether others have saved the step.
"""
import pickle
from typing import Any, Callable, Dict, List, Mapping, Optional, Sequence, Tuple

from lightcc.core import objects
from lightcc.core.elastic_state import HostsUpdatedInterrupt, ObjectState


class SharedPart:
    """What is spread over the ranks, so that rank 0 does not have all of it. It takes part in what a state does as a
    whole. Abstract. names: the state's values that it keeps."""

    names: Sequence[str] = ()

    def assigned(self, name: str, value: Any) -> None:
        """One of its names has another value now."""

    def save(self) -> None:
        """This rank's share is kept."""
        raise NotImplementedError

    def restore(self) -> None:
        """This rank's share is what it was at the last save. There may be no world."""
        raise NotImplementedError

    def complete(self) -> None:
        """What is under way on all ranks is ended: the state will be saved."""

    def agree(self) -> None:
        """All ranks have come to the same step. Raises HorovodInternalError if not."""
        raise NotImplementedError

    def settle(self, state: "SharingState") -> None:
        """In a new world, before the rest is sent: all ranks have the same commit."""
        raise NotImplementedError

    def leave(self) -> None:
        """Hosts will come or go; this world is left after it."""
        raise NotImplementedError

    def kept(self, state: "SharingState", is_commit: bool) -> None:
        """All of the state was saved: by commit, or by the sync of a new world."""
        raise NotImplementedError


Make = Callable[["SharingState", Mapping[str, Any]], Optional[SharedPart]]
_makers: List[Tuple[type, Make]] = []


class SharingState(ObjectState):
    """An ObjectState with parts. Abstract: a subclass calls take_parts before this class's __init__, and says what else
    it keeps by the methods below whose names have "own".

    >>> class Rank(SharedPart):
    ...     value = saved = 0
    ...     def save(self): self.saved = self.value
    ...     def restore(self): self.value = self.saved
    ...     def agree(self): hvd.barrier()
    ...     def kept(self, state, is_commit): pass
    >>> class RankState(SharingState):
    ...     def __init__(self, **values):
    ...         self.take_parts(values); super().__init__(hvd.broadcast_object, hvd.rank, **values)
    >>> part = Rank(); RankState.has_part(lambda state, values: part); state = RankState(step=0)
    >>> part.value = 5; state.commit(); part.value = 7; state.restore(); part.value
    5
    """

    _shared: List[SharedPart] = []

    def __init__(self, bcast_object: Callable[[Any], Any], get_rank: Callable[[], int], **kwargs: Any):
        self._saves = 0         # alike on all ranks that have the state
        self._in_doubt = False  # whether all ranks have come to the step that this rank is at
        theirs = {name for part in self._shared for name in part.names}
        super().__init__(bcast_object, get_rank, **{name: v for name, v in kwargs.items() if name not in theirs})
        for name in theirs & kwargs.keys():
            setattr(self, name, kwargs[name])

    @classmethod
    def has_part(cls, make: Make) -> None:
        """Has make(state, values) called for each state that is made from now on; what it returns is a part of it."""
        _makers.append((cls, make))

    def take_parts(self, values: Mapping[str, Any]) -> None:
        """Finds the parts. values: all that the state was given by name."""
        made = [make(self, values) for of, make in _makers if isinstance(self, of)]
        self._shared = [part for part in made if part is not None]

    def commit(self) -> None:
        """Keeps the state as that to go back to, then check_host_updates(). All ranks call it, between two steps."""
        for part in self._shared:
            part.complete()
        self._agree()
        super().commit()
        for part in self._shared:
            part.kept(self, True)

    def check_host_updates(self) -> None:
        """Raises HostsUpdatedInterrupt on all ranks if rank 0 has heard of new or lost hosts. All ranks call it."""
        self._agree()
        self._in_doubt = bool(self._shared)
        try:
            super().check_host_updates()
        except HostsUpdatedInterrupt:
            if not self._shared:
                raise
            for part in self._shared:
                part.complete()
            self.save()
            for part in self._shared:
                part.leave()
            raise HostsUpdatedInterrupt(False) from None  # shares move, also if hosts have only gone
        self._in_doubt = False

    def save(self) -> None:
        """Keeps a copy of everything in memory."""
        self._keep_own()
        for part in self._shared:
            part.save()
        super().save()
        self._saves += 1
        self._in_doubt = False

    def restore(self) -> None:
        """Gives everything the state that was saved; gradients are dropped."""
        if self._in_doubt:  # others may have saved the step that this rank is at: sync finds out
            return
        self._give_own_back()
        for part in self._shared:
            part.restore()
        super().restore()

    def sync(self) -> None:
        """Makes everything equal to rank 0's, and saves it once all has arrived."""
        if self._shared:
            self._resolve_doubt()
        for part in self._shared:
            part.settle(self)
        self._make_own_equal()
        super().sync()
        self._keep_own()
        for part in self._shared:
            part.save()
        for part in self._shared:
            part.kept(self, False)

    # What a subclass keeps beside values.

    def _keep_own(self) -> None:
        """Keeps a copy."""

    def _give_own_back(self) -> None:
        """Goes back to the copy."""

    def _make_own_equal(self) -> None:
        """Makes it rank 0's on all ranks; the copy stays as it is."""

    # For checkpoints, which have all of this as rank 0 has saved it.

    def own_saved(self) -> Dict[str, Any]:
        """The copies, by names."""
        return {}

    def take_own(self, name: str, saved: Any) -> None:
        """Goes to the copy that own_saved once had of this name. ValueError if it does not fit."""
        raise NotImplementedError

    def take_values(self, values: Mapping[str, Any]) -> None:
        """Goes to these plain values, and to the last save of those that are not among them."""
        self._saved_state = {**self._saved_state, **values}
        ObjectState.restore(self)

    @staticmethod
    def packed(value: Any) -> bytes:
        """Such copies, and plain values, as bytes."""
        return objects.dumped(value)

    @staticmethod
    def unpacked(data: bytes) -> Any:
        """What was packed by this job, or the one before: as a pickle, it is not for bytes of a stranger."""
        return pickle.loads(data)

    def _agree(self) -> None:
        self._in_doubt = bool(self._shared)
        for part in self._shared:
            part.agree()
        self._in_doubt = False

    def _resolve_doubt(self) -> None:
        """Who is in doubt follows those that have saved; if nobody has, it goes back."""
        saves = max(objects.allgather_object(self._saves, "elastic.saves"))
        if self._in_doubt and self._saves < saves:
            self.save()
        elif self._in_doubt:
            self._in_doubt = False
            self.restore()
        self._saves = saves

    def __setattr__(self, name: str, value: Any) -> None:
        for part in self._shared:
            if name in part.names:
                part.assigned(name, value)
        super().__setattr__(name, value)
