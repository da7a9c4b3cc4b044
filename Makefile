# Targets for users and developers. `make` alone prints this list.

SHELL := bash
.SHELLFLAGS := -eu -o pipefail -c
MAKEFLAGS += --no-builtin-rules
.DEFAULT_GOAL := help

# Additional arguments, as in: make demo DEMO_ARGS=--exit
DEMO_ARGS ?=
# Clusters on this machine, such as kind's, are at 127.0.0.1. If empty, the hub's defaults apply.
LOCAL_ARGS ?= --insecure-kubeconfig-loopback
BENCH_ARGS ?=
SOAK_ARGS ?=
# A run takes about a second on one core.
SIM_ARGS ?= --seeds 100
# Length of make nightly.
MINUTES ?= 480
ARGS ?=
# Additional arguments for cargo, such as --locked.
CARGO_FLAGS ?=
# A test uses one to three control planes of half a GB each. Eight tests at a time keep two cores busy and fit 13 GB.
TEST_THREADS ?= 8
FUZZ_SECONDS ?= 60
FUZZ_JOBS ?= $(shell nproc)
PID_FILE ?= /tmp/krypton-operator.pid
LOG_FILE ?= /tmp/krypton-operator.log

target := $(or $(CARGO_TARGET_DIR),target)
# Always the whole workspace. Building a part selects other features and compiles the same crates again.
binaries = cargo build $(CARGO_FLAGS) --workspace --bins
# `make test LINT=1` lints what it compiles in the same pass: clippy's driver is the compiler with more lints.
lint = $(if $(LINT),RUSTC_WORKSPACE_WRAPPER=clippy-driver CLIPPY_ARGS=-D__CLIPPY_HACKERY__warnings__CLIPPY_HACKERY__)
# The simulation replaces clocks and API servers of debug programs. Release programs lack this feature. All debug builds use
# the same features, so cargo compiles nothing twice.
debug = --features simulation
simulation = cargo build $(CARGO_FLAGS) --workspace --bin sim $(debug)
demo = cargo build $(CARGO_FLAGS) --workspace --bin demo --bin krypton-hub --bin krypton-agent --bin kubectl-krypton $(debug)
# Each test runs in its own process. Without self-update, nextest compiles faster.
nextest_path = hack/tools/cargo-tool.sh cargo-nextest 0.9.151 --no-default-features --features default-no-update
nextest = "$$($(nextest_path))" nextest run $(CARGO_FLAGS) --test-threads $(TEST_THREADS)
# Go and cargo run at the same time, as each leaves a core idle at times: $(call beside_tools,INSTALLATION OF TOOLS,COMMANDS)
beside_tools = { $(1); } >/dev/null & tools=$$!; trap "kill $$tools 2>/dev/null || :" EXIT; $(2); wait $$tools; trap - EXIT
# Prefer the pinned Helm if it is built.
with_tools = PATH="$$(hack/tools/tools.sh dir)/bin:$$PATH"

.PHONY: help build man demo test test-programs placed members fuzz check format fmt tidy tools images e2e-kind bench shipped soak sim nightly release-dry-run deny run run-pid stop clean rust

help: ## Print this list
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / { printf "  make %-15s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

build: rust ## Build the programs for this machine, unoptimized
	$(binaries) $(debug)

man: build ## Write the man pages of all programs into target/man
	$(target)/debug/mangen $(target)/man

demo: rust ## Three local clusters, a real chart, install, upgrade, deletion, a lost agent; stop with Ctrl-C (DEMO_ARGS=--exit: exit after the last step)
	$(call beside_tools,exec hack/tools/tools.sh build etcd kube-apiserver kube-controller-manager kube-scheduler kubectl helm kwok,$(demo))
	$(target)/debug/demo $(DEMO_ARGS)

# One build of everything keeps both cores busy. `cargo test` alone would build no examples, which tests run as programs.
test-programs: rust
	$(call beside_tools,$(nextest_path) && exec hack/tools/tools.sh,$(lint) cargo build $(CARGO_FLAGS) --workspace --all-targets $(debug))
	hack/deps-cache.sh save

test: test-programs ## Unit, property and end-to-end tests against real control planes (TEST_THREADS=8)
	passed=0; $(lint) $(target)/debug/planes $(nextest) --workspace $(debug) || passed=$$?; \
	  hack/slowest.sh $(target)/nextest/default/junit.xml; exit $$passed

placed: rust tools ## 2,000 Tenants placed on 20 members, through a restart of the hub; needs 24 GiB
	$(binaries) $(debug) --examples
	$(nextest) --profile long --run-ignored only --workspace $(debug) --success-output immediate restarted_hub_rewrites_no_placed_tenants

members: rust tools ## 1,000 members from kubeconfig Secrets; `make test` has 100
	$(binaries) $(debug) --examples
	KRYPTON_MEMBERS=all $(nextest) --profile long --workspace $(debug) --success-output immediate many_secrets_are_as_many_members

# `make test` replays the seeds too.
fuzz: rust ## Run each fuzz target (FUZZ_SECONDS=60, 0: compile only; FUZZ_TARGET=index: only this target)
	FUZZ_SECONDS=$(FUZZ_SECONDS) FUZZ_JOBS=$(FUZZ_JOBS) hack/deps-cache.sh in fuzz hack/fuzz.sh

check: rust format ## Check formatting and lints; any warning is an error
	cargo clippy $(CARGO_FLAGS) --workspace --all-features --all-targets -- -D warnings

format: rust
	cargo fmt --all --check
	for script in .ci/run $$(find hack -name '*.sh'); do bash -n "$$script"; done

fmt: rust ## Format the code
	cargo fmt --all

tidy: fmt

tools: ## Build the local Kubernetes into a cache outside the checkout (once, about 10 minutes)
	@hack/tools/tools.sh >/dev/null

images: ## Build the images of hub and agent with docker (IMAGES_FROM=containers: programs too; REGISTRY, TAG)
	hack/images/images.sh

e2e-kind: ## Test hub, agent and a real chart on two kind clusters (E2E_HOME, E2E_EDGE, SKIP_CLEANUP=1)
	hack/e2e-kind.sh

# Uses the programs of the images. Only the benchmark and its simulated agents have a profile that links faster.
bench: shipped tools ## Measure against plain Helm, and one hub with 1,000 agents (BENCH_ARGS='edge --tenants 30', 'rest', 'drift', 'fan-out', 'flood', 'reports', 'home', 'cut')
	$(binaries) --profile fast
	KRYPTON_HUB_BIN=$(abspath $(target)/shipped/krypton-hub) KRYPTON_AGENT_BIN=$(abspath $(target)/shipped/krypton-agent) \
	  $(target)/fast/bench $(BENCH_ARGS)

shipped: rust ## Build the release programs: optimized, static, without test features
	hack/deps-cache.sh in shipped hack/images/files.sh krypton $(target)/shipped

# Not part of `make test`: it takes 30 minutes and would disturb other tests.
soak: rust tools ## Inject random faults into two hubs and two edge clusters for 30 minutes, and verify the result (SOAK_ARGS='--seed 2 --minutes 5 --tenants 20')
	$(binaries) $(debug)
	$(target)/debug/soak $(SOAK_ARGS)

# `make test` runs the first seeds, too.
sim: rust ## Simulate fleets under faults (SIM_ARGS='--seeds 1000', '--seed 42 --trace --log info')
	$(simulation)
	$(target)/debug/sim $(SIM_ARGS)

nightly: rust ## Simulate a strike at each write and each kind of read, then new seeds for hours (MINUTES=480)
	$(simulation)
	for plan in simulation/fleet/walks/*; do $(target)/debug/sim --walk --plan "$$plan"; done
	$(target)/debug/sim --seed $$(date +%s)000000 --minutes $(MINUTES) --coverage

release-dry-run: rust ## Build all files of a release into target/release-dry-run (RELEASE_TARGETS: Rust's targets for more systems)
	hack/release.sh

deny: rust ## Check licenses, sources and banned crates
	"$$(hack/tools/cargo-tool.sh cargo-deny 0.20.2)" --workspace check bans licenses sources
	@echo "deny: no advisories were looked at: their database is on GitHub; with a way to it, run 'cargo deny check advisories'"

run: rust ## Run the hub in the foreground (ARGS='--namespace krypton ...')
	$(binaries) $(debug)
	$(with_tools) exec $(target)/debug/krypton-hub $(LOCAL_ARGS) $(ARGS)

run-pid: rust ## Run the hub in the background (PID_FILE, LOG_FILE, ARGS)
	@if pid=$$(cat '$(PID_FILE)' 2>/dev/null) && [[ $$(ps -p "$$pid" -o comm=) == *krypton-hub ]]; then \
	  echo "make run-pid: process $$pid of $(PID_FILE) runs already; 'make stop' ends it" >&2; exit 1; fi
	$(binaries) $(debug)
	@export $(with_tools); nohup $(target)/debug/krypton-hub $(LOCAL_ARGS) $(ARGS) >'$(LOG_FILE)' 2>&1 </dev/null & \
	pid=$$!; echo "$$pid" >'$(PID_FILE)'; sleep 1; \
	if ! kill -0 "$$pid" 2>/dev/null; then \
	  rm -f '$(PID_FILE)'; echo "make run-pid: the hub has ended; $(LOG_FILE) ends:" >&2; tail -n 20 '$(LOG_FILE)' >&2; exit 1; fi; \
	echo "hub runs as process $$pid (log in $(LOG_FILE)); 'make stop' ends it"

# Sends SIGTERM, and SIGKILL five seconds later. The next start repairs unfinished Helm runs. If the process ID belongs to
# another program, nothing happens.
stop: ## Stop the hub of run-pid
	@pid=$$(cat '$(PID_FILE)' 2>/dev/null) || { echo "nothing to stop: there is no $(PID_FILE)"; exit 0; }; \
	ours() { [[ $$(ps -p "$$pid" -o comm= 2>/dev/null) == *krypton-hub ]]; }; \
	if ours; then kill -TERM "$$pid"; fi; \
	end=$$((SECONDS + 5)); while ((SECONDS < end)) && ours; do sleep 0.2; done; \
	if ours; then echo "process $$pid did not end in 5 s: killed"; kill -KILL "$$pid"; fi; \
	rm -f '$(PID_FILE)'; echo "stopped"

clean: ## Remove build results and the files of a demo (not the tools)
	cargo clean
	rm -rf .demo

rust:
	@command -v cargo >/dev/null || { echo "no cargo found: install Rust with rustup (https://rustup.rs); it fetches the version of rust-toolchain.toml by itself" >&2; exit 1; }
	@command -v cc >/dev/null || { echo "no C compiler found (cc), which the TLS library needs: install gcc or clang" >&2; exit 1; }
	@hack/deps-cache.sh restore
