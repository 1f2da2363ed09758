"""Contexts of Dockerfiles hold tests of projects of their own, which are no tests of this one."""

collect_ignore = ["contexts"]
