"""Whether the ranks hold the same weights: each computes a digest of 8 bytes of each parameter, and these are compared.

Equal bits have equal digests; any change of one value has another. How digests are computed is each framework's
(lightcc.torch.weights, lightcc.tensorflow.weights). All that travels while nothing differs is one digest of them all;
what differs is gathered once it is known that something does.
"""
import hashlib
import os
import struct
from typing import Any, Dict, List, Mapping, Optional, Sequence, Tuple

from lightcc.core import lib, objects, ops
from lightcc.core.knobs import knob
from lightcc.core.process_sets import ProcessSet, global_process_set

_SHOWN = 10  # parameters, and ranks of each, that an error names


def digest_of(array: Any) -> int:
    """The digest of a numpy array of any dtype but objects, also ml_dtypes'.

    >>> import numpy as np; digest_of(np.ones(2)) == digest_of(np.ones((1, 4))[:, ::2])
    True
    """
    data = hashlib.blake2b(array.ravel().view("uint8"), digest_size=8)
    return int.from_bytes(data.digest(), "little", signed=True)


class Exchanges:
    """Counts the exchanges of gradients of one optimizer, which all ranks make together: not its steps, as a rank that
    leaves out a step on its own must not wait for the others here.

    >>> Exchanges().due()  # without HOROVOD_CHECK_WEIGHTS
    0
    """

    def __init__(self) -> None:
        self._era, self._count = (0, 0), 0

    def due(self) -> int:
        """To be called at each: its number, if weights are to be compared now, else 0. A new epoch counts anew, as
        there are ranks that have made none, and so does the end of a join, as ranks that had joined made fewer."""
        era = lib.epoch, lib.joins
        if era != self._era:
            self._era, self._count = era, 0
        self._count += 1
        every = int(knob("HOROVOD_CHECK_WEIGHTS"))
        return self._count if every and self._count % every == 0 else 0


def asked() -> bool:
    """Whether HOROVOD_CHECK_WEIGHTS is set; before init, on this rank."""
    if lib.initialized():
        return knob("HOROVOD_CHECK_WEIGHTS") != "0"
    return os.environ.get("HOROVOD_CHECK_WEIGHTS", "0") not in ("", "0")


def at(exchange: int) -> str:
    """What begins the text of an error that is found at this exchange.

    >>> at(10)
    'exchange 10 of gradients'
    """
    return f"exchange {exchange} of gradients"


def compare(digests: Mapping[str, int], when: str, process_set: ProcessSet = global_process_set,
            labels: Optional[Mapping[str, str]] = None) -> None:
    """RuntimeError on all ranks of the set alike, with the parameters that differ and the ranks that hold the same,
    unless all have the same keys and digests.

    when: begins the error's text. labels: what an error calls the parameters, which may differ between ranks; None:
    their keys. Ranks that have joined hold nothing. Collectives named "check_weights..." travel, so all ranks of the
    set must call it. Errors: those of allgather.

    >>> compare({"weight": 7}, "example")
    """
    of_all = hashlib.blake2b(digest_size=8)
    for key in sorted(digests):
        of_all.update(key.encode(errors="replace") + struct.pack("<xq", digests[key]))
    of_ranks = bytes(ops.allgather(bytearray(of_all.digest()), "check_weights", process_set))
    if of_ranks == of_ranks[:8] * (len(of_ranks) // 8):
        return
    mine = {key: (digest, (labels or {}).get(key, key)) for key, digest in digests.items()}
    raise RuntimeError(_difference(dict(objects.allgather_object((lib.rank(), mine), "check_weights.each",
                                                                 process_set)), when))


def compare_in_order(variables: Sequence[Any], digests: Sequence[int], when: str,
                     process_set: ProcessSet = global_process_set) -> None:
    """compare by the places of variables, as their names differ between ranks where they count what a process has made.

    >>> compare_in_order([object()], [7], "example")
    """
    labels = (getattr(v, "path", None) or getattr(v, "name", None) or f"number {i}" for i, v in enumerate(variables))
    compare({str(i): digest for i, digest in enumerate(digests)}, when, process_set,
            {str(i): label for i, label in enumerate(labels)})


_Held = Dict[int, Dict[str, Tuple[int, str]]]  # by rank and key: digest and label


def _difference(held: _Held, when: str) -> str:
    labels = {key: label for mine in reversed(held.values()) for key, (_, label) in reversed(mine.items())}
    differing = [key for key in reversed(labels) if len({mine.get(key, (None,))[0] for mine in held.values()}) > 1]
    lines = [f"  {labels[key]}: {_holders(key, held)}" for key in differing[:_SHOWN]]
    if len(differing) > _SHOWN:
        lines.append(f"  and {len(differing) - _SHOWN} more")
    return (f"{when}: the ranks hold different weights, {len(differing)} of {len(labels)} parameters:\n" +
            "\n".join(lines) + "\nRanks must begin with the same (broadcast_parameters, broadcast_variables) and take "
            "the same steps; what is to differ is made local (register_local_var). docs/troubleshooting.md says what "
            "else makes them drift apart.")


def _holders(key: str, held: _Held) -> str:
    ranks_of: Dict[Optional[int], List[int]] = {}
    for rank in sorted(held):
        ranks_of.setdefault(held[rank].get(key, (None,))[0], []).append(rank)
    return "; ".join(_held_by(ranks, "none" if digest is None else f"{digest % (1 << 64):016x}")
                     for digest, ranks in ranks_of.items())


def _held_by(ranks: List[int], what: str) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]} has {what}"
    more = f" and {len(ranks) - _SHOWN} more" if len(ranks) > _SHOWN else ""
    return f"ranks {', '.join(map(str, ranks[:_SHOWN]))}{more} have {what}"
