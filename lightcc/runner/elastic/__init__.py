"""Elastic jobs under the names of horovod.runner.elastic: how hosts are discovered, and how workers hear of them."""
