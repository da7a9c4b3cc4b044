#!/usr/bin/env bash
# Fuzzes each target, or FUZZ_TARGET alone, from the seeds in fuzz/corpus. FUZZ_SECONDS is the time for each (60; 0: only
# compile), and FUZZ_JOBS the number of targets at a time (one on each core).
# The build folder keeps the inputs that reach new code, for the next run. If an input breaks a promise, the script names
# the file with the input, and the other targets still run.
#   fuzz.sh [LIBFUZZER_ARGS...]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

target=${CARGO_TARGET_DIR:-$PWD/target}
command -v c++ >/dev/null || { echo "fuzz: no C++ compiler found (c++), which libFuzzer needs: install g++ or clang" >&2; exit 1; }

# The dependencies have the same settings as in other debug programs. Optimization of our crates pays off only in runs of
# minutes.
optimized=()
if [ "${FUZZ_SECONDS:-60}" -gt 10 ]; then
  for crate in helm proto reconciler types; do optimized+=(--config "profile.dev.package.krypton-$crate.opt-level=1"); done
fi
RUSTC_WORKSPACE_WRAPPER=$PWD/hack/fuzz-rustc.sh cargo build --locked --workspace --bin fuzz --features simulation,krypton-fuzz/libfuzzer "${optimized[@]}"
if [ "${FUZZ_SECONDS:-60}" = 0 ]; then exit 0; fi

# Prints a figure of libFuzzer's statistics.
of() { sed -n "s/^stat::$1: *//p" "$log" | sed ':a;s/\B[0-9]\{3\}\>/,&/;ta'; }

run() {
  local name=$1 begin=$SECONDS dictionary=() found=$target/corpus/$1 log=$target/logs/$1
  mkdir -p "$found" "$target/logs" "$target/broken"
  [ -f "fuzz/$name.dict" ] && dictionary=(-dict="fuzz/$name.dict")
  if ! FUZZ_TARGET=$name "$target/debug/fuzz" "$found" "fuzz/corpus/$name" \
    -max_total_time="${FUZZ_SECONDS:-60}" -max_len=8192 -timeout=10 -rss_limit_mb=2048 \
    -artifact_prefix="$target/broken/$name-" -print_final_stats=1 "${dictionary[@]}" "${@:2}" >"$log" 2>&1; then
    grep -E '^thread|panicked|^SUMMARY|^ERROR|Test unit written|^[^#].*is ' "$log" | tail -n 20 >&2 || true
    echo "$name: failed; the whole output is in $log" >&2
    return 1
  fi
  echo "$name: $(of number_of_executed_units) runs in $((SECONDS - begin)) s, $(of average_exec_per_sec) a second, $(of new_units_added) new inputs"
}

export target
export -f run of
ls -d fuzz/corpus/${FUZZ_TARGET:-*} | xargs -n 1 basename \
  | xargs -P "${FUZZ_JOBS:-$(nproc)}" -I{} bash -c 'set -euo pipefail; run "$@"' fuzz {} "$@" \
  || { echo "fuzz: at least one target has failed" >&2; exit 1; }
