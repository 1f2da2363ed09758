#!/usr/bin/env bash
# swebench 5.0.2: tests of Rust projects that expect a panic, and documentation tests, have no result.
#
# Expected: each line "test NAME ... OUTCOME" that cargo test prints is a test.
# Observed: the parser takes names without spaces. cargo writes "test tests::overflow - should panic ... ok" for
#           #[should_panic], "test src/lib.rs - add (line 3) ... ok" for documentation tests and ", reason" after "ignored";
#           none of them is found, whatever the outcome.
# Why it matters: they cannot be in FAIL_TO_PASS or PASS_TO_PASS, and a patch that breaks all of them is resolved.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
"${PYTHON:-python3}" -m venv venv
venv/bin/pip install -q 'swebench==5.0.2'

# What cargo test prints for these four functions and one documentation test.
cat >log <<'END'
running 4 tests
test tests::adds ... ok
test tests::overflow - should panic ... FAILED
test tests::slow ... ignored, needs a network
test tests::subtracts ... FAILED

   Doc-tests calc

running 1 test
test src/lib.rs - add (line 3) ... FAILED
END
cat >observe.py <<'END'
from pathlib import Path
from types import SimpleNamespace

from swebench.harness.log_parsers import PARSER_REGISTRY

outcomes = PARSER_REGISTRY["parse_log_cargo"](Path("log").read_text(), SimpleNamespace(instance_id="calc-1", version="1"))
print("\n".join(f"{name}: {outcome}" for name, outcome in outcomes.items()))
print(f"{len(outcomes)} of 5 tests")
END
venv/bin/python observe.py >observed
cat observed
diff - observed <<'END' || { echo "what the parser finds has changed" >&2; exit 1; }
tests::adds: PASSED
tests::subtracts: FAILED
2 of 5 tests
END
