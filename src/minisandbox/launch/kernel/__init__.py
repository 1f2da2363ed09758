"""What the launcher asks of the kernel: system calls, mounts, user namespaces, id ranges, control groups, filters."""
