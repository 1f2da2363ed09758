"""Formats of task files: JSON Lines, JSON, Parquet and folders of datasets."""
