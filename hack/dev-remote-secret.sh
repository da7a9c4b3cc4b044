#!/usr/bin/env bash
# Adds a cluster to the fleet through its kubeconfig. The name of the Secret becomes the name of the member.
#
#   dev-remote-secret.sh <kubeconfig-file> <namespace> <secret-name>
#
# The current context of kubectl must be the home cluster. The namespace is that of the hub, and is created if missing.
# KUBECONFIG_SECRET_LABEL and KUBECONFIG_SECRET_KEY have the same meaning as for the hub.
set -euo pipefail

if [ $# -ne 3 ]; then
  echo "usage: $0 <kubeconfig-file> <namespace> <secret-name>" >&2
  exit 2
fi
file=$1 namespace=$2 name=$3
label=${KUBECONFIG_SECRET_LABEL:-sigs.k8s.io/multicluster-runtime-kubeconfig}
key=${KUBECONFIG_SECRET_KEY:-kubeconfig}
[ -r "$file" ] || { echo "$0: $file cannot be read" >&2; exit 1; }

kubectl get namespace "$namespace" >/dev/null 2>&1 || kubectl create namespace "$namespace"
# Created with its label, so the hub sees it once.
kubectl create secret generic "$name" --namespace "$namespace" --from-file="$key=$file" --dry-run=client --output yaml \
  | kubectl label --local --filename - "$label=true" --output yaml \
  | kubectl apply --server-side --force-conflicts --field-manager dev-remote-secret --filename -
echo "Secret $namespace/$name holds the kubeconfig; 'kubectl krypton get clusters' shows the member $name"
