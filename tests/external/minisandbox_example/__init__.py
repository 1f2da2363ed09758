"""Plug-ins of another distribution: a dialect, a grader, an agent and a backend."""
