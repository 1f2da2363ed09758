"""Files and directories of the store's disk, as every part of it needs them."""
