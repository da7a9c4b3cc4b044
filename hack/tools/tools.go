//go:build tools

// Package tools pins the Go programs of the tests, and the Helm of the images. In one module all of them use the same
// versions of the libraries, so each library is compiled once.
//
// The libraries k8s.io/* have the minor and patch version of k8s.io/kubernetes.
package tools

import (
	_ "github.com/prometheus/prometheus/cmd/promtool"
	_ "go.etcd.io/etcd/server/v3"
	_ "helm.sh/helm/v4/cmd/helm"
	_ "k8s.io/kubernetes/cmd/kube-apiserver"
	_ "k8s.io/kubernetes/cmd/kube-controller-manager"
	_ "k8s.io/kubernetes/cmd/kube-scheduler"
	_ "k8s.io/kubernetes/cmd/kubectl"
	_ "sigs.k8s.io/cluster-inventory-api/plugins/kubeconfig-secretreader/cmd/plugin"
	_ "sigs.k8s.io/kwok/cmd/kwok"
)
