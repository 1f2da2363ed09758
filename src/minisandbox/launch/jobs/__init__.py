"""Programs inside a sandbox that carry out calls: workers, commands, processes, shells, files, changes."""
