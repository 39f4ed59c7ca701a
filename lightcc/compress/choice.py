"""Which compression the gradients of an optimizer or a tape get, by what it was given and the job's knobs."""
import warnings
from typing import Any, Iterable

from lightcc.compress.compressors import CoreCompressor, NoneCompressor, TopK, some
from lightcc.core import lib
from lightcc.core.knobs import knob
from lightcc.core.ops import Average, ReduceOps  # noqa: F401  Average: in the example

_ADAPTIVE = ("adam", "lamb", "adagrad", "rmsprop")


def compression_of(compression: Any, op: int, optimizer_class: str, stacklevel: int = 3) -> Any:
    """The compression of an optimizer or tape: what it was given, or Compression.topk if that is none and
    LIGHT_TOPK_ALLREDUCE=1 (rank 0's knobs hold) and op is a sum.

    Warns, on rank 0, if an optimizer of this class does not do well with topk; "" for a tape.
    ValueError for Compression.topk or int8 with an op other than Average and Sum.

    >>> compression_of(TopK(0.5), Average, "SGD").ratio
    0.5
    """
    is_sum = op in (ReduceOps.Average, ReduceOps.Sum)
    if compression is NoneCompressor and is_sum and knob("LIGHT_TOPK_ALLREDUCE") == "1":
        compression = TopK(float(knob("LIGHT_TOPK_RATIO")), knob("LIGHT_TOPK_FP16") == "1")
    if isinstance(compression, CoreCompressor) and not is_sum:
        raise ValueError(f"{compression} is for op=Average and op=Sum: of other reductions nothing can be left for the "
                         "next step.")
    adaptive = any(word in optimizer_class.lower() for word in _ADAPTIVE)
    if isinstance(compression, TopK) and adaptive and lib.rank() == 0:
        warnings.warn(f"{optimizer_class} with {compression}: an adaptive optimizer divides by running averages of "
                      "squared gradients, and topk makes gradients sparse and late, so that its steps are not those "
                      "without compression. SGD with momentum is known to converge; or use Compression.int8 "
                      "(docs/compression.md).", UserWarning, stacklevel)
    return compression


def text_of(compression: Any) -> str:
    """A compression in words that are the same on all ranks which use equal ones, without addresses in memory.

    >>> text_of(TopK(0.5)), text_of(NoneCompressor)
    ('TopK(ratio=0.5, fp16=False, warmup_steps=0, momentum_correction=None)', 'NoneCompressor')
    """
    if not isinstance(compression, CoreCompressor):
        return compression.__name__ if isinstance(compression, type) else type(compression).__name__
    options = ", ".join(f"{name}={value!r}" for name, value in compression.options().items() if name != "dense")
    return f"{type(compression).__name__}({options})"


def too_few_to_compress(gradient_bytes: int, others: Iterable[str] = ()) -> str:
    """Why the gradients of one step travel dense, of which so many bytes could be compressed; "": they do not.

    others: of each gradient that could not be compressed, why (CoreCompressor.why_dense).

    >>> too_few_to_compress(0, ["conv.bias has fewer than two dimensions"])
    'no gradient is of the kind that is compressed: conv.bias has fewer than two dimensions'
    """
    least = int(knob("LIGHT_TOPK_THRESHOLD"))
    if gradient_bytes == 0:
        why = some(others)
        return "no gradient is of the kind that is compressed" + (f": {why}" if why else "")
    return "" if gradient_bytes >= least else (f"{gradient_bytes} bytes of gradients could be compressed, fewer than "
                                               f"LIGHT_TOPK_THRESHOLD={least}")
