"""The tests; a package of its own, since others install one of this name."""
