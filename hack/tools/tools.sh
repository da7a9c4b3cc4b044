#!/usr/bin/env bash
# Builds the local Kubernetes for tests and the demo, once, into a cache outside the checkout.
#
#   tools.sh [build [TOOL...]]  build the missing tools, and print their folder (which contains bin/) last
#   tools.sh dir                print the folder
#   tools.sh check              fail if a tool is missing, and name it
#
# Suitable binaries in $KUBEBUILDER_ASSETS or on PATH are linked instead of built. Each module has its own folder,
# named by versions and flags. A new tool or version rebuilds nothing else.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"

tools=(etcd kube-apiserver kube-controller-manager kube-scheduler kubectl helm kwok kubeconfig-secretreader registry kstatus lua promtool)
# Without crds/: the names of its folders contain the versions, and nothing depends on it.
pins=$(cat ./*/go.mod ./*/go.sum ./*/*.go charts/*/go.mod charts/*/go.sum tools.sh | sha256sum | cut -c1-12)
cache=${XDG_CACHE_HOME:-$HOME/.cache}/krypton/tools
root=$cache/$pins
bin=$root/bin

version_of() { sed -En "s#^(require)?[[:space:]]*$2 v([^ ]+).*#\2#p" "$1/go.mod" | head -n 1; }
kubernetes=$(version_of kubernetes k8s.io/kubernetes)
helm=$(version_of helm helm.sh/helm/v4)

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
    etcd) said=$("$2" --version 2>/dev/null) && grep -q '^etcd Version: 3\.6\.' <<<"$said" ;;
    kube-*) said=$("$2" --version 2>/dev/null) && grep -q "^Kubernetes v${kubernetes%.*}\." <<<"$said" ;;
    kubectl) said=$("$2" version --client 2>/dev/null) && grep -q "^Client Version: v${kubernetes%.*}\.[0-9]*$" <<<"$said" ;;
    helm) said=$("$2" version --template '{{.Version}}' 2>/dev/null) && grep -q "^v${helm%.*}\." <<<"$said" ;;
    kwok) said=$("$2" --version 2>/dev/null) && grep -q 'v0\.8\.' <<<"$said" ;;
    *) false ;; # has no version command
  esac
}

mkdir -p "$bin" "$root/charts" "$root/crds" "$root/log"
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
  echo "tools: or put binaries of Kubernetes ${kubernetes%.*} and etcd 3.6 into KUBEBUILDER_ASSETS." >&2
  exit 1
fi

# Fewer garbage collections save the Go compiler a fifth of its time.
export CGO_ENABLED=0 GOFLAGS="-buildvcs=false -trimpath" GOGC=400

# wanted TOOL...: whether one of these tools is requested and missing.
wanted() {
  local tool
  for tool in "$@"; do
    if [[ " ${tools[*]} " == *" $tool "* ]] && ! [ -x "$bin/$tool" ]; then return 0; fi
  done
  return 1
}

# build MODULE TOOLS ARGS...: runs go build, and prints progress every few seconds. The first build takes minutes.
build() {
  local module=$1 made=$2 start seconds out binary
  shift 2
  wanted $made || return 0
  out=$cache/$module-$({ cat "$module"/{go.mod,go.sum,*.go}; echo "$@"; } | sha256sum | cut -c1-12)
  if ! [ -d "$out" ]; then
    start=$(date +%s)
    echo "tools: building $made (the first time takes minutes, mostly downloading and compiling Go)" >&2
    rm -rf "$out.new"
    mkdir -p "$out.new"
    # The name of a binary can differ from that of its package.
    binary=$out.new/
    [[ "$made" == *" "* ]] || binary=$out.new/$made
    (cd "$module" && exec nice go build -mod=readonly -gcflags=all=-dwarf=false -o "$binary" "$@") >"$root/log/$module.log" 2>&1 &
    local job=$!
    while kill -0 "$job" 2>/dev/null; do
      sleep 1
      seconds=$(($(date +%s) - start))
      ((seconds % 15 == 0)) && echo "tools:   $module, ${seconds} s" >&2
    done
    if ! wait "$job"; then
      echo "tools: building $module failed:" >&2
      tail -n 15 "$root/log/$module.log" >&2
      exit 1
    fi
    mv "$out.new" "$out"
    echo "tools: $made built in $(($(date +%s) - start)) s" >&2
  fi
  for tool in $made; do
    [ -x "$bin/$tool" ] || ln -sf "$out/$tool" "$bin/$tool"
  done
}

stamp=k8s.io/component-base/version
build kubernetes etcd -ldflags "-s -w" go.etcd.io/etcd/server/v3
# Two builds at a time keep the cores busy while one of them links. The first build has compiled Go's own packages.
{
  build helm helm -ldflags "-s -w -X helm.sh/helm/v4/internal/version.version=v$helm" helm.sh/helm/v4/cmd/helm
  build registry registry -ldflags "-s -w" .
  build kstatus kstatus -ldflags "-s -w" .
  build lua lua -ldflags "-s -w" .
  # Without service discovery, which needs the libraries of all clouds.
  build prometheus promtool -tags remove_all_sd -ldflags "-s -w" github.com/prometheus/prometheus/cmd/promtool
} &
others=$!
trap 'kill "$others" 2>/dev/null || :' EXIT
build kubernetes "kube-apiserver kube-controller-manager kube-scheduler kubectl" \
  -ldflags "-s -w -X $stamp.gitVersion=v$kubernetes -X $stamp.gitMajor=1 -X $stamp.gitMinor=$(cut -d. -f2 <<<"$kubernetes") -X $stamp.gitTreeState=clean" \
  k8s.io/kubernetes/cmd/{kube-apiserver,kube-controller-manager,kube-scheduler,kubectl}
build kubernetes kwok -ldflags "-s -w -X sigs.k8s.io/kwok/pkg/consts.Version=v$(version_of kubernetes sigs.k8s.io/kwok)" sigs.k8s.io/kwok/cmd/kwok
build kubernetes kubeconfig-secretreader -ldflags "-s -w" sigs.k8s.io/cluster-inventory-api/plugins/kubeconfig-secretreader/cmd/plugin
wait "$others" || { echo "tools: a build has failed, see above" >&2; exit 1; }

# Stages of kwok's module that let a fake node run pods.
if [ ! -f "$root/kwok/ready" ]; then
  module=$(cd kubernetes && go list -m -f '{{.Dir}}' sigs.k8s.io/kwok)
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
