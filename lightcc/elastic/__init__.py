"""Elastic training: the members of a job change while it runs. What a framework has of it is in its own package."""
