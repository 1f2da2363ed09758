"""Which test stands for which case of the attack list's host side: HD (confused deputy), CR (crashes), BI (bad input).

The probes of ``attack.py``, which run inside, have :mod:`.test_attacks`.
"""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[1]
DEPUTY, CRASHES, MANY = "adversarial/test_deputy.py", "adversarial/test_crashes.py", "adversarial/test_many.py"
FILES, TREES, PATCH = "kernel/test_files.py", "kernel/test_trees.py", "kernel/test_patch.py"
EXEC, SHELL, LIMITS, LIFE = (
    "kernel/test_exec.py",
    "kernel/test_shell.py",
    "kernel/test_limits.py",
    "kernel/test_lifecycle.py",
)
BUILD, TROUBLE, BUILDS = "kernel/test_build.py", "kernel/test_build_trouble.py", "adversarial/test_builds.py"
STORE, ROWS, TASKS = "unit/test_store.py", "unit/test_tasks_jsonl.py", "unit/test_tasks.py"
GRADE, ROLLOUTS = "kernel/grading/test_grade.py", "kernel/grading/test_rollouts.py"
PATCHES, CLI, RUNS = "unit/test_patches.py", "unit/test_cli.py", "unit/test_rundir.py"

# id -> where: "FILE::function", or the title of a case of the conformance suite
CASES: dict[str, tuple[str, ...]] = {
    "HD01": (
        f"{FILES}::test_links_are_followed_inside_and_lead_nowhere_else",
        f"{DEPUTY}::test_a_name_that_changes_between_file_and_link_while_the_host_reads",
    ),
    "HD02": (
        f"{DEPUTY}::test_writing_through_a_link_stays_inside",
        f"{TREES}::test_nothing_is_written_through_a_planted_directory",
    ),
    "HD03": (f"{FILES}::test_odd_files_are_errors_and_never_hang", f"{TREES}::test_a_fifo_never_blocks"),
    "HD04": ("adversarial/test_files_and_mounts.py::test_a_link_to_the_workers_own_proc_files_is_not_read",),
    "HD05": (f"{DEPUTY}::test_a_sparse_giant_takes_no_memory",),
    "HD06": (f"{DEPUTY}::test_a_name_that_changes_between_file_and_link_while_the_host_reads",),
    "HD07": (
        f"{PATCH}::test_settings_of_the_repository_do_not_shape_the_patch",
        "unit/test_images_hosttools.py::test_a_repository_that_a_hook_names_is_not_the_one_that_is_read",
    ),
    "HD08": (
        f"{PATCH}::test_a_destroyed_repository_is_an_error",
        f"{BUILDS}::test_a_git_directory_that_a_build_leaves_is_replaced",
        f"{ROLLOUTS}::test_an_agent_that_destroys_the_repository_gets_nothing_for_it",
    ),
    "HD09": (
        f"{DEPUTY}::test_an_upper_of_everything_that_is_hard_to_remove",
        "unit/test_store_trees.py::test_depth_costs_no_stack",
    ),
    "HD10": (f"{CLI}::test_data_cannot_steer_the_terminal", "odd names are names like others, for every verb"),
    "HD11": (
        f"{BUILD}::test_patches_that_reach_outside_are_refused_before_anything_is_built",
        f"{PATCHES}::test_refused",
    ),
    "HD12": (
        "adversarial/test_reward_hacks.py::test_a_link_that_leads_outside_is_left_out",
        "adversarial/test_reward_hacks.py::test_no_test_is_changed_through_a_link",
    ),
    "HD13": ("a patch larger than the limit is an error; a large one is whole",),
    "HD14": (f"{BUILD}::test_sdist_that_reaches_outside", "unit/test_transfers.py::test_hostile_trees"),
    "HD15": (
        f"{SHELL}::test_false_reports_are_not_believed",
        "output is bytes as they are, without a prompt, an echo or a mark of ours",
    ),
    "HD16": ("unit/test_trajectories.py::test_any_content_survives", f"{CLI}::test_data_cannot_steer_the_terminal"),
    "HD17": (
        f"{DEPUTY}::test_marks_that_an_agent_plants_mean_nothing_in_a_fork",
        f"{DEPUTY}::test_marks_that_a_build_plants_mean_nothing_in_a_layer",
        "adversarial/test_files_and_mounts.py::test_what_is_setuid_in_an_upper_is_out_of_others_reach",
    ),
    "HD18": (f"{DEPUTY}::test_a_program_of_the_image_that_the_agent_replaces_is_its_own",),
    "HD19": (f"{DEPUTY}::test_a_workdir_and_a_shell_that_the_agent_has_replaced",),
    "HD20": (
        "a command may kill everything that it sees; the sandbox lives on",
        f"{EXEC}::test_a_worker_that_is_attacked_from_inside_loses_its_command_and_nothing_else",
    ),
    "CR01": (
        f"{LIFE}::test_sigkill_of_the_controller_leaves_nothing",
        "adversarial/test_load.py::test_nothing_is_left_of_what_was_killed_at_random_moments",
    ),
    "CR02": (
        f"{STORE}::test_a_killed_maker_leaves_nothing_that_lasts",
        f"{TROUBLE}::test_a_killed_build_is_cleaned_up_and_can_be_repeated",
    ),
    "CR03": (
        f"{STORE}::test_processes_share_one_make",
        f"{TROUBLE}::test_processes_that_want_the_same_image_build_it_once",
    ),
    "CR04": (
        "unit/test_store_damage.py::test_a_flipped_byte_is_found_by_reading",
        "unit/test_store_damage.py::test_a_layer_with_a_damaged_record_is_made_again_by_its_next_use",
    ),
    "CR05": (f"{STORE}::test_a_full_disk_is_said_and_cleaned", "a full disk is said, and the sandbox lives on"),
    "CR06": (f"{LIMITS}::test_a_memory_bomb_ends_by_itself_and_is_named",),
    "CR07": (
        f"{LIMITS}::test_a_fork_bomb_ends_inside",
        f"{CRASHES}::test_a_bomb_that_goes_on_keeps_nobody_from_asking_and_stopping",
    ),
    "CR08": ("10^9 bytes: memory is bounded and the count of what was dropped is exact",),
    "CR09": ("a timeout ends what ignores every signal that can be ignored",),
    "CR10": ("a background child that holds stdout does not hold the result; it lives on and is counted",),
    "CR11": ("stdin is empty unless given", "interpreters without a script end at once"),
    "CR12": ("git commit, rebase and tag without a message end by themselves", "pagers print and end"),
    "CR13": (
        "exit is the command's status; the shell says that it was restarted, and keeps its directory alone",
        "a shell that is killed from inside is restarted",
    ),
    "CR14": (
        "a directory that is removed under it, or cannot be entered, is no harm",
        f"{SHELL}::test_a_readonly_and_poisoned_state",
    ),
    "CR15": (
        f"{ROLLOUTS}::test_an_interrupted_batch_keeps_what_is_finished",
        f"{ROLLOUTS}::test_a_batch_and_its_resumption",
    ),
    "CR16": ("unit/test_host.py::test_what_a_dead_owner_left_is_reclaimed", f"{RUNS}::test_one_writer_at_a_time"),
    "CR17": (f"{MANY}::test_many_sandboxes_live_at_once_and_leave_nothing",),
    "CR18": (
        f"{MANY}::test_nothing_waits_by_the_time_of_day",
        f"{MANY}::test_a_clock_that_jumps_ends_nothing_early_or_late",
    ),
    "CR19": (
        "unit/test_models_client.py::test_a_fault_that_passes_costs_a_try",
        "unit/test_models_client.py::test_a_fault_that_stays_ends_in_its_error",
        "kernel/grading/test_rollout_models.py::test_every_fault_of_a_model_ends_in_the_right_status_with_the_record_complete",
    ),
    "CR20": (f"{CRASHES}::test_nothing_adds_up_over_many_sandboxes",),
    "BI01": (f"{ROWS}::test_files_that_are_wrong", f"{ROWS}::test_any_bytes_are_taken_or_refused"),
    "BI02": (f"{TASKS}::test_a_set_has_each_id_once",),
    "BI03": (f"{TASKS}::test_values_that_cannot_be_used", f"{RUNS}::test_long_and_odd_names"),
    "BI04": (f"{ROWS}::test_missing_fields", f"{ROWS}::test_ids_may_be_json_in_a_string_as_in_the_public_datasets"),
    "BI05": (
        "bytes that are not text arrive as they are; as text they are replaced",
        "unit/test_trajectories.py::test_any_content_survives",
    ),
    "BI06": (
        f"{BUILD}::test_patches_that_do_not_apply",
        f"{BUILD}::test_crlf_patches",
        f"{GRADE}::test_a_patch_that_cannot_be_applied_is_the_agents_fault",
    ),
    "BI07": (
        "arguments that cannot be used are refused before anything runs",
        "a script may be longer than an argument, and keeps its status and stdin",
    ),
    "BI08": (f"{LIFE}::test_layers_with_odd_paths",),
    "BI09": (
        "unit/test_agent_formats.py::test_any_text_is_an_action_or_a_format_error",
        "unit/test_agent_formats.py::test_calls_that_are_no_action",
        "unit/test_bash_agent.py::test_format_errors_in_a_row_end_it",
        "unit/test_bash_agent.py::test_the_longest_command_runs",
    ),
    "BI10": (f"{LIFE}::test_many_layers", "kernel/test_snapshots.py::test_names_that_are_no_text_and_very_many_files"),
    "BI11": (f"{PATCH}::test_loops_of_links_names_of_another_case_and_line_ends_survive_a_round_trip",),
    "BI12": (f"{CLI}::test_values_are_checked_before_any_work", f"{RUNS}::test_another_configuration_is_refused"),
}
NUMBERS = {"HD": 20, "CR": 20, "BI": 12}


@cache
def functions_of(path: str) -> frozenset[str]:
    """The test functions of a file."""
    tree = ast.parse((TESTS / path).read_bytes())
    return frozenset(node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


@cache
def titles() -> frozenset[str]:
    """The titles of the conformance suite's cases."""
    found = set()
    for path in (TESTS / "conformance").glob("cases_*.py"):
        for node in ast.walk(ast.parse(path.read_bytes())):
            if (
                isinstance(node, ast.Call)
                and ast.unparse(node.func) == "case"
                and node.args
                and isinstance(node.args[0], ast.Constant)
            ):
                found.add(str(node.args[0].value))
    return frozenset(found)


def test_every_case_has_a_test() -> None:
    listed = {f"{group}{number:02}" for group, count in NUMBERS.items() for number in range(1, count + 1)}
    assert CASES.keys() == listed
    assert all(CASES.values())


@pytest.mark.parametrize("number", CASES)
def test_its_tests_exist(number: str) -> None:
    for where in CASES[number]:
        path, _, name = where.rpartition("::")
        assert name in (functions_of(path) if path else titles()), where
