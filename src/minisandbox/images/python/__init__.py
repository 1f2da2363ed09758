"""Python environments: interpreters, the package index, pins and locks."""
