// Chart external-dns 1.20.0, as the Go module of external-dns v0.21.0 carries it.
module hack/tools/charts/external-dns-1.20.0

go 1.26.0

require sigs.k8s.io/external-dns v0.21.0
