"""A compressor registered with the core, which keeps what it leaves behind; and named allreduces through it."""
import json
import math
import uuid
import weakref
from typing import Any, Dict, Iterable, List, Optional, Sequence

from lightcc.compress.compressors import CoreCompressor, some
from lightcc.core import lib
from lightcc.core.adapter import adapter_of
from lightcc.core.process_sets import ProcessSet
from lightcc.core.request import complete, new_list, submit_list


class Codec:
    """A codec that one owner keeps: when it is gone, what was left behind is, too. Requests in flight go on.

    name: by which operations in a graph find it (lightcc.tensorflow); None: a new one.
    """

    def __init__(self, compression: CoreCompressor, name: Optional[str] = None):
        self.name = name or uuid.uuid4().hex
        self.id = lib.register_codec(compression.kind, compression.width, compression.warmup_steps,
                                       compression.ratio, compression.momentum, self.name)
        self._dense: Dict[str, str] = {}  # by name, of what the core did not hear of: why it went dense
        self.release = weakref.finalize(self, lib.release_codec, self.id)
        self.release.atexit = False  # type: ignore[misc]  # its stub's __slots__ forget the property
        _alive.add(self)

    def state(self) -> Dict[str, Any]:
        """lightcc_codec_state of csrc/api/lightcc.h."""
        state = json.loads(lib.codec_state(self.id))
        return {**state, "dense": state["dense"] or some(self._dense.values())}

    def note(self, name: str, why_dense: str) -> None:
        """Why the allreduce of this name, or "", all gradients of the owner, travels dense; "": it does not."""
        if why_dense:
            self._dense[name] = why_dense
        else:
            self._dense.pop(name, None)


_alive: "weakref.WeakSet[Codec]" = weakref.WeakSet()


def codec_of(compression: CoreCompressor) -> Codec:
    """The codec of a compressor by itself, for allreduces with it.

    >>> from lightcc.compress.compressors import TopK
    >>> compression = TopK(); codec_of(compression) is codec_of(compression)
    True
    """
    codec = vars(compression).get("codec")
    return codec or vars(compression).setdefault("codec", Codec(compression))


# Allreduce

def allreduce(tensors: Sequence[Any], compression: CoreCompressor, name: Any, op: int, prescale: float,
              postscale: float, process_set: ProcessSet) -> List[Any]:
    """ops.grouped_allreduce of tensors, compressed if is_compressed says so of the name and of each tensor.

    Errors: ValueError without a name, by which what is left behind is found again, and for an op other than Average and
    Sum.

    >>> from lightcc.compress.compressors import TopK
    >>> allreduce([np.ones(1)], TopK(), "small", hvd.Average, 1.0, 1.0, hvd.global_process_set)
    [array([1.])]
    """
    reduction = reduction_of(tensors, compression, name, op, prescale, postscale)
    outputs = new_list(tensors)
    return complete(submit_list(lib.ALLREDUCE, tensors, outputs, name, process_set, lib.BLOCK, **reduction),
                    outputs)


def reduction_of(tensors: Sequence[Any], compression: CoreCompressor, name: Any, op: int, prescale: float,
                 postscale: float) -> Dict[str, Any]:
    """op, prescale, postscale and codec of a request for these tensors. Errors as of allreduce.

    >>> from lightcc.compress.compressors import TopK
    >>> reduction_of([np.ones(1)], TopK(), "small", hvd.Average, 1.0, 1.0)
    {'op': 0, 'prescale': 1.0, 'postscale': 1.0, 'codec': 0}
    """
    if name is None:
        raise ValueError(f"allreduce with {compression} needs a name, by which what is left behind of the tensor is "
                         "found again.")
    if op not in (lib.AVERAGE, lib.SUM):
        raise ValueError(f"allreduce of {name} with {compression}: op must be Average or Sum.")
    why = next(filter(None, (_why_dense(tensor, compression, name) for tensor in tensors)), "")
    codec_of(compression).note(str(name), why)
    return reduction(0 if why else codec_of(compression).id, compression, op, prescale, postscale)


def reduction(codec: int, compression: CoreCompressor, op: int, prescale: float, postscale: float) -> Dict[str, Any]:
    """op, prescale, postscale and codec of a request, which is compressed in units without the loss scale.

    >>> from lightcc.compress.compressors import TopK
    >>> compression = TopK(); compression.loss_scale = 8.0; reduction(1, compression, hvd.Average, 2.0, 1.0)
    {'op': 0, 'prescale': 0.25, 'postscale': 8.0, 'codec': 1}
    """
    scale = compression.scale() if codec else 1.0
    return {"op": op, "prescale": prescale / scale, "postscale": postscale * scale, "codec": codec}


def _why_dense(tensor: Any, compression: CoreCompressor, name: str) -> str:
    _, dtype, shape, _ = adapter_of(tensor).describe(tensor)
    return compression.why_dense(str(name), shape, lib.DTYPES[dtype], tensor)


# Statistics

def stats(codecs: Iterable[Codec], dense: str = "") -> Dict[str, Any]:
    """What these codecs have done on this rank; dense: why gradients of theirs travel dense, if the core does not know.

    >>> stats([], "no gradient is compressed")["dense"]
    'no gradient is compressed'
    """
    states = [codec.state() for codec in codecs]
    total = {key: sum(state[key] for state in states) for key in _SUMMED}
    norms = [piece["norm"] for state in states for tensor in state["tensors"] for piece in tensor["pieces"]]
    return {"gradient_bytes": total["gradient_bytes"], "sent_bytes": total["sent_bytes"],
            "dense_sent_bytes": total["dense_sent_bytes"],
            "ratio": _quotient(total["sent_bytes"], total["dense_sent_bytes"]),
            "density": _quotient(total["sent_elements"], total["elements"]),
            "residual_norm": math.sqrt(sum(norm * norm for norm in norms)),
            "route": ", ".join(sorted({tensor["route"] for state in states for tensor in state["tensors"]})),
            "dense": dense or "; ".join(dict.fromkeys(state["dense"] for state in states if state["dense"]))}


_SUMMED = ("gradient_bytes", "sent_bytes", "dense_sent_bytes", "sent_elements", "elements")


def all_stats() -> Dict[str, Any]:
    """stats of all that this process compresses.

    >>> all_stats()["sent_bytes"] >= 0
    True
    """
    return stats(list(_alive))


def _quotient(part: float, whole: float) -> float:
    return part / whole if whole else 1.0
