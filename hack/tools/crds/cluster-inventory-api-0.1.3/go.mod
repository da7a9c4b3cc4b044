// The CRDs of cluster-inventory-api 0.1.3, as its Go module carries them.
module hack/tools/crds/cluster-inventory-api-0.1.3

go 1.26.0

require sigs.k8s.io/cluster-inventory-api v0.1.3
