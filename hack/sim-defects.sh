#!/bin/sh
# Plants the defects in simulation/fleet/defects one after the other, and prints the number of seeds that the simulation
# needs to find each. Usage: hack/sim-defects.sh [PATCH...]; SEEDS is the most to try (100).
set -eu
cd "$(dirname "$0")/.."
most=${SEEDS:-100}
[ -n "$(git status --porcelain -uno)" ] && { echo "commit or discard your changes first" >&2; exit 1; }
[ $# -gt 0 ] || set -- simulation/fleet/defects/*.patch
planted=
trap 'test -z "$planted" || git apply -R "$planted"' EXIT

for patch in "$@"; do
  name=$(basename "$patch" .patch)
  git apply "$patch" || { echo "$name: the patch does not apply"; continue; }
  planted=$patch
  if cargo build -q --workspace --bin sim --features failpoints,simulation; then
    seed=1
    found=
    while [ -z "$found" ] && [ "$seed" -le "$most" ]; do
      found=$("${CARGO_TARGET_DIR:-target}"/debug/sim --seed "$seed" --seeds 10 --no-shrink |
        sed -n 's/^seed \([0-9]*\): [0-9.]* \([a-z-]*\):.*/\1 \2/p' | sort -n | head -1)
      seed=$((seed + 10))
    done
    echo "$name: ${found:-not within $most}"
  else
    echo "$name: does not compile"
  fi
  git apply -R "$planted"
  planted=
done
