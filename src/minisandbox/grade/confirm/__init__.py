"""Confirmation: further test runs that distinguish earned passes from forged ones. An option of grading."""
