"""``minisandbox trajectories``: show rollouts, and select and export training data."""
