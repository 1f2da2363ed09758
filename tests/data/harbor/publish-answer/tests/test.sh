#!/bin/bash
# Only the published file arrives: what else the solution changed is as the image has it.
right=0
[ "$(cat /app/report.txt)" = "$EXPECTED" ] && [ "$(cat /app/kept.txt)" = kept ] && right=1
echo "{\"reward\": $right}" > /logs/verifier/reward.json
