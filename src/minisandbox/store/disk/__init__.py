"""Write, read, lock and remove the store's files and directories safely."""
