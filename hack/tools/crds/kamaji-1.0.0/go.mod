// The CRDs of kamaji 1.0.0, as its Go module carries them.
module hack/tools/crds/kamaji-1.0.0

go 1.26.0

require github.com/clastix/kamaji v1.0.0
