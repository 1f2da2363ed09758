"""Wrap kernel interfaces: system calls, mounts, user namespaces, id ranges, control groups, seccomp filters."""
