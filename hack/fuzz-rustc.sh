#!/bin/sh
# Cargo compiles our crates with this instead of rustc. libFuzzer then sees which of our code an input reaches.
#   fuzz-rustc.sh RUSTC ARGS...
case " $* " in
  *" --crate-name build_script_build "*) exec "$@" ;;
esac
exec "$@" -Cpasses=sancov-module -Cllvm-args=-sanitizer-coverage-level=4 \
  -Cllvm-args=-sanitizer-coverage-inline-8bit-counters -Cllvm-args=-sanitizer-coverage-pc-table \
  -Cllvm-args=-sanitizer-coverage-trace-compares
