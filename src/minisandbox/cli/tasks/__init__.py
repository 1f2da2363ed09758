"""``minisandbox tasks``: list, check, select and convert task sets."""
