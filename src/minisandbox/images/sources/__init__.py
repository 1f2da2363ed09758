"""Fetch the sources of repositories: git commits, directories of this machine, source archives."""
