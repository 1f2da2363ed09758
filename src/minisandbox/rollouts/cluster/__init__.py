"""Work on many nodes: a driver, and a worker on each node of a Ray cluster. Ray is imported when one is joined."""

from minisandbox.rollouts.cluster.desk import ClusterChecks, ClusterRollouts
from minisandbox.rollouts.cluster.fleet import Fleet, NodeReport
from minisandbox.rollouts.cluster.joining import Cluster
from minisandbox.rollouts.cluster.node import Resources
from minisandbox.rollouts.cluster.worker import Terms

__all__ = ["Cluster", "ClusterChecks", "ClusterRollouts", "Fleet", "NodeReport", "Resources", "Terms"]
