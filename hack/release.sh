#!/usr/bin/env bash
# Builds the files of a release. `make release-dry-run` runs all steps, and the release workflow the single ones.
#
#   release.sh                    check, programs, plugin $RELEASE_TARGETS, package; images if docker responds
#   release.sh check              compare the versions of Cargo.toml, the charts and RELEASE_TAG, and check REGISTRY
#   release.sh programs           build Krypton's programs and Helm for this machine, static; needs Linux
#   release.sh plugin TARGET...   build kubectl-krypton for other systems, named as Rust's targets
#   release.sh images             build the images for this machine's architecture with docker
#   release.sh package            create archives, charts, SBOM, krew manifest and checksums from the programs; needs Linux
#
#   RELEASE_DIR   folder for all results (default: release-dry-run in cargo's target folder)
#   RELEASE_TAG   the tag of the release. With it, REGISTRY and the plug-in for every system must be there
#   REGISTRY      host and path of the images, such as registry.example.org/krypton (default: none). The charts, also
#                 in the plug-in, get it as the default of image.registry
#   RELEASE_URL   address of the repository with the release (default: the home of the charts)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

systems=(linux_amd64 linux_arm64 darwin_amd64 darwin_arm64 windows_amd64)
version=$(sed -n '/^\[workspace.package\]/,/^\[/s/^version = "\(.*\)"/\1/p' Cargo.toml)
absolute() { case $1 in /*) echo "$1" ;; *) echo "$PWD/$1" ;; esac; }
built=$(absolute "${CARGO_TARGET_DIR:-target}")
dir=$(absolute "${RELEASE_DIR:-$built/release-dry-run}")
assets=$dir/assets work=$dir/work
registry=${REGISTRY:-}
registry=${registry%/}
# kubectl/build.rs reads it.
unset KRYPTON_REGISTRY
[ -z "$registry" ] || export KRYPTON_REGISTRY=$registry

fail() { echo "release: $*" >&2; exit 1; }
step() { echo "release: $* (after $SECONDS s)" >&2; }

# ---------------------------------------------------------------- versions and registry

# The programs and the images have the version of Cargo.toml. The charts of a release name their images.
check() {
  local chart field value
  [ -n "$version" ] || fail "Cargo.toml has no version"
  for chart in charts/*/Chart.yaml; do
    for field in version appVersion; do
      value=$(sed -n "s/^$field: //p" "$chart" | tr -d '"')
      [ "$value" = "$version" ] || fail "$field of $chart is $value, and the version of Cargo.toml is $version"
    done
  done
  if [ -n "${RELEASE_TAG:-}" ]; then
    [ "$RELEASE_TAG" = "v$version" ] || fail "the tag is $RELEASE_TAG, and the version of Cargo.toml is $version"
    [ -n "$registry" ] || fail "REGISTRY is empty; set it to the host and path of the images, such as registry.example.org/krypton"
  fi
  case $registry in
    *[!A-Za-z0-9.:/_-]*) fail "REGISTRY is '$registry'; set it to a host and a path, such as registry.example.org/krypton" ;;
  esac
  step "version $version${registry:+, images in $registry}"
}

# ---------------------------------------------------------------- programs

# system_of TARGET: the names of Go and krew, as linux_amd64.
system_of() {
  case $1 in
    x86_64-unknown-linux-gnu) echo linux_amd64 ;;
    aarch64-unknown-linux-gnu) echo linux_arm64 ;;
    x86_64-apple-darwin) echo darwin_amd64 ;;
    aarch64-apple-darwin) echo darwin_arm64 ;;
    x86_64-pc-windows-gnu) echo windows_amd64 ;;
    *) fail "there is no release for the target $1" ;;
  esac
}

this_system() { system_of "$(rustc -vV | sed -n 's/^host: //p')"; }

# compiler_of TARGET: the C compiler, which also links.
compiler_of() {
  case $1 in
    *-apple-darwin | "$(rustc -vV | sed -n 's/^host: //p')") echo cc ;;
    x86_64-pc-windows-gnu) echo x86_64-w64-mingw32-gcc ;;
    *) echo "${1%%-*}-linux-gnu-gcc" ;;
  esac
}

plugin_name() { case $1 in windows_*) echo kubectl-krypton.exe ;; *) echo kubectl-krypton ;; esac; }

# A missing target fails before the long builds.
check_target() {
  local target=$1 compiler library
  system_of "$target" >/dev/null
  case $target in
    *-apple-darwin) [ "$(uname)" = Darwin ] || fail "$target needs the libraries of macOS: build it on macOS" ;;
  esac
  library=$(rustc --print target-libdir --target "$target")
  [ -d "$library" ] || fail "Rust's standard library for $target is missing: run 'rustup target add $target'"
  compiler=$(compiler_of "$target")
  compiles "$compiler" ||
    fail "$compiler does not compile C programs for $target, which the TLS library needs: install it with the C library of that system"
}

# compiles COMPILER: checks that it has the C library of its target. The linker for Windows can not write to /dev/null.
compiles() {
  local folder status=0
  folder=$(mktemp -d) || return
  echo '#include <stdlib.h>
int main(void) { return 0; }' | "$1" -x c - -o "$folder/program" || status=$?
  rm -rf "${folder:?}"
  return $status
}

programs() {
  local out
  out=$dir/programs/$(this_system)
  step "building Krypton's programs with cargo"
  hack/deps-cache.sh in shipped hack/images/files.sh krypton "$out"
  step "building helm with go"
  hack/images/files.sh helm "$out"
}

# Uses the flags of files.sh that the system has.
plugin() {
  local target out flags cargo_home variable
  cargo_home=${CARGO_HOME:-$HOME/.cargo}
  for target in "$@"; do check_target "$target"; done
  for target in "$@"; do
    step "building kubectl-krypton for $target"
    out=$dir/programs/$(system_of "$target")
    flags=(--remap-path-prefix "$cargo_home=/cargo" --remap-path-prefix "$built=/target")
    case $target in
      *-apple-darwin) ;;
      # The time of the build would be in the program.
      *-windows-gnu) flags+=(-C target-feature=+crt-static -C link-arg=-Wl,--no-insert-timestamp) ;;
      *) flags+=(-C target-feature=+crt-static) ;;
    esac
    variable=$(tr a-z- A-Z_ <<<"$target")
    env -u SOURCE_DATE_EPOCH AWS_LC_SYS_NO_JITTER_ENTROPY=0 AWS_LC_SYS_USE_SYSTEM=0 AWS_LC_SYS_PREBUILT_NASM=1 \
      CARGO_ENCODED_RUSTFLAGS="$(IFS=$'\x1f'; echo "${flags[*]}")" \
      "CARGO_TARGET_${variable}_LINKER=$(compiler_of "$target")" \
      "CFLAGS_${target//-/_}=-ffile-prefix-map=$cargo_home=/cargo -ffile-prefix-map=$built=/target" \
      cargo build --locked --release --target "$target" --target-dir "$built" -p krypton-kubectl --bins
    mkdir -p "$out"
    cp "$built/$target/release/$(plugin_name "$(system_of "$target")")" "$out/"
  done
}

images() {
  local system tag prefix
  system=$(this_system)
  tag=$version-${system#linux_}
  prefix=${REGISTRY:+${REGISTRY%/}/}
  TAG=$tag hack/images/images.sh
  mkdir -p "$dir/images"
  docker save "$prefix"{krypton-hub,krypton-agent}":$tag" | gzip -n >"$dir/images/$system.tar.gz"
}

# ---------------------------------------------------------------- packages

archive_name() { echo "kubectl-krypton_${version}_$1.tar.gz"; }

# archive SYSTEM: an archive of regular files, because krew extracts no links.
archive() {
  local folder=$work/$1 plugin
  plugin=$(plugin_name "$1")
  mkdir -p "$folder/man/man1"
  install -m 0755 "$dir/programs/$1/$plugin" "$folder/$plugin"
  install -m 0644 LICENSE "$folder/LICENSE"
  # It is a script for bash.
  [ "$plugin" != kubectl-krypton ] || install -m 0755 hack/release/kubectl_complete-krypton "$folder/"
  install -m 0644 "$built"/man/kubectl-krypton*.1 "$folder/man/man1/"
  tar -C "$folder" --create --format=gnu --sort=name --mtime="@$epoch" --owner=0 --group=0 --numeric-owner \
    --mode=u+rwX,go+rX,go-w $(LC_ALL=C ls "$folder") | gzip -n -9 >"$assets/$(archive_name "$1")"
}

# set_registry FILE: sets image.registry in the values of a chart, as kubectl/build.rs does for the plug-in.
set_registry() {
  sed -i "/^image:\$/,/^[a-zA-Z]/s|^  registry: \"\"\$|  registry: \"$registry\"|" "$1"
  grep -qxF "  registry: \"$registry\"" "$1" || fail "${1#"$work"/} has no empty image.registry"
}

package_charts() {
  local chart
  mkdir -p "$work/charts"
  cp -R charts/*/ "$work/charts/"
  if [ -n "$registry" ]; then
    for chart in "$work"/charts/*/; do set_registry "${chart}values.yaml"; done
  fi
  # Helm puts these times into the package.
  find "$work/charts" -exec touch --no-dereference --date="@$epoch" {} +
  for chart in "$work"/charts/*/; do
    env -i HOME="$work" PATH="$PATH" "$work/helm" package "${chart%/}" --destination "$assets" >/dev/null
  done
}

# Prints a line for each component: type, name, version, license, SHA-256.
components() {
  cargo tree --locked --target all --edges normal,no-proc-macro --prefix none --format '{p}|{l}' \
    -p krypton-hub -p krypton-agent -p krypton-kubectl | sed 's/ (\*)$//' | sort -u | awk -F '|' '
      FILENAME == "Cargo.lock" {
        split($0, field, "\"")
        if (/^name = /) name = field[2]
        if (/^version = /) version = field[2]
        if (/^checksum = /) checksum[name " " version] = field[2]
        next
      }
      $0 != "" {
        split($1, crate, " ")
        version = substr(crate[2], 2)
        gsub(/ *\/ */, " OR ", $2)
        print "cargo\t" crate[1] "\t" version "\t" $2 "\t" checksum[crate[1] " " version]
      }' Cargo.lock -
  go version -m "$work/helm" | awk -F '\t' '
      NR == 1 { sub(/.*: go/, ""); print "golang\tstdlib\t" $0 "\t\t" }
      $2 == "mod" || $2 == "dep" { print "golang\t" $3 "\t" $4 "\t\t" }'
}

# The SBOM in the format of CycloneDX covers the programs, the images and Helm. Its number depends on its contents only.
sbom() {
  local hash
  LC_ALL=C components >"$work/components"
  hash=$(sha256sum <"$work/components")
  jq --null-input --raw-input --arg version "$version" \
    --arg serial "${hash:0:8}-${hash:8:4}-${hash:12:4}-${hash:16:4}-${hash:20:12}" '
      def component: split("\t") | "pkg:\(.[0])/\(.[1])@\(.[2] | @uri)" as $purl |
        {type: "library", "bom-ref": $purl, name: .[1], version: .[2], purl: $purl}
        + (if .[3] == "" then {} else {licenses: [{expression: .[3]}]} end)
        + (if .[4] == "" then {} else {hashes: [{alg: "SHA-256", content: .[4]}]} end);
      {
        bomFormat: "CycloneDX", specVersion: "1.6", serialNumber: "urn:uuid:\($serial)", version: 1,
        metadata: {component: {type: "application", "bom-ref": "krypton", name: "krypton", version: $version}},
        components: [inputs | component]
      }' <"$work/components" >"$assets/krypton_${version}_sbom.cdx.json"
}

# krew SYSTEM...: fills in the template, whose last entry stands for each system.
krew() {
  local template=hack/release/krew.yaml url entry system name sum
  url=${RELEASE_URL:-$(sed -n 's/^home: //p' charts/krypton-hub/Chart.yaml)}
  entry=$(sed '1,/^  platforms:$/d' "$template")
  {
    sed -n '/^#/d; p; /^  platforms:$/q' "$template"
    for system in "$@"; do
      name=$(archive_name "$system")
      sum=$(sha256sum "$assets/$name")
      sed -e "s|\${OS}|${system%_*}|" -e "s|\${ARCH}|${system#*_}|" -e "s|\${ARCHIVE}|$name|" \
        -e "s|\${SHA256}|${sum%% *}|" -e "s|\${PROGRAM}|$(plugin_name "$system")|" <<<"$entry"
    done
  } | sed -e "s|\${VERSION}|$version|g" -e "s|\${URL}|$url|g" >"$assets/krypton.yaml"
}

package() {
  local system helm found=() missing=()
  command -v jq >/dev/null || fail "no jq found, which writes the SBOM: install it"
  helm=$dir/programs/$(this_system)/helm
  [ -f "$helm" ] || fail "there is no $helm: run 'hack/release.sh programs' first"
  for system in "${systems[@]}"; do
    if [ -f "$dir/programs/$system/$(plugin_name "$system")" ]; then found+=("$system"); else missing+=("$system"); fi
  done
  if [ -n "${RELEASE_TAG:-}" ] && ((${#missing[@]} > 0)); then
    fail "the release $RELEASE_TAG lacks kubectl-krypton for ${missing[*]}"
  fi
  ((${#found[@]} > 0)) || fail "there is no kubectl-krypton in $dir/programs"
  epoch=${SOURCE_DATE_EPOCH:-$(git log -1 --format=%ct)}
  rm -rf "${assets:?}" "${work:?}"
  mkdir -p "$assets" "$work"
  install -m 0755 "$helm" "$work/helm"

  step "writing the man pages"
  rm -rf "${built:?}/man"
  make man CARGO_FLAGS=--locked >&2
  step "packaging kubectl-krypton for ${found[*]}"
  for system in "${found[@]}"; do archive "$system"; done
  step "packaging the charts"
  package_charts
  step "writing the SBOM"
  sbom
  krew "${found[@]}"
  (cd "$assets" && LC_ALL=C && sha256sum -- * >"$work/sums" && mv "$work/sums" SHA256SUMS)
  rm -rf "${work:?}"
  step "$assets is complete"
  cat "$assets/SHA256SUMS"
  ((${#missing[@]} == 0)) || echo "release: without kubectl-krypton for ${missing[*]}; RELEASE_TARGETS adds Rust's targets" >&2
}

case "${1:-} $#" in
  " 0")
    check
    # RELEASE_TARGETS is a list of words.
    for target in ${RELEASE_TARGETS:-}; do check_target "$target"; done
    rm -rf "${dir:?}/programs" "${dir:?}/images"
    programs
    plugin ${RELEASE_TARGETS:-}
    package
    if docker version >/dev/null 2>&1; then
      images
    else
      step "the images are missing: they need docker, which does not respond"
    fi ;;
  "check 1") check ;;
  "programs 1") programs ;;
  "plugin "[2-9]) plugin "${@:2}" ;;
  "images 1") images ;;
  "package 1") package ;;
  *) echo "usage: $0 [check | programs | plugin TARGET... | images | package]" >&2; exit 2 ;;
esac
