//go:build tools

// Package tools pins etcd. Its server needs a module of its own: `go install …@version` refuses it.
package tools

import _ "go.etcd.io/etcd/server/v3"
