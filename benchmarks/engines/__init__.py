"""What a sandbox costs in MiniSandbox, bubblewrap, podman, docker and the original's way, measured in alternation."""
