#!/usr/bin/env bash
# Adds a cluster to the fleet by its kubeconfig: the Secret's name becomes the name of the member.
#   dev-remote-secret.sh <kubeconfig-file> <namespace> <secret-name>
# kubectl's current context is home, and the namespace that of the hub; it is made when missing.
# KUBECONFIG_SECRET_LABEL and KUBECONFIG_SECRET_KEY are the hub's variables of these names.
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
# One object, label and all, so the hub sees it once.
kubectl create secret generic "$name" --namespace "$namespace" --from-file="$key=$file" --dry-run=client --output yaml \
  | kubectl label --local --filename - "$label=true" --output yaml \
  | kubectl apply --server-side --force-conflicts --field-manager dev-remote-secret --filename -
echo "Secret $namespace/$name holds the kubeconfig; 'kubectl krypton get clusters' shows the member $name"
