"""What rank 0 of a RayExecutor reports while it runs; the driver hands it to the callbacks of run()."""
import asyncio
import contextlib
from typing import Any, Dict, List

import ray
from ray.exceptions import RayActorError

_channel: Any = None  # an actor of Channel; none on other ranks, and without callbacks


class Channel:
    """An actor between rank 0 and the driver, which keeps what was logged in its order."""

    def __init__(self) -> None:
        self._infos: List[Dict[str, Any]] = []
        self._more = asyncio.Condition()

    async def put(self, info: Dict[str, Any]) -> None:
        async with self._more:
            self._infos.append(info)
            self._more.notify_all()

    async def since(self, index: int, wait: bool) -> List[Dict[str, Any]]:
        """What was logged from the index-th on. wait: until there is something."""
        async with self._more:
            while wait and len(self._infos) <= index:
                await self._more.wait()
            return self._infos[index:]


def configure(channel: Any) -> None:
    """On rank 0, before its function runs."""
    global _channel
    _channel = channel


def log(info: Dict[str, Any]) -> None:
    """Hands info to every callback of RayExecutor.run(callbacks=[...]), in the driver. Does nothing on other ranks than
    rank 0, and without callbacks. Source: horovod.ray.ray_logger.

    info: anything that pickles, such as {"epoch": 3, "loss": 0.25}.
    """
    if _channel is not None:
        with contextlib.suppress(RayActorError):  # the driver has given this run up, and nobody listens
            ray.get(_channel.put.remote(info))
