"""How good a model is now: metrics whose past fades, for training that never ends."""
import math
import time
from typing import Any, Callable, Dict, Sequence

import numpy

from lightcc.core import ops
from lightcc.core.process_sets import ProcessSet, global_process_set

_UNITS = ("samples", "seconds")


class DecayedAUC:
    """The area under the ROC curve, in which a sample counts half as much after each half_life.

    Scores, from 0 to 1, are counted in bins, positives and negatives; the counts of a bin fade by
    2^(-elapsed / half_life). So it takes 16 bytes a bin, however long it runs. Scores in one bin count as equal: that
    changes the value by at most `error`, which compute() sets: the weight of pairs within a bin, halved.

    half_life: above 0, in samples of all ranks or in seconds; math.inf: nothing fades. bins: at least 2.
    unit: "samples" or "seconds". process_set: the ranks whose samples are counted together. clock: of seconds, which
    all processes share. Errors: ValueError for other arguments.

    >>> from lightcc import embedding
    >>> auc = embedding.DecayedAUC(half_life=1000); auc.update([0.1, 0.4, 0.35, 0.8], [0, 0, 1, 1]); auc.compute()
    0.75
    """

    error: float = math.nan

    def __init__(self, half_life: float, bins: int = 4096, *, unit: str = "samples",
                 process_set: ProcessSet = global_process_set, clock: Callable[[], float] = time.time):
        if not half_life > 0 or bins < 2 or unit not in _UNITS:
            raise ValueError(f"DecayedAUC: half_life={half_life!r}, bins={bins!r}, unit={unit!r}; give a half life "
                             "above 0, at least 2 bins, and samples or seconds.")
        self.half_life, self.bins, self.unit, self.process_set = float(half_life), int(bins), unit, process_set
        self._clock = clock
        self._counts = numpy.zeros((2, self.bins))  # negatives, positives; as they weighed at _now
        self._now = clock() if unit == "seconds" else 0.0

    def update(self, scores: Any, labels: Any, of_all: int = -1) -> None:
        """Counts this rank's samples of a step. Nothing is exchanged.

        scores: from 0 to 1, one a sample; labels: 0 or 1 (what is not 0 is positive), as many. Tensors or arrays on the
        CPU. of_all: the samples of all ranks in this step; -1: this rank's times the number of ranks. A rank that has
        none gives empty scores and of_all, so that its counts fade as the others' do.
        Errors: ValueError for scores that are not from 0 to 1 (NaN, say), and another number of labels; nothing was
        counted.
        """
        of_scores, of_labels = _flat(scores), _flat(labels) != 0
        if len(of_scores) != len(of_labels):
            raise ValueError(f"DecayedAUC: {len(of_scores)} scores and {len(of_labels)} labels.")
        if not numpy.all((of_scores >= 0) & (of_scores <= 1)):
            raise ValueError("DecayedAUC: scores are from 0 to 1; give probabilities, as a sigmoid makes of logits.")
        self._fade(of_all if of_all >= 0 else len(of_scores) * (self.process_set.size() or 1))
        places = numpy.minimum((of_scores * self.bins).astype(numpy.int64), self.bins - 1)
        self._counts += numpy.bincount(places + self.bins * of_labels, minlength=2 * self.bins).reshape(2, self.bins)

    def compute(self) -> float:
        """The value over all ranks, which all call this: one allreduce. NaN until there are positives and negatives."""
        self._fade(0)
        return self._value(ops.allreduce(self._counts, op=ops.ReduceOps.Sum, name="lightcc.embedding.auc",
                                         process_set=self.process_set))

    def reset(self) -> None:
        """Forgets all samples."""
        self._counts[:] = 0

    def state_dict(self) -> Dict[str, Any]:
        """This rank's counts; those of all ranks together are the metric's. Arrays are copies."""
        return {"counts": self._counts.copy(), "now": self._now}

    def load_state_dict(self, state_dict: Dict[str, Any]) -> None:
        """Goes on from counts that state_dict has returned. ValueError for another number of bins."""
        counts = numpy.asarray(state_dict["counts"], numpy.float64)
        if counts.shape != self._counts.shape:
            raise ValueError(f"DecayedAUC: the state has {counts.shape[-1]} bins, and here are {self.bins}.")
        self._counts, self._now = counts.copy(), float(state_dict["now"])

    def load_parts(self, states: Sequence[Dict[str, Any]]) -> None:
        """Goes on from the counts of several ranks together; of none: without counts."""
        self._counts, now = numpy.zeros_like(self._counts), max((float(state["now"]) for state in states), default=0.0)
        for state in states:
            self._counts += state["counts"] * 2.0 ** ((float(state["now"]) - now) / self.half_life)
        self._now = now

    def share(self, leaving: Sequence[int] = ()) -> None:
        """Each rank takes an equal part of all ranks' counts, so that a rank which is lost later takes no period of
        time with it. All ranks call it; the value stays. leaving: ranks of the process set that take nothing."""
        latest = ops.allreduce(numpy.array([self._now]), op=ops.ReduceOps.Max, name="lightcc.embedding.auc.now",
                               process_set=self.process_set)
        self._fade_to(float(latest[0]))
        counts = ops.allreduce(self._counts, op=ops.ReduceOps.Sum, name="lightcc.embedding.auc.share",
                               process_set=self.process_set)
        taking = [rank for rank in range(self.process_set.size() or 1) if rank not in leaving]
        self._counts = counts * ((self.process_set.rank() in taking) / max(len(taking), 1))

    def _fade(self, samples: int) -> None:
        self._fade_to(max(self._now, self._clock()) if self.unit == "seconds" else self._now + samples)

    def _fade_to(self, now: float) -> None:
        self._counts *= 2.0 ** ((self._now - now) / self.half_life)
        self._now = now

    def _value(self, counts: numpy.ndarray) -> float:
        negatives, positives = counts
        pairs = positives.sum() * negatives.sum()
        if not pairs > 0:
            self.error = math.nan
            return math.nan
        below = numpy.cumsum(negatives) - negatives
        self.error = float((positives * negatives).sum() / pairs / 2)
        return float((positives * (below + negatives / 2)).sum() / pairs)


def _flat(values: Any) -> numpy.ndarray:
    return numpy.asarray(values.detach() if hasattr(values, "detach") else values, numpy.float64).reshape(-1)
