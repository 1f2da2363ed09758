"""Code that runs inside a sandbox and serves its jobs: commands, processes, shells, file operations, changes."""
