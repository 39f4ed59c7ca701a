"""Elastic jobs: what a worker hears of its driver (worker), by Horovod's names."""
