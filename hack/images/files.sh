#!/usr/bin/env bash
# Builds the contents of the images. images.sh runs it on this machine, the Dockerfile in containers.
#
#   files.sh krypton DIR     build Krypton's programs, static, into DIR
#   files.sh helm DIR        build the Helm version that hack/tools/go.mod pins, static, into DIR
#   files.sh roots BIN DIR   create the root file systems DIR/{base,krypton-hub,krypton-agent} from the programs in BIN
#
# The result does not depend on the folder of the checkout.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

fail() { echo "images: $*" >&2; exit 1; }

krypton() {
  local out=$1 host built flags
  command -v cargo >/dev/null || fail "no cargo found: install Rust with rustup (https://rustup.rs)"
  host=$(rustc -vV | sed -n 's/^host: //p')
  case $host in *-linux-*) ;; *) fail "these images are for Linux, and this machine is $host: use IMAGES_FROM=containers" ;; esac
  built=${CARGO_TARGET_DIR:-$PWD/target}
  # Panics and asserts name their source file, without the folder of this machine. Cargo names our files relative to
  # the checkout. With the checkout in these flags, each one would compile all dependencies again.
  flags=(
    -C target-feature=+crt-static
    # Saves 0.5 MB of relocations in each process. Those for arm64 have none: Rust gives static ones a fixed address.
    -C link-arg=-Wl,-z,pack-relative-relocs
    --remap-path-prefix "${CARGO_HOME:-$HOME/.cargo}=/cargo"
    --remap-path-prefix "$built=/target"
  )
  # With --target these are for the programs only, not for build scripts and procedural macros, which
  # cannot be static. The TLS library is that of the crate, even if the machine has one. Without the epoch, as build scripts
  # of C libraries would run again for every commit. With the jitter of the CPU as a source of randomness, which
  # .cargo/config.toml leaves out of debug builds.
  env --unset=SOURCE_DATE_EPOCH AWS_LC_SYS_NO_JITTER_ENTROPY=0 AWS_LC_SYS_USE_SYSTEM=0 \
    CARGO_ENCODED_RUSTFLAGS="$(IFS=$'\x1f'; echo "${flags[*]}")" \
    "CFLAGS_${host//-/_}=-ffile-prefix-map=${CARGO_HOME:-$HOME/.cargo}=/cargo -ffile-prefix-map=$built=/target" \
    cargo build --locked --release --target "$host" --target-dir "$built" \
      -p krypton-hub -p krypton-agent -p krypton-kubectl --bins
  mkdir -p "$out"
  cp "$built/$host/release"/{krypton-hub,krypton-agent,kubectl-krypton} "$out/"
  for program in krypton-hub krypton-agent kubectl-krypton; do
    static "$out/$program"
  done
}

helm() {
  local out=$1 pinned said
  command -v go >/dev/null || fail "no Go compiler found: install Go 1.26 or newer (https://go.dev/doc/install)"
  pinned=$(sed -En 's#^[[:space:]]*helm.sh/helm/v4 (v[^ ]+).*#\1#p' hack/tools/go.mod | head -n 1)
  mkdir -p "$out"
  out=$(cd "$out" && pwd)
  # -mod=readonly: every module must be the one of go.sum, or go refuses. The caller's own GOFLAGS are not wanted.
  (cd hack/tools && CGO_ENABLED=0 GOFLAGS='' GOWORK=off go build -mod=readonly -trimpath -buildvcs=false \
    -ldflags "-s -w -buildid= -X helm.sh/helm/v4/internal/version.version=$pinned" -o "$out/helm" helm.sh/helm/v4/cmd/helm)
  said=$("$out/helm" version --template '{{.Version}}')
  [ "$said" = "$pinned" ] || fail "helm was built as $said, and hack/tools/go.mod pins $pinned"
  static "$out/helm"
}

# The images contain no loader and no libraries.
static() {
  local headers
  headers=$(LC_ALL=C readelf --program-headers --wide "$1") || fail "readelf, of binutils, can not read $1"
  ! grep -qw INTERP <<<"$headers" || fail "$1 is not static: it needs a loader"
}

# CA certificates of the distribution's package. Private CAs belong into a mount (SSL_CERT_FILE).
certificates() {
  local mozilla=/usr/share/ca-certificates/mozilla
  if [ -n "${CA_CERTIFICATES:-}" ]; then
    cat "$CA_CERTIFICATES"
  elif [ -d "$mozilla" ]; then
    (LC_ALL=C; for file in "$mozilla"/*.crt; do cat "$file"; echo; done) | sed '/^$/d'
  else
    fail "no certificate authorities in $mozilla: install the package ca-certificates (Debian, Ubuntu, Alpine), or name a file of them by CA_CERTIFICATES=file.pem"
  fi
}

roots() {
  local bin=$1 out=$2
  rm -rf "${out:?}"/{base,krypton-hub,krypton-agent}
  mkdir -p "$out"/base/etc/ssl/certs "$out"/{base,krypton-hub,krypton-agent}/usr/local/bin "$out/base/usr/share/doc/krypton"
  # Both images share this layer, so a node stores it once.
  cp "$bin/helm" "$out/base/usr/local/bin/"
  cp LICENSE "$out/base/usr/share/doc/krypton/"
  certificates >"$out/base/etc/ssl/certs/ca-certificates.crt"
  [ "$(grep -c 'BEGIN CERTIFICATE' "$out/base/etc/ssl/certs/ca-certificates.crt")" -ge 50 ] \
    || fail "fewer than 50 certificate authorities were found: is the package ca-certificates whole?"
  printf '%s\n' 'root:x:0:0:root:/nonexistent:/nonexistent' 'krypton:x:65532:65532:krypton:/nonexistent:/nonexistent' >"$out/base/etc/passwd"
  printf '%s\n' 'root:x:0:' 'krypton:x:65532:' >"$out/base/etc/group"
  echo 'hosts: files dns' >"$out/base/etc/nsswitch.conf"
  cp "$bin"/{krypton-hub,kubectl-krypton} "$out/krypton-hub/usr/local/bin/"
  cp "$bin/krypton-agent" "$out/krypton-agent/usr/local/bin/"
  find "$out"/{base,krypton-hub,krypton-agent} -type f -path '*/bin/*' -exec chmod 0755 {} + \
    -o -type f -exec chmod 0644 {} + -o -type d -exec chmod 0755 {} +
  # With the time of the last commit, an unchanged Helm would get a new layer.
  find "$out"/{base,krypton-hub,krypton-agent} -depth -exec touch --no-dereference --date=@0 {} +
}

case "${1:-} $#" in
  "krypton 2") krypton "$2" ;;
  "helm 2") helm "$2" ;;
  "roots 3") roots "$2" "$3" ;;
  *) echo "usage: $0 krypton DIR | helm DIR | roots BIN DIR" >&2; exit 2 ;;
esac
