"""Where repositories come from: git, directories of this machine, source archives."""
