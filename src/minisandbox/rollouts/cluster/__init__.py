"""Run rollouts and checks on the nodes of a Ray cluster. Ray is imported on joining one."""

from minisandbox.rollouts.cluster.fleet import Fleet, NodeReport
from minisandbox.rollouts.cluster.joining import Cluster
from minisandbox.rollouts.cluster.node import Resources
from minisandbox.rollouts.cluster.submit import ClusterChecks, ClusterRollouts
from minisandbox.rollouts.cluster.worker import Terms

__all__ = ["Cluster", "ClusterChecks", "ClusterRollouts", "Fleet", "NodeReport", "Resources", "Terms"]
