"""What an all-reduce costs and why: the predictions of the core's cost model, and a timeline's account of a step."""

from lightcc.explain.cluster import Cluster, Training
from lightcc.explain.model import Candidate, candidates, measured_cluster
from lightcc.explain.step import Step, median_step

__all__ = ["Candidate", "Cluster", "Step", "Training", "candidates", "measured_cluster",
           "median_step"]
