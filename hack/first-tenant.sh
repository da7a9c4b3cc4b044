#!/usr/bin/env bash
# Runs the commands of the README on two new control planes, until the first Tenant is Ready. Prints the time of each
# command. Passes its arguments to cargo (--locked).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

test=docs_commands::documented_steps_work_from_install_to_uninstall
hack/tools/tools.sh >/dev/null
from=$SECONDS
cargo build "$@" --workspace --features simulation --bins --examples
echo "built in $((SECONDS - from)) s; from here on, seconds of each command, with those until its pods run:"
cargo test "$@" --workspace --features simulation --test e2e -- --exact "$test" --nocapture \
  | awk '/^ *[0-9.]+ s  / { if (!ready) { print; sum += $1 } }
         / kubectl wait .*Ready tenant/ && !ready { ready = 1; printf "%6.1f s  in all, until the first Tenant was Ready\n", sum }
         /^test result/ { print }'
