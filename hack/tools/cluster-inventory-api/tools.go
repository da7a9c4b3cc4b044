//go:build tools

// Package tools pins the API of ClusterProfiles: its CRD, and a plugin that reads credentials from Secrets.
package tools

import _ "sigs.k8s.io/cluster-inventory-api/plugins/kubeconfig-secretreader/cmd/plugin"
