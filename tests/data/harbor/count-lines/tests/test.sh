#!/bin/bash
# Half of the reward for an answer, all of it for the right one.
answer=$(cat /app/answer.txt 2>/dev/null)
case "$answer" in
    3) echo 1 ;;
    '') echo 0 ;;
    *) echo 0.5 ;;
esac > /logs/verifier/reward.txt
