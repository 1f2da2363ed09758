"""Validate and evaluate whole task sets, in run directories that resume."""
