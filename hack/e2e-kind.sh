#!/usr/bin/env bash
# Tests the charts with a third-party chart on two kind clusters. An agent installs, upgrades and deletes a Tenant. One
# of two hubs is killed. Then the hub reconciles the cluster through a kubeconfig. The hub is reinstalled. At last it
# reconciles the cluster through a ClusterProfile, with an exec plugin from an image volume.
#
#   E2E_HOME, E2E_EDGE   names of the clusters (krypton-home, krypton-edge). The script cleans up and keeps existing
#                        clusters. It creates missing ones and deletes them at the end.
#   SKIP_CLEANUP=1       keep everything
#   KIND_IMAGE           node image of Kubernetes 1.35 or newer, for the image volume (default: that of kind)
#   E2E_CHART_REPO, E2E_CHART_NAME, E2E_CHART_VERSIONS='1.19.0 1.19.1'
#                        chart from a repository (default: kwok, from its Go module)
#   E2E_TIMEOUT          timeout of each wait in seconds (600)
#   SKIP_IMAGES=1        use the images of an earlier 'make images'
#
# Needs docker, kind, kubectl and git. To build the images, it needs Rust and Go.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

home=${E2E_HOME:-krypton-home}
edge=${E2E_EDGE:-krypton-edge}
timeout=${E2E_TIMEOUT:-600}
# The same name for the agent and for the kubeconfig, because release names contain it.
member=demo-remote-1
tenant=e2e-acme
workspace=e2e-acme-workspace
hub_namespace=krypton
agent_namespace=krypton-system
node_port=30743
version=$(sed -n '/^\[workspace.package\]/,/^\[/s/^version = "\(.*\)"/\1/p' Cargo.toml)

work=$(mktemp -d)
chmod 700 "$work"
made=()
steps=()
began=$SECONDS

log() { printf '%s e2e-kind: %s\n' "$(date -u +%H:%M:%S)" "$*"; }
fail() { log "FAILED: $*" >&2; exit 1; }
on_home() { kubectl --kubeconfig "$work/home.kubeconfig" "$@"; }
on_edge() { kubectl --kubeconfig "$work/edge.kubeconfig" "$@"; }
helm_home() { "$work/bin/helm" --kubeconfig "$work/home.kubeconfig" "$@"; }
helm_edge() { "$work/bin/helm" --kubeconfig "$work/edge.kubeconfig" "$@"; }

# until_true WHAT COMMAND...: runs COMMAND every second until it succeeds. Fails after the timeout.
until_true() {
  local what=$1 give_up=$((SECONDS + timeout))
  shift
  until "$@" >/dev/null 2>&1; do
    ((SECONDS < give_up)) || fail "$what: not within $timeout s"
    sleep 1
  done
}

step_name='' step_began=0
step() {
  end_step
  step_name=$*
  step_began=$SECONDS
  log "== $*"
}
end_step() {
  [ -n "$step_name" ] || return 0
  steps+=("$((SECONDS - step_began))|$step_name")
  step_name=''
}

# memory CLUSTER PROGRAM: prints current and peak memory in MiB of the process and of its pod's cgroup. The cgroup
# includes Helm. It excludes file pages that another cgroup has read first.
memory() {
  docker exec "$1-control-plane" bash -c '
    for status in /proc/[0-9]*/status; do
      read -r _ name <"$status" 2>/dev/null && [ "$name" = "$0" ] || continue
      process=${status%/status}
      cgroup=$(sed -n "s/^0:://p;s/^[0-9]*:memory://p" "$process/cgroup" | tail -n 1)
      for file in {,memory}"$cgroup"/memory.{current,usage_in_bytes} {,memory}"$cgroup"/memory.{peak,max_usage_in_bytes}; do
        [ -r "/sys/fs/cgroup/$file" ] && echo "${file##*.}: $(($(cat "/sys/fs/cgroup/$file") / 1024))"
      done
      grep -E "^Vm(RSS|HWM)" "$status"
    done' "$2" 2>/dev/null | awk -v name="$2" '
      { kib[$1] = $2 }
      END { printf "  %-14s process %5.1f, at most %5.1f; with helm, at most %6.1f (cgroup)\n", name,
              kib["VmRSS:"] / 1024, kib["VmHWM:"] / 1024, (kib["peak:"] + kib["max_usage_in_bytes:"]) / 1024 }'
}

diagnose() {
  local name
  for name in home edge; do
    [ -s "$work/$name.kubeconfig" ] || continue
    echo "---------------- $name"
    {
      local k=(kubectl --kubeconfig "$work/$name.kubeconfig" --request-timeout 10s)
      "${k[@]}" get pods,deployments -A -o wide
      "${k[@]}" get edgeclusters -A -o yaml
      "${k[@]}" get tenants -A -o yaml
      "${k[@]}" get events -A --sort-by=.metadata.creationTimestamp | tail -n 60
      local namespace
      for namespace in "$hub_namespace" "$agent_namespace" "$workspace"; do
        for pod in $("${k[@]}" get pods -n "$namespace" -o name); do
          echo "---- $name $namespace $pod"
          "${k[@]}" describe -n "$namespace" "$pod" | sed -n '/^Status:/p;/^Events:/,$p'
          "${k[@]}" logs -n "$namespace" "$pod" --all-containers --previous --tail 40 2>/dev/null && echo "---- (that was the run before)"
          "${k[@]}" logs -n "$namespace" "$pod" --all-containers --tail 120
        done
      done
      "$work/bin/helm" --kubeconfig "$work/$name.kubeconfig" list -A
    } 2>&1
  done
}

# Deletes the objects of an earlier run. Does nothing unless a namespace has the label of such a run.
ours=krypton-e2e
wipe() {
  local k=(kubectl --kubeconfig "$1") helm=("$work/bin/helm" --kubeconfig "$1") object release
  [ -n "$("${k[@]}" get namespaces -l "$ours=true" -o name)" ] || return 0
  for object in $("${k[@]}" get namespaces -l "$ours=true" -o name); do
    for release in $("${helm[@]}" list --short -n "${object#namespace/}"); do
      case $release in krypton-*) "${helm[@]}" uninstall "$release" -n "${object#namespace/}" --wait >/dev/null ;; esac
    done
  done
  for object in $("${k[@]}" get tenants -n default -l "$ours=true" -o name 2>/dev/null); do
    "${k[@]}" patch -n default "$object" --type merge -p '{"metadata":{"finalizers":null}}' >/dev/null
    "${k[@]}" delete -n default "$object" --ignore-not-found >/dev/null
  done
  for release in $("${helm[@]}" list --short -n "$workspace"); do
    "${helm[@]}" uninstall "$release" -n "$workspace" --wait >/dev/null
  done
  "${k[@]}" delete namespace "$workspace" --ignore-not-found >/dev/null
  "${k[@]}" delete crd -l "$ours=true" --ignore-not-found >/dev/null
  "${k[@]}" delete crd {tenants,edgeclusters,kryptondeployments}.mesh.openkcm.io --ignore-not-found >/dev/null
  "${k[@]}" delete namespaces -l "$ours=true" --ignore-not-found >/dev/null
}

cleanup() {
  local status=$? name
  trap - EXIT INT TERM
  set +e
  if ((status != 0)); then
    diagnose >"$work/diagnostics"
    cat "$work/diagnostics"
    log "e2e failed with status $status after $((SECONDS - began)) s, in step: ${step_name:-none}"
  fi
  if [ -n "${SKIP_CLEANUP:-}" ]; then
    log "nothing deleted: kubeconfigs are in $work; delete the clusters with 'kind delete clusters $home $edge'"
    exit "$status"
  fi
  for name in home edge; do
    cluster=${!name}
    if [[ " ${made[*]} " == *" $cluster "* ]]; then
      kind delete cluster --name "$cluster" --kubeconfig "$work/$name.kubeconfig"
    elif [ -s "$work/$name.kubeconfig" ] && [ -x "$work/bin/helm" ]; then
      log "cleaning up cluster $cluster"
      wipe "$work/$name.kubeconfig"
    fi
  done
  rm -rf "$work"
  exit "$status"
}
trap cleanup EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

for tool in docker kind kubectl; do command -v "$tool" >/dev/null || fail "$tool not found; install it"; done
[ "$home" != "$edge" ] || fail "E2E_HOME and E2E_EDGE are the same cluster"

# ---------------------------------------------------------------- clusters, images, the fleet's chart

for name in home edge; do
  cluster=${!name}
  step "kind cluster $cluster"
  if kind get clusters 2>/dev/null | grep -qx "$cluster"; then
    log "using existing cluster $cluster; it is not deleted"
    kind export kubeconfig --name "$cluster" --kubeconfig "$work/$name.kubeconfig" >/dev/null 2>&1
  else
    made+=("$cluster")
    kind create cluster --name "$cluster" ${KIND_IMAGE:+--image "$KIND_IMAGE"} --kubeconfig "$work/$name.kubeconfig" --wait 180s >"$work/kind.log" 2>&1 \
      || { cat "$work/kind.log"; fail "kind failed to create cluster $cluster"; }
  fi
done

if [ -z "${SKIP_IMAGES:-}" ]; then
  step "make images"
  hack/images/images.sh
fi
hub_image=${REGISTRY:+${REGISTRY%/}/}krypton-hub:${TAG:-$version}
agent_image=${REGISTRY:+${REGISTRY%/}/}krypton-agent:${TAG:-$version}
# Use the programs of the image.
mkdir -p "$work/bin"
container=$(docker create --network none "$hub_image")
docker cp "$container:/usr/local/bin/helm" "$work/bin/helm"
docker cp "$container:/usr/local/bin/kubectl-krypton" "$work/bin/kubectl-krypton"
docker rm "$container" >/dev/null
export PATH="$work/bin:$PATH"

for name in home edge; do
  kubeconfig=$work/$name.kubeconfig
  for namespace in "$hub_namespace" "$agent_namespace"; do
    marked=$(kubectl --kubeconfig "$kubeconfig" get namespace "$namespace" --ignore-not-found -o "jsonpath={.metadata.labels.$ours}{'/'}")
    [ -z "$marked" ] || [ "$marked" = true/ ] || fail "the cluster ${!name} has a namespace $namespace that this test did not create; set E2E_HOME and E2E_EDGE to other clusters"
  done
  wipe "$kubeconfig"
  for namespace in "$hub_namespace" "$agent_namespace"; do
    kubectl --kubeconfig "$kubeconfig" create namespace "$namespace" >/dev/null
    kubectl --kubeconfig "$kubeconfig" label namespace "$namespace" "$ours=true" >/dev/null
  done
done

step "kind load docker-image"
kind load docker-image "$hub_image" --name "$home" 2>&1
kind load docker-image "$agent_image" --name "$edge" 2>&1

# Chart flags of the hub for the older and the newer version of the fleet's chart.
if [ -n "${E2E_CHART_REPO:-}" ]; then
  read -r older newer <<<"${E2E_CHART_VERSIONS:?set it to two versions, as '1.19.0 1.19.1'}"
  chart_name=${E2E_CHART_NAME:?set it to the name of the chart in E2E_CHART_REPO}
  chart_at() { printf '%s\n' --set-string "chart.repo=$E2E_CHART_REPO" --set-string "chart.name=$chart_name" --set-string "chart.version=$1"; }
  cat >"$work/chart-values.yaml" <<<'{}'
else
  step "chart and image of kwok, from its Go module"
  older=0.2.0 newer=0.2.1 chart_name=kwok
  tools=$(hack/tools/tools.sh | tail -n 1)
  kwok=$(cd hack/tools && go list -m -f '{{.Dir}} {{.Version}}' sigs.k8s.io/kwok)
  kwok_image=krypton-e2e/kwok:${kwok##* }
  kwok=${kwok% *}
  mkdir -p "$work/kwok/image/usr/local/bin" "$work/charts"
  cp -L "$tools/bin/kwok" "$work/kwok/image/usr/local/bin/kwok"
  printf 'FROM scratch\nCOPY . /\nENTRYPOINT ["/usr/local/bin/kwok"]\n' >"$work/kwok/Dockerfile"
  DOCKER_BUILDKIT=1 docker build --quiet --file "$work/kwok/Dockerfile" --tag "$kwok_image" "$work/kwok/image" >/dev/null
  kind load docker-image "$kwok_image" --name "$edge" 2>&1
  cp -r "$kwok/charts/kwok" "$work/kwok/chart"
  chmod -R u+w "$work/kwok"
  for v in "$older" "$newer"; do "$work/bin/helm" package "$work/kwok/chart" --version "$v" --destination "$work/charts" >/dev/null; done
  # Its chart does not contain its CRDs. It manages only fake nodes, and these clusters have none.
  on_edge apply -f "$kwok/kustomize/crd/bases" >/dev/null
  for file in "$kwok"/kustomize/crd/bases/*.yaml; do on_edge label --overwrite -f "$file" "$ours=true" >/dev/null; done
  on_home create configmap fleet-chart -n "$hub_namespace" --from-file="$work/charts" >/dev/null
  chart_at() { printf '%s\n' --set-string chart.repo= --set-string "chart.name=/charts/kwok-$1.tgz" --set-string "chart.version=$1"; }
  cat >"$work/chart-values.yaml" <<YAML
extraVolumes:
- name: charts
  configMap: {name: fleet-chart}
extraVolumeMounts:
- {name: charts, mountPath: /charts, readOnly: true}
chart:
  installCRDs: false
  values:
    # The default gives all releases one name.
    fullnameOverride: ""
    image: {repository: docker.io/${kwok_image%:*}, tag: ${kwok_image##*:}}
YAML
fi

image_values() { # REPOSITORY: prints the image values of the hub's or the agent's chart
  printf 'image:\n  registry: "%s"\n  repository: %s\n  tag: "%s"\n  pullPolicy: Never\n' "${REGISTRY:-}" "$1" "${TAG:-$version}"
}
{
  cat "$work/chart-values.yaml"
  image_values krypton-hub
  cat <<YAML
agentsService: {type: NodePort, nodePort: $node_port}
advertise: ["$home-control-plane:$node_port"]
proxyGrace: 10s
YAML
} >"$work/hub.yaml"
image_values krypton-agent >"$work/agent.yaml"

# hub VERSION [VALUE...]: installs or upgrades the hub with that version of the fleet's chart.
hub() {
  local chart
  mapfile -t chart < <(chart_at "$1")
  shift
  helm_home upgrade --install krypton-hub charts/krypton-hub -n "$hub_namespace" -f "$work/hub.yaml" "${chart[@]}" "$@" --wait --timeout "${timeout}s" >/dev/null
}

# ---------------------------------------------------------------- checks on the edge cluster

write_tenant() {
  on_edge apply -f - <<YAML >/dev/null
apiVersion: mesh.openkcm.io/v1alpha1
kind: Tenant
metadata: {name: $tenant, namespace: default, labels: {$ours: "true"}}
spec: {workspace: $workspace}
YAML
}
applied_chart() { on_edge get tenant "$tenant" -n default -o jsonpath='{.status.lastAppliedChart}'; }
has_applied() { [[ $(applied_chart) == *":$1" ]]; }
# runs VERSION: checks that the workloads are ready and have this version of the chart.
runs() {
  local found
  on_edge wait deployment --all -n "$workspace" --for=condition=Available --timeout="${timeout}s" >/dev/null
  found=$(on_edge get deployments -n "$workspace" -o jsonpath='{range .items[*]}{.metadata.labels.helm\.sh/chart}{"\n"}{end}' | sort -u)
  [[ $found == "$chart_name-$1" || $found == "$chart_name-v${1#v}" ]] || fail "deployments in $workspace have chart '$found' instead of $chart_name-$1"
}
revision() { on_edge get secrets -n "$workspace" -l "owner=helm,name=tenant-$tenant-$member,status=deployed" -o jsonpath='{.items[*].metadata.labels.version}'; }
tenant_ready() {
  until_true "Tenant $tenant with version $1" has_applied "$1"
  on_edge wait tenant "$tenant" -n default --for=condition=Ready --timeout="${timeout}s" >/dev/null || fail "Tenant $tenant is not Ready"
  [ "$(on_edge get tenant "$tenant" -n default -o jsonpath='{.status.phase}')" = Ready ] || fail "the phase of Tenant $tenant is not Ready"
  runs "$1"
}
install_tenant() {
  write_tenant
  until_true "namespace $workspace" on_edge get namespace "$workspace"
  log "workspace $workspace namespace created"
  until_true "release tenant-$tenant-$member deployed" revision_is 1
  log "helm install success"
  tenant_ready "$1"
  log "tenant phase is Ready on remote cluster"
}
revision_is() { [ "$(revision)" = "$1" ]; }
delete_tenant() {
  on_edge delete tenant "$tenant" -n default --timeout="${timeout}s" >/dev/null
  on_edge wait namespace "$workspace" --for=delete --timeout="${timeout}s" >/dev/null
  log "tenant and workspace are gone"
}
# member_is MODE: checks that the member is connected and healthy, and that the current pod holds its Lease.
member_is() {
  local found pod
  case $1 in
    agent) pod=$(on_edge get pods -n "$agent_namespace" -o jsonpath='{.items[*].metadata.name}') ;;
    proxy) pod=$(on_home get pods -n "$hub_namespace" -o jsonpath='{.items[*].metadata.name}') ;;
  esac
  found=$(on_home get edgecluster "$member" -o jsonpath='{.status.mode} {.status.conditions[?(@.type=="Connected")].status} {.status.conditions[?(@.type=="Healthy")].status} {.status.leaseHolder}')
  [[ $found == "$1 True True "*/"$pod"/* ]]
}
# Prints the pod that has the label of the leader, if any.
leading() { on_home get pods -n "$hub_namespace" -l mesh.openkcm.io/leader=true -o jsonpath='{.items[*].metadata.name}'; }
another_leads() {
  local found
  found=$(leading)
  [ -n "$found" ] && [[ $found != *"$1"* ]]
}
# Sends SIGKILL to the hub in a pod, which thus cannot hand over.
kill_hub() { # POD
  docker exec "$home-control-plane" bash -c '
    for process in /proc/[0-9]*; do
      [ "$(cat "$process/comm" 2>/dev/null)" = krypton-hub ] || continue
      tr "\0" "\n" <"$process/environ" 2>/dev/null | grep -qx "POD_NAME=$0" && kill -9 "${process#/proc/}" && exit 0
    done
    exit 1' "$1" || fail "no hub process found in pod $1"
}
epoch() { on_home get edgecluster "$member" -o jsonpath='{.status.hubEpoch}'; }
heard_by_another() { (($(epoch) > $1)) && member_is agent; }
no_pods() { [ -z "$(kubectl --kubeconfig "$work/$1.kubeconfig" get pods -n "$2" -o name)" ]; }
# still_there VERSION REVISION: checks that nothing changed while neither hub nor agent was running.
still_there() {
  on_edge get tenant "$tenant" -n default >/dev/null || fail "Tenant $tenant is gone"
  [ -z "$(on_edge get tenant "$tenant" -n default -o jsonpath='{.metadata.deletionTimestamp}')" ] || fail "Tenant $tenant is being deleted"
  revision_is "$2" || fail "the release of Tenant $tenant is at revision '$(revision)', not $2"
  runs "$1"
}
authority() { on_home get secret krypton-hub-ca -n "$hub_namespace" -o jsonpath='{.data}' | sha256sum | cut -c1-16; }

# Checks that no pod has restarted and that the API server has denied no request.
well_behaved() { # home|edge NAMESPACE
  local restarts pod
  for pod in $(kubectl --kubeconfig "$work/$1.kubeconfig" get pods -n "$2" -o name); do
    restarts=$(kubectl --kubeconfig "$work/$1.kubeconfig" get -n "$2" "$pod" -o jsonpath='{.status.containerStatuses[*].restartCount}')
    [ "$restarts" = 0 ] || fail "$pod has restarted $restarts times"
    kubectl --kubeconfig "$work/$1.kubeconfig" logs -n "$2" "$pod" >>"$work/pods.log"
  done
  if grep -iE 'forbidden|cannot (get|list|watch|create|update|patch|delete|impersonate) ' "$work/pods.log"; then
    fail "$2 on $1: the API server denied a request"
  fi
}

has_debug_lines() { # home|edge NAMESPACE POD
  local log
  log=$(kubectl --kubeconfig "$work/$1.kubeconfig" logs -n "$2" "$3" --since 10m) && grep -q DEBUG <<<"$log"
}
# debug_port home|edge NAMESPACE hub|agent FILE PATTERN: changes the log level, and checks a file of a support bundle.
debug_port() {
  local kubeconfig=$work/$1.kubeconfig said pod bundle=$work/support-$1 file namespace=(-n "$2")
  if [ "$3" = hub ]; then
    namespace=(--hub-namespace "$2")
  fi
  said=$(kubectl krypton log-level "$3" debug --for 5m "${namespace[@]}" --kubeconfig "$kubeconfig") || fail "log-level $3: $said"
  pod=${said%%:*}
  [[ $said == "krypton-$3-"*": debug until "*", then "* ]] || fail "log-level $3 printed '$said'"
  until_true "debug lines in the log of $pod" has_debug_lines "$1" "$2" "$pod"
  kubectl krypton log-level "$3" info --for 0 "${namespace[@]}" --kubeconfig "$kubeconfig" >/dev/null
  said=$(kubectl krypton log-level "$3" "${namespace[@]}" --kubeconfig "$kubeconfig")
  log "$said; the log has debug lines"
  rm -rf "$bundle" "$bundle.tar.gz"
  kubectl krypton support-bundle --file "$bundle.tar.gz" "${namespace[@]}" --kubeconfig "$kubeconfig" >/dev/null
  mkdir "$bundle"
  tar -xzf "$bundle.tar.gz" -C "$bundle"
  file=$bundle/krypton-support/$2/debug/$pod.$4
  [ -s "$file" ] || fail "the support bundle of $1 has no $4: $(sed -n '/^Missing:/,$p' "$bundle/krypton-support/README.txt")"
  grep -q "$5" "$file" || fail "$4 of $pod does not contain $5"
}

# ---------------------------------------------------------------- with an agent

step "helm install krypton-hub on $home"
hub "$older"
ca=$(authority)

step "join, helm install krypton-agent on $edge"
on_home -n "$hub_namespace" exec deploy/krypton-hub -- kubectl-krypton join "$member" >"$work/bundle.yaml"
helm_edge install krypton-agent charts/krypton-agent -n "$agent_namespace" -f "$work/agent.yaml" \
  --set-file join.bundle="$work/bundle.yaml" --wait --timeout "${timeout}s" >/dev/null
until_true "agent of member $member connected" member_is agent
log "agent of member $member is connected"
until_true "helm test krypton-hub" helm_home test krypton-hub -n "$hub_namespace" --timeout "${timeout}s"
until_true "helm test krypton-agent" helm_edge test krypton-agent -n "$agent_namespace" --timeout "${timeout}s"
log "helm test success"
on_home -n "$hub_namespace" logs deploy/krypton-hub --since=15m | grep -v ' INFO ' || true
on_edge -n "$agent_namespace" logs deploy/krypton-agent --since=15m | grep -q ' INFO ' || fail "the agent's log has no INFO line"

step "Tenant by the agent: install"
install_tenant "$older"
kubectl krypton get clusters -o wide --kubeconfig "$work/home.kubeconfig"

step "Tenant by the agent: upgrade ($older to $newer, by helm upgrade of the hub)"
hub "$newer"
tenant_ready "$newer"
revision_is 2 || fail "after the upgrade the release is at revision '$(revision)', not 2"
log "helm upgrade success"

step "Tenant by the agent: deletion"
delete_tenant

step "Tenant by the agent: install again"
install_tenant "$newer"
well_behaved edge "$agent_namespace"
well_behaved home "$hub_namespace"
agent_memory=$(memory "$edge" krypton-agent)

step "log levels and support bundles through the debug ports of pods"
debug_port home "$hub_namespace" hub fleet.json '"members"'
debug_port edge "$agent_namespace" agent agent.json "default/$tenant"

# ---------------------------------------------------------------- two hubs

step "two hubs: kill -9 of the leader"
hub "$newer" --set replicaCount=2
until_true "one of two hubs is the leader" another_leads none
until_true "agent of member $member connected" member_is agent
lead=$(leading)
before=$(epoch)
kill_hub "$lead"
killed=$(date +%s%N)
until_true "the other hub has the leader's label" another_leads "$lead"
log "the other hub got the label after $((($(date +%s%N) - killed) / 1000000)) ms"
until_true "agent of member $member connected to the other hub" heard_by_another "$before"
log "the agent connected to it after $((($(date +%s%N) - killed) / 1000000)) ms"
on_home -n "$hub_namespace" logs "$lead" --previous | grep -q ' INFO ' || fail "the log of the killed hub is not available"
still_there "$newer" 1
delete_tenant
install_tenant "$newer"
# Start new pods, because the checks below fail for a pod that was killed.
on_home delete pods --all -n "$hub_namespace" --timeout="${timeout}s" >/dev/null
hub "$newer"
until_true "agent of member $member connected to the only hub" member_is agent

# ---------------------------------------------------------------- without an agent

step "helm uninstall krypton-agent: Tenant and release stay"
on_edge logs --follow --tail 0 deployment/krypton-agent -n "$agent_namespace" >"$work/last-words.log" 2>&1 &
last_words=$!
helm_edge uninstall krypton-agent -n "$agent_namespace" --wait --timeout "${timeout}s" >/dev/null
until_true "the agent's pod is gone" no_pods edge "$agent_namespace"
wait "$last_words" || true
sed 's/^/  agent: /' "$work/last-words.log"
still_there "$newer" 1
log "tenant and release exist without the agent"

step "the same cluster through its kubeconfig"
on_home delete edgecluster "$member" --timeout="${timeout}s" >/dev/null
kind get kubeconfig --internal --name "$edge" >"$work/internal.kubeconfig"
KUBECONFIG=$work/home.kubeconfig hack/dev-remote-secret.sh "$work/internal.kubeconfig" "$hub_namespace" "$member"
until_true "the hub connected to member $member" member_is proxy
log "the hub is connected to member $member"
still_there "$newer" 1
tenant_ready "$newer"

step "Tenant by the hub: deletion"
delete_tenant

step "Tenant by the hub: install"
install_tenant "$newer"
well_behaved home "$hub_namespace"
hub_memory=$(memory "$home" krypton-hub)

# ---------------------------------------------------------------- without a hub

step "helm uninstall krypton-hub: releases stay"
helm_home uninstall krypton-hub -n "$hub_namespace" --wait --timeout "${timeout}s" >/dev/null
until_true "the hub's pod is gone" no_pods home "$hub_namespace"
still_there "$newer" 1
on_home get edgecluster "$member" >/dev/null || fail "EdgeCluster $member is gone"
[ "$(authority)" = "$ca" ] || fail "the hub's CA has changed"
log "tenant and release exist without the hub"

step "helm install krypton-hub again: the same CA, the same members"
hub "$newer"
until_true "the reinstalled hub connected to member $member" member_is proxy
[ "$(authority)" = "$ca" ] || fail "the reinstalled hub has another CA"
still_there "$newer" 1
tenant_ready "$newer"
log "the reinstalled hub has the same CA and member"

step "Tenant by the reinstalled hub: deletion"
delete_tenant
well_behaved home "$hub_namespace"

# ---------------------------------------------------------------- with a ClusterProfile

step "exec plugin of the Cluster Inventory API, from its Go module, as an image volume"
plugin=kubeconfig-secretreader
tools=$(hack/tools/tools.sh build "$plugin" | tail -n 1)
inventory=$(echo "$tools"/crds/cluster-inventory-api-*)
plugin_image=krypton-e2e/$plugin:${inventory##*-}
# The published image has the program in this place, too.
mkdir -p "$work/plugin/bin"
cp -L "$tools/bin/$plugin" "$work/plugin/bin/$plugin-plugin"
printf 'FROM scratch\nCOPY . /\n' >"$work/plugin.Dockerfile"
DOCKER_BUILDKIT=1 docker build --quiet --file "$work/plugin.Dockerfile" --tag "$plugin_image" "$work/plugin" >/dev/null
kind load docker-image "$plugin_image" --name "$home" 2>&1
on_home apply -f "$inventory/multicluster.x-k8s.io_clusterprofiles.yaml" >/dev/null
on_home label --overwrite crd clusterprofiles.multicluster.x-k8s.io "$ours=true" >/dev/null
cat >"$work/plugin.yaml" <<YAML
multicluster:
  enabled: true
  accessProvidersConfig:
    providers:
    - name: $plugin
      execConfig:
        apiVersion: client.authentication.k8s.io/v1
        command: /plugins/$plugin/bin/$plugin-plugin
        provideClusterInfo: true
  plugins:
  - {name: $plugin, image: "$plugin_image", mountPath: /plugins/$plugin}
YAML
on_home delete secret "$member" -n "$hub_namespace" >/dev/null
hub "$newer" -f "$work/plugin.yaml"
on_home delete edgecluster "$member" --timeout="${timeout}s" >/dev/null

step "the same cluster through a ClusterProfile"
# Without the label of kubeconfigs, only the plugin reads this Secret.
on_home create secret generic "$member-credential" -n "$hub_namespace" --from-file=kubeconfig="$work/internal.kubeconfig" >/dev/null
in_kubeconfig() { kubectl config view --raw --kubeconfig "$work/internal.kubeconfig" -o jsonpath="{.clusters[0].cluster.$1}"; }
on_home apply -f - <<YAML >/dev/null
apiVersion: multicluster.x-k8s.io/v1alpha1
kind: ClusterProfile
metadata: {name: $member, namespace: $hub_namespace}
spec: {displayName: $member, clusterManager: {name: e2e}}
YAML
on_home patch clusterprofile "$member" -n "$hub_namespace" --subresource=status --type=merge --patch-file /dev/stdin <<YAML >/dev/null
status:
  conditions:
  - {type: ControlPlaneHealthy, status: "True", reason: Probed, message: "", lastTransitionTime: "2026-01-01T00:00:00Z"}
  accessProviders:
  - name: $plugin
    cluster:
      server: $(in_kubeconfig server)
      certificate-authority-data: $(in_kubeconfig certificate-authority-data)
      extensions:
      - name: client.authentication.k8s.io/exec
        extension: {name: $member-credential, key: kubeconfig, namespace: $hub_namespace}
YAML
until_true "the hub connected to member $member with the plugin's credential" member_is proxy
log "the hub is connected to member $member with the credential that the plugin printed"

step "Tenant by the hub with the plugin"
install_tenant "$newer"
delete_tenant
well_behaved home "$hub_namespace"
end_step

# ---------------------------------------------------------------- durations and memory

echo
echo "seconds"
for line in "${steps[@]}"; do printf '  %5d  %s\n' "${line%%|*}" "${line#*|}"; done
printf '  %5d  total\n' $((SECONDS - began))
echo "memory in MiB, with one Tenant"
printf '%s\n' "$hub_memory" "$agent_memory"
log "e2e passed"
