"""``minisandbox image``: build, pull, list, verify, remove and move images."""
