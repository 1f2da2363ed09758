"""Run the graders: one module for each kind in :mod:`minisandbox.tasks.graders`."""
