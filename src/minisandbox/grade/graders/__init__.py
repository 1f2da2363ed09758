"""Graders, one module for each kind of :mod:`minisandbox.tasks.graders`."""
