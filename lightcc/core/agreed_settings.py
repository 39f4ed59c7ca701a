"""Settings that the ranks must give alike: compared by those who use them, before their first exchange."""
import types
from typing import Any, Dict, List, Mapping

from lightcc.core import lib, objects
from lightcc.core.process_sets import ProcessSet, global_process_set


def expect_equal(what: str, settings: Mapping[str, Any], process_set: ProcessSet = global_process_set,
                 progress: Mapping[str, Any] = types.MappingProxyType({})) -> None:
    """ValueError on all ranks of the set alike, with what differs and who has given what, unless all have the same.

    what: whose settings they are; begins the error's text. settings: plain values with a repr. progress: such that no
    user has given, but training has made. A collective named "<what>.settings" travels, so all ranks of the set must
    call it. Errors: those of allgather.

    >>> expect_equal("hvd.LocalSGD", {"sync_every": 4}, progress={"steps made": 2})
    """
    mine = [{name: repr(value) for name, value in values.items()} for values in (settings, progress)]
    of_ranks = dict(objects.allgather_object((lib.rank(), mine), f"{what}.settings", process_set))
    given, made = [difference({rank: both[i] for rank, both in of_ranks.items()}) for i in range(2)]
    if given:
        raise ValueError(f"{what}: the ranks have different settings: {given}. Give the same on all ranks.")
    if made:
        raise ValueError(f"{what}: the ranks do not go on from the same place: {made}. Call broadcast_parameters and "
                         "broadcast_optimizer_state on all ranks before the step.")


def difference(of_ranks: Mapping[int, Mapping[str, str]]) -> str:
    """What differs between the settings of ranks, in words; "": nothing.

    >>> difference({0: {"delay": "1", "warmup": "0"}, 1: {"delay": "2", "warmup": "0"}, 2: {"delay": "1"}})
    'delay is 1 on ranks 0, 2, 2 on rank 1; warmup is 0 on ranks 0, 1, not given on rank 2'
    """
    texts = []
    for name in dict.fromkeys(name for settings in of_ranks.values() for name in settings):
        ranks_of: Dict[str, List[int]] = {}
        for rank in sorted(of_ranks):
            ranks_of.setdefault(of_ranks[rank].get(name, "not given"), []).append(rank)
        if len(ranks_of) > 1:
            holders = (f"{value} on rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
                       for value, ranks in ranks_of.items())
            texts.append(f"{name} is {', '.join(holders)}")
    return "; ".join(texts)


def whole(what: str, name: str, value: Any, least: int) -> int:
    """An argument that is a number of steps or parts. ValueError, which names it, unless it is an int and not too
    small.

    >>> whole("hvd.LocalSGD", "sync_every", 4, 1)
    4
    """
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"{what}: {name}={value!r}: give an int, {least} or more.")
    return value


def number(what: str, name: str, value: Any, least: float = 0.0, most: float = float("inf")) -> float:
    """An argument that is a finite number between two others. ValueError, which names it, for anything else.

    >>> number("hvd.DiLoCo", "alpha", 0.5, 0, 1)
    0.5
    """
    fits = isinstance(value, (int, float)) and not isinstance(value, bool) and least <= value <= most
    if not fits or value == float("inf"):
        bounds = f"from {least:g} to {most:g}" if most < float("inf") else f"{least:g} or more"
        raise ValueError(f"{what}: {name}={value!r}: give a number, {bounds}.")
    return float(value)
