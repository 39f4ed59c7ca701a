"""Stands in for ssh between the driver of an elastic job and the agent on a node of Ray: python -m lightcc.ray.carry
ADDRESS NODE CPUS GPUS COMMAND. Standard input and output are the agent's; its bytes travel by calls of an actor there.
"""
import asyncio
import os
import sys
from typing import Any

import ray
from ray.exceptions import RayActorError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from lightcc.launch.carry import CHUNK_BYTES, LOST, carry

_ROOM_S = 5.0  # the time that Ray takes for an actor for which it has room, and more


class CarriedAgent:
    """The actor: a command, with the resources that the actor has reserved."""

    _process: asyncio.subprocess.Process

    async def start(self, command: str) -> None:
        pipe = asyncio.subprocess.PIPE
        self._process = await asyncio.create_subprocess_exec("/bin/sh", "-c", command, stdin=pipe, stdout=pipe,
                                                             stderr=pipe)

    async def write(self, chunk: bytes) -> None:
        """b"" ends it."""
        assert self._process.stdin is not None
        if chunk:
            self._process.stdin.write(chunk)
            await self._process.stdin.drain()
        else:
            self._process.stdin.close()

    async def read(self, number: int) -> bytes:
        """Of standard output, 1, or standard error, 2; b"" at its end."""
        stream = self._process.stdout if number == 1 else self._process.stderr
        assert stream is not None
        return await stream.read(CHUNK_BYTES)

    async def wait(self) -> int:
        return await self._process.wait()


def main(address: str, node: str, cpus: float, gpus: float, command: str) -> int:
    outputs = {1: os.dup(1), 2: os.dup(2)}  # Ray prints, too
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for number in outputs:
        os.dup2(nowhere, number)
    try:
        ray.init(address=address, log_to_driver=False, logging_level="error")
        agent = ray.remote(CarriedAgent).options(
            num_cpus=cpus, num_gpus=gpus, scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False)).remote()
        start = agent.start.remote(command)
        if not ray.wait([start], timeout=_ROOM_S)[0]:
            os.write(outputs[2], f"Ray's node {node}: after {_ROOM_S:g} s Ray had not given CPU: {cpus:g}, "
                                 f"GPU: {gpus:g}; others may have them\n".encode())
        ray.get(start)
        carry(lambda chunk: _quietly(agent.write, chunk), lambda number: _quietly(agent.read, number), outputs)
        return ray.get(agent.wait.remote())
    except Exception as error:
        os.write(outputs[2], f"Ray's node {node}: {type(error).__name__}: {error}\n".encode())
        return LOST


def _quietly(method: Any, argument: Any) -> Any:
    """What the actor's method returns; None when the actor has gone, as main() says."""
    try:
        return ray.get(method.remote(argument))
    except RayActorError:
        return None


if __name__ == "__main__":
    address, node, cpus, gpus, command = sys.argv[1:6]
    os._exit(main(address, node, float(cpus), float(gpus), command))  # Ray's own end would take longer
