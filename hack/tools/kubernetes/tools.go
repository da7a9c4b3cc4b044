//go:build tools

// Package tools pins Kubernetes, with one replace per staging module to the same minor version, and what else the tests
// need of its world. In one module all of them compile the same libraries, and each library once.
package tools

import (
	_ "go.etcd.io/etcd/server/v3"
	_ "k8s.io/kubernetes/cmd/kube-apiserver"
	_ "k8s.io/kubernetes/cmd/kube-controller-manager"
	_ "k8s.io/kubernetes/cmd/kube-scheduler"
	_ "k8s.io/kubernetes/cmd/kubectl"
	_ "sigs.k8s.io/cluster-inventory-api/plugins/kubeconfig-secretreader/cmd/plugin"
	_ "sigs.k8s.io/kwok/cmd/kwok"
)
