"""Build and inspect Python environments: interpreters, the package index, pins and lock files."""
