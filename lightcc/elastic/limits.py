"""What a user has asked for, as membership.py takes it."""
from dataclasses import dataclass
from typing import Optional


@dataclass(frozen=True)
class Limits:
    """Times in seconds."""

    num_proc: int                        # slots to begin with
    min_num_proc: int
    max_num_proc: Optional[int] = None   # None: as many as there are slots
    elastic_timeout_s: float = 600.0     # for enough workers to be there
    reset_limit: Optional[int] = None    # epochs after the first
    cooldown_s: Optional[tuple[float, float]] = None  # shortest and longest; None: for ever
    failures_per_host: int = 1
    hosts_may_come: bool = False         # hosts are discovered again and again
    newcomer_timeout_s: float = 30.0     # that newcomers wait for the others of their discovery

    @property
    def most(self) -> float:
        return float("inf") if self.max_num_proc is None else self.max_num_proc
