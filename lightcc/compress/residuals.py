"""What compression leaves behind of gradients, for checkpoints: out of the core, from rank to rank, and back.

What is saved is a dict of plain values, the same for every framework:
    {"ranks": [0], "size": 4,                                  whose pieces these are, of how many ranks
     "tensors": {"conv.weight": {"elements": 36864, "steps": 120, "nodes": 2,
                                 "pieces": [{"node": 0, "part": 0, "first": 0, "values": <float32s>}]}}}
part: 0 the residual, 1 the velocity of momentum correction. A piece is part of the flattened tensor that one rank of
that node had left behind. The sum over nodes of all residuals is what is still to be sent, in units of the summed
gradients without loss scale and with gradient_predivide_factor. steps: exchanges that the tensor has seen.
"""
import ctypes
from array import array
from typing import Any, Callable, Dict, List, Mapping, Optional, Tuple

from lightcc.compress.codec import Codec
from lightcc.core import lib, objects
from lightcc.core.process_sets import ProcessSet

Place = Tuple[int, str, int]  # where the core has a tensor: process set, request's name, index in the request
Saved = Dict[str, Any]

KEY = "lightcc_residuals"  # in the state of an optimizer


def read(codec: Codec, names: Mapping[Place, str], rank: int, size: int) -> Optional[Saved]:
    """This rank's pieces, whose values are array("f"); None: nothing was left behind. names: by which it is saved.
    rank, size: in the process set."""
    tensors = {}
    for tensor in codec.state()["tensors"]:
        place = tensor["group"], tensor["name"], tensor["tensor"]
        name = names.get(place)
        if name is None:
            continue
        pieces = []
        for piece in tensor["pieces"]:
            for part in range((2 if tensor["velocity"] else 1) if piece["count"] else 0):
                values = array("f", bytes(4 * piece["count"]))
                lib.copy_residual(False, values.buffer_info()[0], place[1], codec=codec.id, group=place[0],
                                    tensor=place[2], part=part, node=tensor["node"], elements=tensor["elements"],
                                    first=piece["first"], count=piece["count"])
                pieces.append({"node": tensor["node"], "part": part, "first": piece["first"], "values": values})
        tensors[name] = {"elements": tensor["elements"], "steps": tensor["steps"], "nodes": tensor["nodes"],
                         "pieces": pieces}
    return {"ranks": [rank], "size": size, "tensors": tensors} if tensors else None


def gather(mine: Optional[Saved], process_set: ProcessSet) -> Optional[Saved]:
    """Those of all ranks of a process set, which all call this; None if there are none."""
    everyone = [saved for saved in objects.allgather_object(mine, "gather_residuals", process_set) if saved]
    if not everyone:
        return None
    tensors: Dict[str, Any] = {}
    for saved in everyone:
        for name, tensor in saved["tensors"].items():
            known = tensors.setdefault(name, {**tensor, "pieces": {}})
            for piece in tensor["pieces"]:  # several ranks have the same ones if they have just loaded them
                known["pieces"].setdefault((piece["node"], piece["part"], piece["first"]), piece)
    for tensor in tensors.values():
        tensor["pieces"] = list(tensor["pieces"].values())
    ranks = sorted({rank for saved in everyone for rank in saved["ranks"]})
    return {"ranks": ranks, "size": everyone[0]["size"], "tensors": tensors}


def with_values(saved: Saved, convert: Callable[[Any], Any]) -> Saved:
    """The same with other values, of a framework or the core."""
    def converted(tensor: Dict[str, Any]) -> Dict[str, Any]:
        return {**tensor, "pieces": [{**piece, "values": convert(piece["values"])} for piece in tensor["pieces"]]}
    return {**saved, "tensors": {name: converted(tensor) for name, tensor in saved["tensors"].items()}}


def write(codec: Codec, places: Mapping[str, Tuple[Place, int]], saved: Saved) -> List[str]:
    """Gives the core what was saved, for a codec that has exchanged nothing yet. All ranks write all that they have.

    places: by the name that a tensor was saved by, where it is and its number of elements. values are writable buffers
    of float32. Returns the names that were saved and have no such tensor here.
    """
    unknown = []
    for name, tensor in saved["tensors"].items():
        place, elements = places.get(name, (None, 0))
        if place is None or elements != tensor["elements"]:
            unknown.append(name)
            continue
        no_piece = {"node": 0, "part": 0, "first": 0, "values": array("f", [0])}  # still tells the steps
        for piece in tensor["pieces"] or [no_piece]:
            values = memoryview(piece["values"])
            count = 0 if piece is no_piece else values.nbytes // 4
            lib.copy_residual(True, ctypes.addressof(ctypes.c_char.from_buffer(values)), place[1], codec=codec.id,
                                group=place[0], tensor=place[2], part=piece["part"], node=piece["node"],
                                elements=elements, steps=tensor["steps"], first=piece["first"], count=count)
    return unknown


def missing(saved: Optional[Saved], process_set: ProcessSet) -> str:
    """What of all that was left behind is not in `saved`, in words; "": nothing.

    Ranks that each load what they had saved themselves miss nothing together.
    """
    if saved is None:
        return "it has nothing of what compression had left behind, which begins at zero"
    mine = process_set.rank() in saved["ranks"] and saved["size"] == process_set.size()
    if mine or len(saved["ranks"]) == saved["size"]:
        return ""
    tensors = saved["tensors"].values()
    whole = sum(tensor["elements"] * tensor["nodes"] for tensor in tensors)
    there = sum(len(piece["values"]) for tensor in tensors for piece in tensor["pieces"] if piece["part"] == 0)
    share = 100 - 100 * there / max(whole, 1)
    return (f"{len(saved['ranks'])} of {saved['size']} ranks have saved it: {share:.0f} % of what compression had left "
            "behind is not in it and begins at zero. All ranks should call hvd.gather_residuals(optimizer) before "
            "state_dict()")
