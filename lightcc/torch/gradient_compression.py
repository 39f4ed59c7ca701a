"""Which gradients of a reducer the core compresses, and what it leaves behind of them.

All ranks must decide alike, and what is left behind must be found again. So it is decided before the first gradient of
a step is sent, by names, shapes, dtypes and knobs that are the same everywhere. A group is compressed only as a whole:
its members that travel dense form a group of their own. With sparse_as_dense a gradient is compressed once all ranks
have settled that it is not sparse, as entries that come late would find no place.
"""
import logging
from typing import Any, Callable, Dict, Iterator, List, Optional, Sequence, Tuple

import torch

from lightcc.compress import residuals
from lightcc.compress.choice import too_few_to_compress
from lightcc.compress.codec import Codec, reduction, stats
from lightcc.compress.compressors import CoreCompressor
from lightcc.core import lib
from lightcc.core.process_sets import ProcessSet
from lightcc.torch import slots
from lightcc.torch.gradient import Gradient

_logger = logging.getLogger("lightcc")


class GradientCompression:
    """One reducer has it. Used by one thread at a time."""

    def __init__(self, compression: CoreCompressor, summing: Tuple[int, float, float], process_set: ProcessSet):
        """summing: op, prescale and postscale."""
        self._compression, self._summing, self._process_set = compression, summing, process_set
        self._codec = Codec(compression)
        self.request = (*summing, 0)        # of what travels compressed: op, prescale, postscale and codec
        self._decided: Any = None           # on what make_ready has decided
        self._why_dense = "no gradient has travelled yet"
        self._me = 0, 1                     # rank and size when gradients were last sent: state outlives the epoch
        self._at: Dict[str, Tuple[residuals.Place, int]] = {}  # where the core has them, also while others are used
        self._loaded: Optional[residuals.Saved] = None    # not written to the core yet
        self._gathered: Optional[residuals.Saved] = None  # of all ranks; until the next step

    @classmethod
    def of(cls, compression: Any, summing: Tuple[int, float, float],
           process_set: ProcessSet) -> "Optional[GradientCompression]":
        """None: it is not the core that does it."""
        return cls(compression, summing, process_set) if isinstance(compression, CoreCompressor) else None

    def may_compress(self, gradient: Gradient) -> bool:
        """Whether the gradient is of the kind that travels compressed."""
        return not gradient.local and not self._why_not(gradient)

    def _why_not(self, gradient: Gradient) -> str:
        parameter = gradient.parameter
        dtype = str(slots.gradient_dtype(parameter)).rpartition(".")[2]
        return self._compression.why_dense(gradient.given_name, parameter.shape, dtype, parameter)

    def parts_of(self, name: str, members: Sequence[Gradient]) -> Iterator[Tuple[str, List[Gradient]]]:
        """A group's name and members, cut into what may be compressed and what travels dense."""
        yield name, [member for member in members if not self.may_compress(member)]
        yield f"{name}.compressed", [member for member in members if self.may_compress(member)]

    def make_ready(self, gradients: Sequence[Gradient], undecided: Sequence[Gradient],
                   prepare: Callable[[Gradient], int]) -> None:
        """Decides, before the first gradient of a step is sent; while any is on its way, nothing changes.

        undecided: of which it is not settled whether they are sparse, if that matters. prepare: makes a request anew.
        """
        if any(gradient.sent for gradient in gradients):
            return
        self._gathered = None
        request = tuple(reduction(self._codec.id, self._compression, *self._summing).values())
        decided = lib.epoch, request, [*map(id, gradients)], [*map(id, undecided)]
        if decided == self._decided:
            return
        all_anew, self.request = request != self.request, request
        wanted = [gradient for gradient in gradients if self.may_compress(gradient)]
        whys = (self._why_not(gradient) for gradient in gradients if not gradient.local)
        self._why_dense = too_few_to_compress(sum(g.parameter.nbytes for g in wanted), filter(None, whys))
        self._codec.note("", self._why_dense)
        dense = set(decided[-1])
        chosen = set() if self._why_dense else {id(g) for g in wanted if id(g) not in dense and not g.sparse_dims}
        for gradient in gradients:
            before, gradient.compressed = gradient.compressed, id(gradient) in chosen
            if gradient.prepared and (gradient.compressed != before or (before and all_anew)):
                lib.discard(gradient.prepared)
                gradient.prepared = prepare(gradient)
        self._me = self._process_set.rank(), self._process_set.size()
        self._at = self._places(gradients)
        self._write_loaded()
        self._decided = decided

    def fit(self, gradient: Gradient) -> None:
        """The gradient has got another form, maybe one that cannot be compressed."""
        gradient.compressed = gradient.compressed and self.may_compress(gradient)
        self._decided = None

    # What is left behind

    def to_save(self) -> Optional[residuals.Saved]:
        """This rank's, for a checkpoint; those of all ranks between gather and the next step."""
        return self._loaded or self._gathered or self._own()

    def gather(self) -> Optional[residuals.Saved]:
        """Those of all ranks, which all call this."""
        everyone = residuals.gather(self._loaded or self._own(), self._process_set)
        self._gathered = everyone
        return everyone

    def load(self, saved: Optional[residuals.Saved]) -> None:
        """From now on only what was saved is left behind."""
        self._codec, self.request = Codec(self._compression), (*self._summing, 0)
        self._loaded, self._gathered, self._decided = saved, None, None
        why = residuals.missing(saved, self._process_set) if lib.initialized() else ""
        if why:
            _logger.log(logging.INFO if saved is None else logging.WARNING, "optimizer state: %s", why)

    @staticmethod
    def stats_of(several: "Sequence[GradientCompression]") -> Dict[str, Any]:
        """What those of one optimizer have done together (lightcc.compress.codec.stats)."""
        return stats([one._codec for one in several], next((one._why_dense for one in several if one._why_dense), ""))

    def _own(self) -> Optional[residuals.Saved]:
        names = {place: name for name, (place, _) in self._at.items()}
        saved = residuals.read(self._codec, names, *self._me)
        return saved and residuals.with_values(saved, lambda values: torch.frombuffer(values, dtype=torch.float32))

    def _write_loaded(self) -> None:
        saved, self._loaded = self._loaded, None
        if saved is None:
            return
        values = residuals.with_values(
            saved, lambda values: values.detach().to("cpu", torch.float32, copy=True).contiguous().numpy())
        unknown = residuals.write(self._codec, self._at, values)
        if unknown:
            _logger.warning("optimizer state: what compression had left behind of %s is dropped: there is no such "
                            "gradient here.", ", ".join(unknown))

    def _places(self, gradients: Sequence[Gradient]) -> Dict[str, Tuple[residuals.Place, int]]:
        group = self._process_set.process_set_id
        return {g.given_name: ((group, g.home.name, g.home.index_of(g)) if g.home else (group, g.name, 0),
                               g.parameter.numel()) for g in gradients}
