"""Elastic jobs: which workers form an epoch (membership.py), the loop that starts them and talks to them (driver.py),
and a worker's end of that talk (worker.py)."""
