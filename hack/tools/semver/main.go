// Command semver prints the version of the library with which Helm compares versions, and which versions fit which ranges
// by it: a range, a tab, and the versions, or "none" where it is no range.
//
//	cd hack/tools && go run ./semver > ../../common/helm/src/chart/range/masterminds.tsv
package main

import (
	"fmt"
	"runtime/debug"
	"strings"

	"github.com/Masterminds/semver/v3"
)

var versions = []string{
	"0.0.0", "0.0.1", "0.0.3", "0.0.4", "0.1.0", "0.2.2", "0.2.3", "0.2.9", "0.3.0", "0.9.9",
	"1.0.0-rc.1", "1.0.0", "1.1.9", "1.2.0-alpha", "1.2.0-rc.1", "1.2.0-rc.2", "1.2.0", "1.2.2", "1.2.3-0", "1.2.3",
	"1.2.3+build.7", "1.2.4", "1.2.9", "1.3.0-rc.1", "1.3.0", "1.4.0", "1.4.1", "1.4.9", "1.5.0", "1.9.9",
	"2.0.0-a", "2.0.0", "2.3.0", "3.0.0", "3.9.0", "4.0.0", "10.0.0", "99.0.1",
}

var operators = []string{"", "=", "!=", ">", "<", ">=", "=>", "<=", "=<", "~", "~>", "^"}

var operands = []string{
	"0", "0.0", "0.0.3", "0.2", "0.2.3", "1", "1.2", "1.2.3", "v1.2.3", "1.x", "1.2.x", "1.X", "1.2.*", "*", "x", "X",
	"1.2.0-rc.1", "1.2.0-0", "1.2.3-0", "1.2.3+build.7", "2.0.0-a", "01", "1.02", "1.x.3", "1.*.*", "", "v", "a",
}

var others = []string{
	">=1.0 <2.0", ">= 1.0, < 2.0, !=1.5.0", ">=1.0,<2.0", "1.2 - 1.4", "1.2.0 - 1.4.0", "1.2-1.4", "1.2 - 1.4 - 2", "0 - 1",
	"~1.2 || ^3", "^1||^3", "^0.2.3 || >=2 <3", "1.2.3 || 1.2.4", ">1 || <0.1", ">=1.2.0-0 <2", ">=1.2.0-0, <2.0.0-0",
	"^1.2.0-rc.1 || ~0.2", ">= 1.2.3 <= 1.4.0", "^1 !=1.2.3", "!=1 !=2", "* !=1.2", "1.2 1.2.3", ">", "||", "1 ||", "|| 1",
	"1,", ",1", ">=1,,<2", ">=1, , <2", ">=1 , <2", "latest", "1..2", "1.2.3.4", "1.2.3-", "1.2.3+", "^^1", "~^1", ">>1", "> =1", ">= v1", "^ 1.2", "1 . 2", "-1",
	"1.2.3 -", "- 1.2.3", "a - b", "1 - b", "1 - *", "1 | 2", "1 || || 2", "99999999999999999999", "v1 - v2", "=v1.2", "1.2.3-rc..1",
	"1.2.3-01", ">=0.0.0-0", "*-0", "1.x-0", "~1.x", "^1.x", "^*", "~*", ">*", "<*", ">=*", "!=*", "<=1.x", ">1.x", "<1.2.x",
}

func main() {
	info, _ := debug.ReadBuildInfo()
	for _, module := range info.Deps {
		if strings.HasSuffix(module.Path, "/semver/v3") {
			fmt.Println(module.Path, module.Version)
		}
	}
	var ranges []string
	for _, operator := range operators {
		for _, operand := range operands {
			ranges = append(ranges, operator+operand)
		}
	}
	for _, text := range append(ranges, others...) {
		fmt.Printf("%s\t%s\n", text, fitting(text))
	}
}

func fitting(text string) string {
	constraint, err := semver.NewConstraint(text)
	if err != nil {
		return "none"
	}
	var fit []string
	for _, version := range versions {
		if constraint.Check(semver.MustParse(version)) {
			fit = append(fit, version)
		}
	}
	return strings.Join(fit, " ")
}
