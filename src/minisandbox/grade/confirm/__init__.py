"""Confirm passes by further test runs, which reveal forged passes. An option of grading."""
