"""join() is refused while ranks average parameters, or how far they have come: one that has joined would add zeros."""
import gc
import weakref
from typing import Any

from lightcc.core import request

_exchanges: "weakref.WeakSet[Any]" = weakref.WeakSet()


def refuse_join(exchange: Any) -> None:
    """From now on this rank's join() is a ValueError, for as long as the exchange lives and is of this epoch. exchange:
    has is_of_this_epoch(), and what: the name of what made it."""
    _exchanges.add(exchange)


def allow_join(exchange: Any) -> None:
    """The exchange has ended on all ranks."""
    _exchanges.discard(exchange)


def _check() -> None:
    if any(exchange.is_of_this_epoch() for exchange in _exchanges):
        gc.collect()  # one that was dropped may be a part of a circle of references
    for exchange in _exchanges:
        if exchange.is_of_this_epoch():
            raise ValueError(f"hvd.join: {exchange.what} averages over all ranks, to which one that has joined would "
                             "add zeros. Make as many steps on all ranks, or call exchange_now() on all and drop what "
                             f"{exchange.what} has returned before. In Keras, join after fit.")


request.before_join.append(_check)
