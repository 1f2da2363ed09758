"""Confirmation: further runs that tell a pass that was earned from one that was forged. An option of grading."""
