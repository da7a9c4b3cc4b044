#!/usr/bin/env bash
# Builds the local Kubernetes for tests and the demo, once, into a cache outside the checkout.
#
#   tools.sh [build [TOOL...]]  build the missing tools, and print their folder (which contains bin/) last
#   tools.sh dir                print the folder
#   tools.sh check              fail if a tool is missing, and name it
#
# Suitable binaries in $KUBEBUILDER_ASSETS or on PATH are linked instead of built.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"

declare -A packages=(
  [etcd]=go.etcd.io/etcd/server/v3
  [kube-apiserver]=k8s.io/kubernetes/cmd/kube-apiserver
  [kube-controller-manager]=k8s.io/kubernetes/cmd/kube-controller-manager
  [kube-scheduler]=k8s.io/kubernetes/cmd/kube-scheduler
  [kubectl]=k8s.io/kubernetes/cmd/kubectl
  [helm]=helm.sh/helm/v4/cmd/helm
  [kwok]=sigs.k8s.io/kwok/cmd/kwok
  [kubeconfig-secretreader]=sigs.k8s.io/cluster-inventory-api/plugins/kubeconfig-secretreader/cmd/plugin
  [promtool]=github.com/prometheus/prometheus/cmd/promtool
  [registry]=./registry
  [kstatus]=./kstatus
  [lua]=./lua
)
tools=($(printf "%s\n" "${!packages[@]}" | sort))
# Without crds/: the names of its folders contain the versions, and nothing depends on it.
pins=$(cat go.mod go.sum {registry,kstatus,lua}/*.go charts/*/go.mod charts/*/go.sum tools.sh | sha256sum | cut -c1-12)
cache=${XDG_CACHE_HOME:-$HOME/.cache}/krypton/tools
root=$cache/$pins
bin=$root/bin

version_of() { sed -En "s#^[[:space:]]*$1 v([^ ]+).*#\1#p" go.mod | head -n 1; }
kubernetes=$(version_of k8s.io/kubernetes)
helm=$(version_of helm.sh/helm/v4)
etcd=$(version_of go.etcd.io/etcd/server/v3)

missing() {
  local tool pin
  for tool in "${tools[@]}"; do [ -x "$bin/$tool" ] || echo "$tool"; done
  for pin in charts/*/ crds/*/; do [ -d "$root/$pin" ] || echo "${pin%/}"; done
}

case "${1:-build}" in
  dir) echo "$root"; exit 0 ;;
  check)
    lacking=$(missing | paste -sd, -)
    [ -z "$lacking" ] && exit 0
    echo "missing in $root: $lacking; run 'make tools'" >&2
    exit 1 ;;
  build)
    if [ $# -gt 1 ]; then tools=("${@:2}"); fi ;;
  *) echo "usage: $0 [build [TOOL...]|dir|check]" >&2; exit 2 ;;
esac

# A binary is suitable if it has the pinned minor version (helm: 4.2.4 or a later 4.x, as the hub requires).
fits() {
  local said
  case "$1" in
    etcd) said=$("$2" --version 2>/dev/null) && grep -q "^etcd Version: ${etcd%.*}\." <<<"$said" ;;
    kube-*) said=$("$2" --version 2>/dev/null) && grep -q "^Kubernetes v${kubernetes%.*}\." <<<"$said" ;;
    kubectl) said=$("$2" version --client 2>/dev/null) && grep -q "^Client Version: v${kubernetes%.*}\.[0-9]*$" <<<"$said" ;;
    helm) said=$("$2" version --template '{{.Version}}' 2>/dev/null) && grep -q "^v${helm%.*}\." <<<"$said" ;;
    kwok) said=$("$2" --version 2>/dev/null) && grep -q 'v0\.8\.' <<<"$said" ;;
    *) false ;; # has no version command
  esac
}

mkdir -p "$bin" "$root/charts" "$root/crds"
exec 9>"$root/lock"
flock 9 # concurrent runs build once

for tool in "${tools[@]}"; do
  [ -x "$bin/$tool" ] && continue
  for found in "${KUBEBUILDER_ASSETS:+$KUBEBUILDER_ASSETS/$tool}" "$(command -v "$tool" || true)"; do
    if [ -n "$found" ] && [ -x "$found" ] && fits "$tool" "$found"; then
      echo "tools: using $found" >&2
      ln -sf "$found" "$bin/$tool"
      break
    fi
  done
done

if [ -n "$(missing)" ] && ! command -v go >/dev/null; then
  echo "tools: no Go compiler found, and these are missing: $(missing | paste -sd, -)." >&2
  echo "tools: install Go 1.26 or newer (https://go.dev/doc/install) and run 'make tools' again," >&2
  echo "tools: or put binaries of Kubernetes ${kubernetes%.*} and etcd ${etcd%.*} into KUBEBUILDER_ASSETS." >&2
  exit 1
fi

# One build of all programs keeps both cores busy, and compiles what they share once.
build() {
  local start seconds tool stamp=k8s.io/component-base/version
  start=$(date +%s)
  echo "tools: building $* (the first time takes minutes, mostly downloading and compiling Go)" >&2
  rm -rf "$root/new"
  mkdir "$root/new"
  local flags=(
    -s -w
    -X "$stamp.gitVersion=v$kubernetes" -X "$stamp.gitMajor=1" -X "$stamp.gitMinor=$(cut -d. -f2 <<<"$kubernetes")" -X "$stamp.gitTreeState=clean"
    -X "helm.sh/helm/v4/internal/version.version=v$helm"
    -X "sigs.k8s.io/kwok/pkg/consts.Version=v$(version_of sigs.k8s.io/kwok)"
  )
  # Fewer garbage collections save the Go compiler a fifth of its time. Prometheus without service discovery does not need
  # the libraries of all clouds.
  CGO_ENABLED=0 GOFLAGS='' GOGC=400 nice go build -mod=readonly -buildvcs=false -trimpath -tags remove_all_sd \
    -gcflags=all=-dwarf=false -ldflags "${flags[*]}" -o "$root/new/" $(for tool in "$@"; do echo "${packages[$tool]}"; done) \
    >"$root/log" 2>&1 &
  local job=$!
  trap 'kill "$job" 2>/dev/null || :' EXIT
  while kill -0 "$job" 2>/dev/null; do
    sleep 1
    seconds=$(($(date +%s) - start))
    ((seconds % 15 == 0)) && echo "tools:   ${seconds} s" >&2
  done
  if ! wait "$job"; then
    echo "tools: the build failed:" >&2
    tail -n 15 "$root/log" >&2
    exit 1
  fi
  trap - EXIT
  # Go names a program after the last folder of its package, without a version.
  for tool in "$@"; do
    mv "$root/new/$(basename "${packages[$tool]%/v[0-9]}")" "$bin/$tool"
  done
  rmdir "$root/new"
  echo "tools: built in $(($(date +%s) - start)) s" >&2
}
unbuilt=()
for tool in "${tools[@]}"; do [ -x "$bin/$tool" ] || unbuilt+=("$tool"); done
[ ${#unbuilt[@]} = 0 ] || build "${unbuilt[@]}"

# Stages of kwok's module that let a fake node run pods.
if [ ! -f "$root/kwok/ready" ]; then
  module=$(go list -m -f '{{.Dir}}' sigs.k8s.io/kwok)
  mkdir -p "$root/kwok"
  cat "$module"/kustomize/stage/node/fast/node-initialize.yaml \
    <(echo ---) "$module"/kustomize/stage/node/heartbeat-with-lease/node-heartbeat-with-lease.yaml \
    <(for stage in "$module"/kustomize/stage/pod/fast/pod-*.yaml; do echo ---; cat "$stage"; done) \
    >"$root/kwok/stages.yaml"
  touch "$root/kwok/ready"
fi

# Third-party charts and CRDs from Go modules. The path consists of the module and a folder in it.
for pin in charts/*/ crds/*/; do
  pin=${pin%/}
  [ -d "$root/$pin" ] && continue
  echo "tools: fetching $pin" >&2
  source=$(cat "$pin/path")
  module=$(cd "$pin" && go mod download -json "${source%%//*}" | sed -n 's/^	"Dir": "\(.*\)",$/\1/p')
  rm -rf "${root:?}/$pin.new"
  cp -R "$module/${source##*//}" "$root/$pin.new"
  chmod -R u+w "$root/$pin.new"
  mv "$root/$pin.new" "$root/$pin"
done

echo "$root"
