#!/usr/bin/env bash
# Moves the files of the hub into a folder a domain. After crates.sh, in a commit of its own.
set -e
printf '//! The chart of the fleet: which version, with which credentials and values.\n\n' > hub/src/chart.rs
printf '//! What the hub shows of itself: metrics, and the dump for debugging.\n\n' > hub/src/observe.rs
python3 hack/house/move.py hack/house/hub.moves
python3 hack/house/bare.py hack/house/hub.moves
python3 hack/house/imported.py hack/house/hub.moves
find hub -type d -empty -delete
cargo fmt --all
