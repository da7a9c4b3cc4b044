#!/usr/bin/env bash
# Builds the images krypton-hub and krypton-agent, and prints their files.
#
#   IMAGES_FROM=here         build on this machine, without a registry (default)
#   IMAGES_FROM=containers   build in containers of the images rust and golang
#   REGISTRY=example.org/krypton TAG=…   names of the images; VERSION is that of Cargo.toml
#   IMAGES_DIR=dir           folder for builds on this machine (default: images in cargo's target folder)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

limit=$((120 * 1000 * 1000))
from=${IMAGES_FROM:-here}
version=$(sed -n '/^\[workspace.package\]/,/^\[/s/^version = "\(.*\)"/\1/p' Cargo.toml)
tag=${TAG:-$version}
prefix=${REGISTRY:+${REGISTRY%/}/}
work=${IMAGES_DIR:-${CARGO_TARGET_DIR:-$PWD/target}/images}
# BuildKit 0.11 of docker 24 and newer dates the image with it; files are dated 0.
epoch=${SOURCE_DATE_EPOCH:-$(git log -1 --format=%ct 2>/dev/null || echo 0)}
export DOCKER_BUILDKIT=1

fail() { echo "images: $*" >&2; exit 1; }
step() { echo "images: $* (after $SECONDS s)" >&2; }

command -v docker >/dev/null || fail "no docker found: install it (https://docs.docker.com/engine/install)"
docker version >/dev/null 2>&1 || fail "the docker daemon does not answer: $(docker version 2>&1 >/dev/null | tail -n 1)"
case $from in
  here)
    step "building Krypton's programs with cargo"
    hack/deps-cache.sh in shipped hack/images/files.sh krypton "$work/bin"
    step "building helm with go"
    hack/images/files.sh helm "$work/bin"
    hack/images/files.sh roots "$work/bin" "$work/roots"
    mkdir -p "$work/context"
    # An archive, as docker gives folders that it copies the time of copying.
    tar -C "$work/roots" --create --file "$work/context/roots.tar" --format=gnu --sort=name --owner=0 --group=0 --numeric-owner \
      base krypton-hub krypton-agent
    arguments=(--build-arg FILES=here --file Dockerfile)
    context=$work/context ;;
  containers)
    arguments=(--build-arg FILES=built)
    context=. ;;
  *) fail "IMAGES_FROM is 'here' or 'containers', not '$from'" ;;
esac

archive=$(mktemp -d)
trap 'rm -rf "$archive"' EXIT

# files IMAGE: size and name of each file, out of the layers as they are shipped, old archive format or new.
files() {
  rm -rf "${archive:?}"/*
  docker save "$1" | tar -x -C "$archive"
  grep -o '"Layers":\[[^]]*\]' "$archive/manifest.json" | grep -o '[^"]*/[^"]*' | while read -r layer; do
    tar -tvf "$archive/$layer" --numeric-owner
  done | awk '/^-/ { print $3, $NF }' | sort -rn
}

for name in krypton-hub krypton-agent; do
  image=$prefix$name:$tag
  step "building image $image"
  docker build --quiet "${arguments[@]}" --target "$name" --tag "$image" \
    --build-arg VERSION="$version" --build-arg SOURCE_DATE_EPOCH="$epoch" "$context" >/dev/null
  listing=$(files "$image")
  size=$(awk '{ sum += $1 } END { print sum }' <<<"$listing")
  echo "$image: $(awk -v b="$size" 'BEGIN { printf "%.1f MB", b / 1e6 }')"
  awk '{ printf "  %12d  /%s\n", $1, $2 }' <<<"$listing"
  docker image inspect --format '{{range .RootFS.Layers}}{{printf "  layer %s\n" .}}{{end}}' "$image" | sed '/^$/d'
  ((size <= limit)) || fail "$image holds $size bytes of files; the limit is $limit"
done
step "done"
