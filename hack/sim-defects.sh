#!/bin/sh
# Plants the defects in simulation/fleet/defects one after the other, and prints the first seed that finds each and the
# guarantee that it violates. Usage: hack/sim-defects.sh [PATCH...]; tries the scenarios, then SHORT short plans (120), then
# LONG long ones (60), then the walks.
set -eu
cd "$(dirname "$0")/.."
[ -n "$(git status --porcelain -uno)" ] && { echo "commit or discard your changes first" >&2; exit 1; }
[ $# -gt 0 ] || set -- simulation/fleet/defects/*.patch
planted=
trap 'test -z "$planted" || git apply -R "$planted"' EXIT

# Prints the first scenario that fails.
scenario() {
  "${CARGO_TARGET_DIR:-target}"/debug/sim --plan simulation/fleet/scenarios |
    sed -n 's/^.*scenarios.\([^:]*\).plan: [0-9.]* \([a-z-]*\):.*/\1 \2/p' | sort | head -1
}

# Prints the first of the seeds 1 to $1 that fails. Further arguments are arguments of the simulation.
first_failure() {
  most=$1
  shift
  seed=1
  while [ "$seed" -le "$most" ]; do
    found=$("${CARGO_TARGET_DIR:-target}"/debug/sim "$@" --seed "$seed" --seeds 20 --no-shrink |
      sed -n 's/^seed \([0-9]*\): [0-9.]* \([a-z-]*\):.*/\1 \2/p' | sort -n | head -1)
    [ -n "$found" ] && { echo "$found"; return; }
    seed=$((seed + 20))
  done
}

# Prints the first walk in which a fault of one request fails.
walk() {
  for plan in simulation/fleet/walks/*; do
    found=$("${CARGO_TARGET_DIR:-target}"/debug/sim --walk --plan "$plan" --no-shrink |
      sed -n 's/^seed [0-9]*: [0-9.]* \([a-z-]*\):.*/\1/p' | head -1)
    [ -n "$found" ] && { echo "$(basename "$plan" .plan) $found"; return; }
  done
}

for patch in "$@"; do
  name=$(basename "$patch" .patch)
  git apply "$patch" || { echo "$name: the patch does not apply"; continue; }
  planted=$patch
  if cargo build -q --workspace --bin sim --features simulation; then
    found=$(scenario)
    [ -n "$found" ] || { found=$(first_failure "${SHORT:-120}" --short) && found=${found:+short $found}; }
    [ -n "$found" ] || found=$(first_failure "${LONG:-60}")
    [ -n "$found" ] || { found=$(walk) && found=${found:+walk $found}; }
    echo "$name: ${found:-not found}"
  else
    echo "$name: does not compile"
  fi
  git apply -R "$planted"
  planted=
done
