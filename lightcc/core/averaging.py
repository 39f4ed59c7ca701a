"""join() is refused while ranks average parameters: one that has joined would add zeros to them."""
import gc
import weakref
from typing import Any

from lightcc.core import request

_exchanges: "weakref.WeakSet[Any]" = weakref.WeakSet()


def refuse_join(exchange: Any) -> None:
    """From now on this rank's join() is a ValueError, for as long as the exchange lives and its method is_of_this_epoch
    says so."""
    _exchanges.add(exchange)


def allow_join(exchange: Any) -> None:
    """The exchange has ended on all ranks."""
    _exchanges.discard(exchange)


def _check() -> None:
    if any(exchange.is_of_this_epoch() for exchange in _exchanges):
        gc.collect()  # one that was dropped may be a part of a circle of references
    if any(exchange.is_of_this_epoch() for exchange in _exchanges):
        raise ValueError("hvd.join: hvd.LocalSGD averages parameters, to which a rank that has joined would add zeros. "
                         "Make as many steps on all ranks, or call exchange_now() on all and drop what hvd.LocalSGD "
                         "has returned before. In Keras, join after fit.")


request.before_join.append(_check)
