"""Two nodes, a few rollouts: the part of these tests that `make test` has."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from tests import waiting
from tests.cluster.cluster_tools import clean_hosts, command, live, make_tasks, results, said

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
        assert sum(node["built"] for node in nodes) == 2
        assert all(count == 1 for node in nodes for count in node["layers"].values())
        waiting.until(lambda: not live())
        asking = cluster.all[1].popen(
            sys.executable, "-m", "minisandbox", "cluster", "status", "--address", cluster.head, "--json",
            out=-1,
        )  # fmt: skip
        status = json.loads(asking.communicate(timeout=DEADLINE)[0])
        assert {one["node"] for one in status} == {host.address for host in cluster.all}
        assert {one["sandboxes"] for one in status} == {2}
