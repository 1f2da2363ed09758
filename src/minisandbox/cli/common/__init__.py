"""Declare options and print output that several nouns share."""
