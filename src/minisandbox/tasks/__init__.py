"""Load dataset rows as tasks, with the build and the tests of each."""

from minisandbox.tasks.builds import Build, ContainerBuild
from minisandbox.tasks.context import ENVIRONMENTS, LoadContext
from minisandbox.tasks.dialects import DIALECTS, Dialect, task_from_row
from minisandbox.tasks.formats.documents import Layout
from minisandbox.tasks.graders import Grader, LogGrader, PytestGrader, ScriptGrader
from minisandbox.tasks.needs import Needs, Solution
from minisandbox.tasks.recipe_file import read_recipe
from minisandbox.tasks.rows import RowFields, task_from_own_row
from minisandbox.tasks.statuses import STATUSES_NAME, read_statuses, write_statuses
from minisandbox.tasks.task import Form, Reference, Task, file_of, node_id
from minisandbox.tasks.taskset import TaskSet, bundled_sets

__all__ = [
    "DIALECTS",
    "ENVIRONMENTS",
    "STATUSES_NAME",
    "Build",
    "ContainerBuild",
    "Dialect",
    "Form",
    "Grader",
    "Layout",
    "LoadContext",
    "LogGrader",
    "Needs",
    "PytestGrader",
    "Reference",
    "RowFields",
    "ScriptGrader",
    "Solution",
    "Task",
    "TaskSet",
    "bundled_sets",
    "file_of",
    "node_id",
    "read_recipe",
    "read_statuses",
    "task_from_own_row",
    "task_from_row",
    "write_statuses",
]
