"""Whole sets: validations and evaluations of many tasks at once, in directories where they resume."""
