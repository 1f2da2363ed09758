"""What runs inside a sandbox on a caller's behalf: workers, commands, processes, shells, files, changes."""
