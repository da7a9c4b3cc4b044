// The CRDs of the Prometheus operator 0.85.0, as its Go module carries them.
module hack/tools/crds/prometheus-operator-0.85.0

go 1.26.0

require github.com/prometheus-operator/prometheus-operator v0.85.0
