#!/usr/bin/env bash
# Fuzzes the reading of kubeconfigs and of packaged charts, or FUZZ_TARGET alone, for FUZZ_SECONDS (60) each with one
# process, from the seeds in fuzz/corpus; what it finds on the way is kept beside the build and used again. cargo-fuzz
# is installed once, into the cache of the tools.
#   fuzz.sh [LIBFUZZER_ARGS...]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

target=${CARGO_TARGET_DIR:-$PWD/target}/fuzz
cargo_fuzz=$(hack/tools/cargo-tool.sh cargo-fuzz 0.13.2)
command -v c++ >/dev/null || { echo "fuzz: no C++ compiler found (c++), which libFuzzer needs: install g++ or clang" >&2; exit 1; }

for name in ${FUZZ_TARGET:-kubeconfig chart}; do
  found=$target/corpus/$name
  mkdir -p "$found"
  dictionary=()
  [ -f "fuzz/$name.dict" ] && dictionary=(-dict="fuzz/$name.dict")
  # Without a sanitizer the stable compiler does: there is no unsafe code of ours to watch.
  "$cargo_fuzz" run --fuzz-dir fuzz --sanitizer none --target-dir "$target" "$name" \
    "$found" "fuzz/corpus/$name" -- \
    -max_total_time="${FUZZ_SECONDS:-60}" -max_len=8192 -timeout=10 -rss_limit_mb=2048 \
    "${dictionary[@]}" -print_final_stats=1 "$@"
done
