"""Workers of elastic_worlds.py that die where their test says, and tell rank 0 of hosts as a driver would."""
import json
import random
import re
import threading

import elastic_worlds

from lightcc.core import lib
from lightcc.core.elastic_state import HostUpdateResult

OPTIONS = {"commit_every": 1, "seed": 1}  # those that Worker reads, and "where"


class Worker:
    """A subclass has a state for begin()."""

    FIRST_STEP = 0  # of a world, after which a worker may die at the soonest
    MOST_STEPS = 4  # after that

    def __init__(self, worlds, options):
        self.worlds, self.options = worlds, options
        self.rng = random.Random(1000 * options["seed"] + worlds.me)

    def begin(self, state):
        """state has steps."""
        self.state = state
        state.register_reset_callbacks([self.in_a_new_world])
        self.in_a_new_world()

    def in_a_new_world(self):
        self.last_step = self.state.steps + self.FIRST_STEP + self.rng.randint(0, self.MOST_STEPS)
        self.announced = False

    def where(self):
        """Where the workers of this world die that do."""
        places = self.options["where"]
        return places[self.worlds.number % len(places)]

    def wrap(self, thing, method, where=None, before=False):
        """Lets this worker die inside a call, at the latest at its end, if that is where it shall die; or before it."""
        function = getattr(thing, method)

        def wrapped(*arguments):
            dying = self.dies(where or method)
            if dying and before:
                elastic_worlds.die()
            if dying:
                die_soon(self.rng)
            result = function(*arguments)
            if dying:
                elastic_worlds.die()
            return result
        setattr(thing, method, wrapped)

    def dies(self, where):
        return self.worlds.me in self.worlds.lost and where == self.where() and (
            where in ("sync", "_move") or self.state.steps >= self.last_step)

    def announce(self):
        """What a driver would tell rank 0. All ranks call it after a step."""
        if lib.rank() != 0:
            return
        leaving = self.worlds.lost and self.where() == "leave"
        if (self.worlds.grows or leaving) and self.state.steps >= self.last_step and not self.announced:
            self.announced = True
            self.state.on_hosts_updated(1000 + self.worlds.number,
                                        HostUpdateResult.removed if leaving else HostUpdateResult.added)


def die_soon(rng):
    """While the caller goes on."""
    threading.Timer(rng.random() * 0.004, elastic_worlds.die).start()


def result_of(texts, worlds):
    """What all workers of the last world printed alike behind "result", but for the number of their world, which is the
    last of it."""
    found = {match[1] for text in texts.values() if (match := re.search("^result (.*)$", text, re.MULTILINE))}
    assert len(found) == 1, texts
    *result, number = json.loads(found.pop())
    assert number == len(worlds) - 1, f"the last world was number {number}: {texts}"
    return result
