# The only entry points. `make` alone lists them.
#
# Every target first checks that the Debian packages it needs are installed (scripts/deps): as root
# it installs them, otherwise it prints the command to do so.

TARGET := $(or $(CARGO_TARGET_DIR),target)
CARGO ?= cargo
# The optimised program, with its line tables in a separate file: weir.debug. Only the program
# itself is linked with them, so that all crates are those of `cargo build --release`.
RELEASE = $(CARGO) rustc --release --locked -p weir --bin weir -- -C strip=none && scripts/symbols-apart "$(TARGET)/release/weir"
# Duration of one fuzz target, and the additional number of seeds of a soak.
FUZZ_SECONDS ?= 600
SOAK_SEEDS ?= 20000
SOAK_CASES ?= 20000
SOAK_KILLS ?= 200
SOAK_SEQUENCES ?= 2000
SOAK_DAMAGED ?= 20000
SOAK_UPGRADES ?= 200
SOAK_DAYS ?= 200
SOAK_OPERATIONS ?= 1000000
SOAK_HISTORIES ?= 200
# Four times as many parallel tests as processors: most of them wait for a limit or a disk.
TEST_THREADS ?= $(shell echo $$((4 * $$(nproc))))
# Property tests use the same cases in each run of `make test`, so that it never fails by chance; a
# soak uses new ones each time.
test-all test-unit test-e2e: export PROPTEST_RNG_SEED ?= 1
# Further options for `make bench`, for example: make bench BENCH="--rows 'file-*' --rounds 3".
# BENCH=--strict judges: it fails if a row misses its target.
BENCH ?=
# Further options for `make test-qemu`, for example: make test-qemu MACHINES=--full
MACHINES ?=
# Programs that `make test` runs beside its own: `.ci/run` adds that of the cluster.
BESIDE ?=

.DEFAULT_GOAL := help
.PHONY: help demo build install uninstall deb test test-all test-unit test-e2e test-clients test-cluster test-qemu test-libvirt test-kernels bench bench-decisions bench-hosts fuzz miri soak doc pages reference lint lint-sources audit fmt deps clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / { printf "  make %-15s %s\n", $$1, $$2 }' Makefile

demo: ## serve a disk with a limit and a burst, and measure them (about 30 s after the build)
	@scripts/deps build demo
	$(CARGO) build --profile demo --locked -p weir --bin weir
	@bench/demo.py "$(TARGET)/demo/weir"

build: ## build the optimised program: target/release/weir, and weir.debug with its line tables
	@scripts/deps build
	$(RELEASE)

PREFIX ?= /usr/local
install: ## install the program that `make build` has built: PREFIX=/usr/local, DESTDIR to stage a package
	@scripts/install "$(TARGET)/release/weir" --prefix "$(PREFIX)" --destdir "$(DESTDIR)"

uninstall: ## remove the installation; a changed config file stays
	@scripts/install "$(DESTDIR)$(PREFIX)/bin/weir" --prefix "$(PREFIX)" --destdir "$(DESTDIR)" --uninstall

deb: ## make a Debian package: target/deb/weir_VERSION_ARCH.deb; CARGO="cargo auditable" lists the crates in the program
	@scripts/deps build packages
	$(RELEASE)
	@scripts/deb "$(TARGET)/release/weir" "$(TARGET)/deb"

# All of these name all crates. For a subset cargo would select other features of shared
# dependencies, and build twenty dependencies and the data path twice.
TESTS := $(CARGO) test --locked --workspace

# The tests, for scripts/side-by-side, the longest first. The guests and the bench use the program that
# the tests have built: `cargo build` would build another, with other features of its dependencies, for
# minutes.
UNIT := "unit=$(TESTS)"
E2E := "e2e=env RUST_TEST_THREADS=$(TEST_THREADS) $(TESTS) --test e2e"
CLUSTER := $(foreach test,$(BESIDE),"$(test) $(TARGET)/debug/weir")
WITH_PROGRAM := $(foreach test,tests/guest/block-devices tests/guest/against-weir tests/guest/virtual-machines tests/package/run,"$(test) $(TARGET)/debug/weir") \
	"bench/run.py --short --weir $(TARGET)/debug/weir"

test: ## run all tests; installs the clients they need; the last line is `N passed, N failed`
	@scripts/count-tests $(MAKE) --no-print-directory test-all

# End-to-end tests and a cluster often wait, and a guest keeps one processor busy: several of them run
# in parallel with the unit tests, so that no processor is idle.
test-all: test-clients
	$(TESTS) --lib --bins --test '*' --no-run
	scripts/side-by-side $(words two at-once $(BESIDE)) $(E2E) $(CLUSTER) $(UNIT) $(WITH_PROGRAM)

test-unit: ## unit tests, property tests and simulations
	@scripts/deps build
	$(TESTS)

test-e2e: test-clients ## tests with real clients: NBD and QMP clients, a browser, guests with their disks and cgroups, every row of the bench
	$(TESTS) --test e2e --no-run
	scripts/side-by-side $(words two at-once $(BESIDE)) $(E2E) $(CLUSTER) $(WITH_PROGRAM)

test-clients:
	@scripts/deps build clients browser containers guest packages
	@scripts/python-clients
	@scripts/prometheus
	@scripts/etcd

# Not a part of `make test`, because it downloads 50 MB of packages. `.ci/run` includes it.
test-cluster: ## images on a real Ceph cluster, which it installs and starts: data, snapshots, faults, upgrades (about four minutes after the build)
	@scripts/deps build cluster
	$(CARGO) build --locked -p weir --bin weir
	tests/cluster/run "$(TARGET)/debug/weir"

# Not a part of `make test`, because it downloads 57 MB from a release of Debian that changes daily.
test-qemu: ## virtual machines' disks with the newest QEMU and its tools; `make test` uses the installed one (about 3 minutes after the build); MACHINES=--full kills and migrates more often
	@scripts/deps build clients guest
	@scripts/current-qemu
	$(CARGO) build --locked -p weir --bin weir
	tests/guest/virtual-machines --qemu "$(TARGET)/qemu/bin/qemu-system-x86_64" $(MACHINES) "$(TARGET)/debug/weir"

# Not a part of `make test`, because it needs a libvirt that runs machines.
test-libvirt: ## a libvirt domain with weir's disks, and the virsh commands of docs/recipes.md (about 2 minutes after the build)
	@scripts/deps build clients guest libvirt
	$(CARGO) build --locked -p weir --bin weir
	tests/guest/libvirt "$(TARGET)/debug/weir"

# Not a part of `make test`, because it downloads 220 MB for one kernel and 135 MB for the second,
# which changes daily.
KERNELS ?= linux-image-amd64 linux-image-amd64/unstable
test-kernels: ## block devices in guests with Debian's own kernel (6.1 in Debian 12) and the newest one; `make test` uses 6.12; all cases (about half an hour after the build)
	@scripts/deps build guest
	$(CARGO) build --locked -p weir --bin weir
	for kernel in $(KERNELS); do tests/guest/block-devices --full --kernel $$kernel "$(TARGET)/debug/weir" || exit; done

bench: ## weir and its peers side by side, as ratios (about 80 minutes); BENCH=--strict fails if a target is missed, BENCH="--rows 'file-*'" selects rows
	@scripts/deps build clients guest
	@scripts/etcd
	$(RELEASE)
	bench/run.py $(BENCH)

bench-decisions: ## cost of one throttle decision, one recorded request and one descriptor chain, in nanoseconds; laws of latency targets compared (about 5 minutes)
	@scripts/deps build
	$(CARGO) bench --locked -p weir-policy --bench decide
	$(CARGO) bench --locked -p weir-recording --bench record
	$(CARGO) test --release --locked -p weir-virtio --lib an_indirect_chain_of_three -- --ignored --nocapture
	$(CARGO) test --release --locked -p weir-policy --test latency_target laws_compared -- --ignored --nocapture

bench-hosts: ## a cluster-wide limit under faults of hosts, of etcd and, as root, of the network: how fast quotas follow, and that the limit holds (about 5 minutes)
	@scripts/deps build clients
	@scripts/etcd
	$(RELEASE)
	bench/hosts.py "$(TARGET)/release/weir"

fuzz: ## fuzz every parser of untrusted bytes for FUZZ_SECONDS (600) each
	@scripts/deps build
	@scripts/fuzz $(FUZZ_SECONDS)

# Miri's model of weak memory does not support an atomic inside another of a different size, as
# rings have them; loom and the simulation cover that part.
miri: ## virtqueues and guest memory under Miri, a few cases each (nightly with the component miri; about 10 minutes)
	@scripts/deps build
	PROPTEST_CASES=3 WEIR_SEEDS=3 MIRIFLAGS="-Zmiri-disable-isolation -Zmiri-disable-weak-memory-emulation" $(CARGO) +nightly miri test --locked --target-dir "$(TARGET)/miri" -p weir-virtio --lib -- ring::
	PROPTEST_CASES=3 WEIR_SEEDS=3 MIRIFLAGS="-Zmiri-disable-isolation -Zmiri-disable-weak-memory-emulation" $(CARGO) +nightly miri test --locked --target-dir "$(TARGET)/miri" -p weir-reactor --lib -- buffer:: guest::dirty

soak: ## long-running tests: property tests and simulations with many more cases and seeds; coverage of the confidence intervals of advice; random operations on files over FUSE; block jobs beside qemu-storage-daemon; qcow2 in all combinations, with kills, and in random histories with qemu-img; 20,000 damaged images; upgrades; metrics scraped for ten minutes; cgroups; kills and migrations of virtual machines
	@scripts/deps build clients guest libvirt systemd
	WEIR_SEEDS=$(SOAK_SEEDS) PROPTEST_CASES=$(SOAK_CASES) $(CARGO) test --release --locked -p weir-policy -p weir-reactor -p weir-nbd -p weir-storage -p weir-image -p weir-block -p weir-jobs -p weir-virtio -p weir-export
	WEIR_SEEDS=$(SOAK_DAYS) $(CARGO) test --release --locked -p weir-lab --lib advise::tests::coverage -- --nocapture
	WEIR_CONFORMANCE=all WEIR_KILLS=$(SOAK_KILLS) $(CARGO) test --release --locked -p weir --test e2e qcow2_c
	WEIR_SEQUENCES=$(SOAK_SEQUENCES) $(CARGO) test --release --locked -p weir --test e2e image_soak
	WEIR_FSX_OPERATIONS=$(SOAK_OPERATIONS) $(CARGO) test --release --locked -p weir --test e2e fsx::
	WEIR_HISTORIES=$(SOAK_HISTORIES) $(CARGO) test --release --locked -p weir --test e2e job_histories::
	WEIR_DAMAGED=$(SOAK_DAMAGED) $(CARGO) test --release --locked -p weir --test e2e qcow2_damage -- --nocapture
	@scripts/prometheus
	WEIR_SCRAPE_SECONDS=600 $(CARGO) test --release --locked -p weir --test e2e metrics::prometheus
	WEIR_WRONG_TOKENS=10000 $(CARGO) test --release --locked -p weir --test e2e http::hostile::wrong_tokens
	@scripts/python-clients
	WEIR_SCHEMATHESIS_SECONDS=600 $(CARGO) test --release --locked -p weir --test e2e openapi::
	WEIR_UPGRADES=$(SOAK_UPGRADES) $(CARGO) test --release --locked -p weir --test e2e upgrade:: -- --nocapture
	WEIR_PAUSES=1,10,60 $(CARGO) test --release --locked -p weir --test e2e recipes::pauses
	$(RELEASE)
	tests/guest/against-weir --full "$(TARGET)/release/weir"
	tests/guest/against-weir --systemd "$(TARGET)/release/weir"
	tests/guest/block-devices --systemd "$(TARGET)/release/weir"
	tests/guest/virtual-machines --full "$(TARGET)/release/weir"
	tests/guest/libvirt "$(TARGET)/release/weir"
	tests/guest/block-devices --full "$(TARGET)/release/weir"
	@scripts/deps cluster
	tests/cluster/run --full "$(TARGET)/release/weir"

doc: pages ## build the documentation of the crates, including private items, and a page for each command: target/doc/share
	RUSTDOCFLAGS="-D warnings -A rustdoc::private_intra_doc_links" $(CARGO) doc --locked --workspace --no-deps --document-private-items

pages:
	@scripts/deps build
	$(TESTS) --test e2e --no-run
	"$(TARGET)/debug/weir" generate "$(TARGET)/doc/share" --date "$$(date -u +%F)"

reference: ## regenerate the tables of keys and the schema of the config file in docs/reference
	@scripts/deps build
	$(CARGO) run --locked -p weir -- generate --reference docs/reference

lint: lint-sources ## checks of CI: formatting, warnings, scripts that do not parse, prose, commit subjects
	$(CARGO) clippy --locked --workspace --all-targets -- -D warnings
	$(CARGO) clippy --locked --workspace --test e2e -- -D warnings

lint-sources:
	@scripts/deps build
	$(CARGO) fmt --all --check
	@scripts/lint-scripts
	@scripts/lint-prose
	@scripts/lint-commits
	@scripts/check-imports
	@scripts/check-blocking

audit: ## check dependencies for known vulnerabilities, licences and sources by cargo-deny (needs the advisory database)
	@scripts/deps build
	@scripts/audit

fmt: ## format the sources
	$(CARGO) fmt --all

deps: ## install, or list, all Debian packages that any target needs
	@scripts/deps build clients browser containers guest packages

clean: ## remove build output and measurements, including the guest's kernel
	$(CARGO) clean
	rm -rf bench/results
