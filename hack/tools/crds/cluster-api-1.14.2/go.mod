// The CRDs of cluster-api 1.14.2, as its Go module carries them.
module hack/tools/crds/cluster-api-1.14.2

go 1.26.0

require sigs.k8s.io/cluster-api v1.14.2
