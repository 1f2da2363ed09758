"""Two nodes, a few rollouts: the part of these tests that `make test` has."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from tests import waiting
from tests.cluster.cluster_tools import clean_hosts, command, live, make_tasks, results, said

from minisandbox.errors import HostError

DEADLINE = 900.0


def test_two_nodes_do_a_batch_and_leave_nothing(tmp_path: Path) -> None:
    make_tasks(tmp_path, 2)
    with clean_hosts(tmp_path, 2, 2) as cluster:
        words = command(tmp_path, "run", 3, "--cluster", cluster.head)
        with (tmp_path / "run.out").open("w") as out, (tmp_path / "run.err").open("w") as err:
            running = cluster.all[0].popen(*words, out=out, err=err)
            assert running.wait(DEADLINE) == 0, (tmp_path / "run.err").read_text()
        found = results(tmp_path / "run")
        assert sorted(one[2] for one in found.values()) == [0.0] * 3 + [1.0] * 3  # type: ignore[type-var] # rewards
        nodes = said(tmp_path, "run")[-1]["nodes"]
        assert sum(node["rollouts"] for node in nodes) == 6
        assert sum(node["built"] for node in nodes) >= 2
        assert sum(node["late"] for node in nodes) == 0
        waiting.until(lambda: not live())
        asking = cluster.all[1].popen(
            sys.executable, "-m", "minisandbox", "cluster", "status", "--address", cluster.head, "--json",
            out=-1,
        )  # fmt: skip
        status = json.loads(asking.communicate(timeout=DEADLINE)[0])
        assert {one["node"] for one in status} == {host.address for host in cluster.all}
        assert {one["sandboxes"] for one in status} == {2}


@pytest.mark.slow
def test_a_token_in_the_home_directory_is_used_by_all_nodes(tmp_path: Path) -> None:
    homes = [tmp_path / name for name in ("home", "copy", "none", "other")]
    for home, token in zip(homes, ("1" * 32, "1" * 32, None, "2" * 32), strict=True):
        (home / ".ray").mkdir(parents=True)
        if token is not None:
            (home / ".ray" / "auth_token").write_text(token)
    variables = [{"HOME": str(home), "RAY_AUTH_MODE": ""} for home in homes]
    with clean_hosts(tmp_path, 2, 1, extra=dict(enumerate(variables[:2]))) as cluster:
        for home in homes[2:]:
            for words in (("worker", "--node-ip", cluster.all[1].address), ("status",)):
                joining = cluster.all[1].popen(
                    "env", f"HOME={home}", sys.executable, "-m", "minisandbox", "cluster", *words,
                    "--address", cluster.head, out=-1, err=-1,
                )  # fmt: skip
                errors = joining.communicate(timeout=DEADLINE)[1]
                assert joining.returncode == HostError.exit_code, errors
                assert f"cannot join a cluster at {cluster.head}" in errors
                assert "copy the head's ~/.ray/auth_token" in errors
                assert "Traceback" not in errors
