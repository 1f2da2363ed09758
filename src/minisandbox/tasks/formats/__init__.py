"""Read and write task files: JSON Lines, JSON, Parquet, and folders of the ``datasets`` package."""
