#!/usr/bin/env bash
# Keeps compiled dependencies outside the checkout. A fresh clone then compiles only our crates.
#
#   deps-cache.sh restore              copy them into target/debug if it does not exist
#   deps-cache.sh save                 copy them from target/debug if they are not cached yet
#   deps-cache.sh in NAME COMMAND...   run a command with the target folder NAME, one checkout at a time; it starts
#                                      with the saved dependencies
#
# Each cache belongs to one compiler and one set of dependencies. The three most recent ones are kept.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

# The compiler, and all that decides how it compiles a dependency.
dependencies() {
  cargo tree --locked "$@" --edges normal,build,dev --prefix none --format '{p} {f}' | sed 's/ (\*)$//' | grep -v " ($PWD" | sort -u
}
key=$({ rustc -Vv && cat .cargo/config.toml && sed -n '/^\[profile/,$p' Cargo.toml | grep -v '^krypton-' &&
  dependencies --workspace --features simulation,krypton-fuzz/libfuzzer; } | sha256sum | cut -c1-12)
caches=${XDG_CACHE_HOME:-$HOME/.cache}/krypton/dependencies
cache=$caches/$key
target=${CARGO_TARGET_DIR:-target}/debug

make_cache() {
  mkdir -p "$cache"
  touch "$cache"
  (cd "$caches" && find . -mindepth 2 -maxdepth 2 -name 'new.*' -mmin +60 -exec rm -rf {} + && ls -t | tail -n +4 | xargs -r rm -rf)
}

case "${1-} $#" in
  "restore 1")
    mkdir -p "$(dirname "$target")"
    exec 9>"$target.lock"
    flock 9
    if [ -d "$target" ] || ! [ -d "$cache/debug" ]; then exit 0; fi
    echo "dependencies: using $cache" >&2
    touch "$cache"
    rm -rf "$target.new"
    cp -a "$cache/debug" "$target.new"
    mv "$target.new" "$target"
    ;;
  "save 1")
    [ -d "$cache/debug" ] && exit 0
    make_cache
    new=$(mktemp -d "$cache/new.XXXXXX")
    trap 'rm -rf "$new"' EXIT
    cp -a "$target"/{.fingerprint,build,deps} "$new"
    # Each checkout compiles the crates of this workspace.
    ours=$(cargo metadata --locked --no-deps --format-version 1 | grep -o '"name":"[^"]*","src_path"\|"name":"krypton-[^"]*"' | cut -d'"' -f4 | sort -u)
    for name in $ours; do
      rm -rf "$new"/{.fingerprint,build,deps}/{,lib}{"$name","${name//-/_}"}-[0-9a-f][0-9a-f]*
    done
    mv -T "$new" "$cache/debug"
    ;;
  "in "*)
    folder=$cache/$2
    make_cache
    mkdir -p "$folder"
    exec 9>"$folder/lock"
    flock 9
    # Cargo compares only times. It would take older files for compiled, and compile a fresh clone of the same files again.
    # So all of ours in the folder belongs to one set of files: the sources of the programs and of the fuzz targets.
    touch "$folder/lock"
    # Release programs need other builds of their dependencies.
    if [ "$2" != shipped ] && [ -d "$cache/debug" ] && ! [ -d "$folder/debug" ]; then
      cp -a "$cache/debug" "$folder/debug"
    fi
    files=$({ git ls-files -z --cached --others --exclude-standard . ':!:tests' ':!:simulation' ':!:docs' ':!:*.md' ':!:hack' ':!:.ci' ':!:Makefile' &&
      git ls-files -z --cached hack/fuzz-rustc.sh; } |
      xargs -0 sha256sum | sha256sum) || files=
    if [ -n "$files" ] && [ "$(cat "$folder/files" 2>/dev/null)" = "$files" ]; then
      find "$folder" -type f -exec touch -r "$folder/lock" {} +
    else
      find "$folder" -path '*/.fingerprint/krypton-*' -prune -exec rm -rf {} +
      echo "$files" >"$folder/files"
    fi
    CARGO_TARGET_DIR=$folder "${@:3}"
    ;;
  *) echo "usage: $0 restore | save | in NAME COMMAND..." >&2; exit 2 ;;
esac
