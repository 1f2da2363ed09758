"""Parse and check the patches of tasks, recipes and submissions, all by the same rules."""

from minisandbox.patches.parsing import (
    FileChange,
    FileStatus,
    explain_line_endings,
    parse_patch,
    removed_files,
    touched_files,
)
from minisandbox.patches.paths import leads_inside

__all__ = [
    "FileChange",
    "FileStatus",
    "explain_line_endings",
    "leads_inside",
    "parse_patch",
    "removed_files",
    "touched_files",
]
