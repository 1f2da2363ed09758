"""Graders, one module per kind of :mod:`minisandbox.tasks.graders`."""
