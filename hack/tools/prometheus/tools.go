//go:build tools

// Package tools pins promtool, which evaluates our alerts in a test.
package tools

import _ "github.com/prometheus/prometheus/cmd/promtool"
