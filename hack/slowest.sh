#!/usr/bin/env bash
# Prints the ten slowest tests of a JUnit report, in seconds.
#   slowest.sh REPORT
set -euo pipefail

echo "the slowest tests, in seconds:"
sed -n 's/.*<testcase name="\([^"]*\)".* time="\([0-9.]*\)".*/\2 \1/p' "$1" | sort -rn | sed -n '1,10s/^/  /p'
