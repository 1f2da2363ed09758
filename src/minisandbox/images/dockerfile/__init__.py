"""Dockerfiles: parse them, evaluate them into stages of resolved steps, and build those without a container engine."""
