#!/usr/bin/env bash
# Installs a program of crates.io once, into the cache of the tools, and prints its path.
#   cargo-tool.sh NAME VERSION [ARGUMENTS OF cargo install...]
set -euo pipefail

name=$1 version=$2
root=${XDG_CACHE_HOME:-$HOME/.cache}/krypton/tools/$name-$version
build=$root.build

if ! [ -x "$root/bin/$name" ]; then
  echo "tools: installing $name $version into $root (once, some minutes)" >&2
  # Programs that start others need no optimizations.
  CARGO_PROFILE_DEV_DEBUG=false cargo install --debug "$name" --version "$version" --locked --quiet "${@:3}" --root "$root" --target-dir "$build" || {
    echo "tools: $name could not be installed; with a network, run 'cargo install $name --version $version --locked --root $root'" >&2
    exit 1
  }
  rm -rf "$build"
fi
echo "$root/bin/$name"
