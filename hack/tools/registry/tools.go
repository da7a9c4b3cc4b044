//go:build tools

// Package tools pins the registry of the distribution project, which tests of OCI charts pull from.
package tools

import _ "github.com/distribution/distribution/v3/cmd/registry"
