#!/usr/bin/env bash
# Keeps compiled dependencies outside the checkout. A fresh clone then compiles only our crates.
#   deps-cache.sh restore    copies them into target/debug, if that is not there
#   deps-cache.sh save       copies them from target/debug, unless that was done before
# Each cache belongs to one compiler and one Cargo.lock. The three most recent ones are kept.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

key=$({ rustc -Vv; cat Cargo.lock Cargo.toml */Cargo.toml; } | sha256sum | cut -c1-12)
caches=${XDG_CACHE_HOME:-$HOME/.cache}/krypton/dependencies
cache=$caches/$key
target=${CARGO_TARGET_DIR:-target}/debug

case "${1-}" in
  restore)
    if [ -d "$target" ] || ! [ -d "$cache" ]; then exit 0; fi
    echo "dependencies: using $cache" >&2
    touch "$cache"
    rm -rf "$target.new"
    mkdir -p "$(dirname "$target")"
    cp -a "$cache" "$target.new"
    mv "$target.new" "$target"
    ;;
  save)
    [ -d "$cache" ] && exit 0
    mkdir -p "$caches"
    new=$(mktemp -d "$caches/new.XXXXXX")
    trap 'rm -rf "$new"' EXIT
    cp -a "$target"/{.fingerprint,build,deps} "$new"
    # Our own crates are compiled in each checkout.
    ours=$(cargo metadata --locked --no-deps --format-version 1 | grep -o '"name":"[^"]*","src_path"\|"name":"krypton-[^"]*"' | cut -d'"' -f4 | sort -u)
    for name in $ours; do
      rm -rf "$new"/{.fingerprint,build,deps}/{,lib}{"$name","${name//-/_}"}-[0-9a-f][0-9a-f]*
    done
    mv -T "$new" "$cache"
    (cd "$caches" && find . -maxdepth 1 -name 'new.*' -mmin +60 -exec rm -rf {} + && ls -t | tail -n +4 | xargs -r rm -rf)
    ;;
  *) echo "usage: $0 restore|save" >&2; exit 2 ;;
esac
