# The only entry points. `make` alone lists them.
#
# Every target first makes sure that the Debian packages it needs are there (scripts/deps): as root
# they are installed, otherwise the command to do so is printed.

TARGET := $(or $(CARGO_TARGET_DIR),target)
CARGO ?= cargo
# The optimised program, and its line tables beside it: weir.debug. Only the program itself is
# linked with them, so that all else is what `cargo build --release` makes too.
RELEASE = $(CARGO) rustc --release --locked -p weir --bin weir -- -C strip=none && scripts/symbols-apart "$(TARGET)/release/weir"
# Length of one fuzz target, and how much more than `make test` a soak tries.
FUZZ_SECONDS ?= 600
SOAK_SEEDS ?= 20000
SOAK_CASES ?= 20000
SOAK_KILLS ?= 200
SOAK_SEQUENCES ?= 2000
SOAK_DAMAGED ?= 20000
SOAK_TAKEOVERS ?= 200
SOAK_DAYS ?= 200
SOAK_OPERATIONS ?= 1000000
# Four times as many tests at a time as there are processors: most of them wait for a limit or a disk.
TEST_THREADS ?= $(shell echo $$((4 * $$(nproc))))
# Properties try the same cases in each run of `make test`, so that it never fails by chance; a soak
# tries others each time.
test-unit test-e2e: export PROPTEST_RNG_SEED ?= 1
# Further options for `make bench`, for example: make bench BENCH="--rows 'file-*' --rounds 3".
# BENCH=--strict judges: it fails where a row misses its target.
BENCH ?=
# And for `make test-qemu`, for example: make test-qemu MACHINES=--full
MACHINES ?=
# Programs that `make test-e2e` runs beside its guests: `.ci/run` names that of the cluster.
BESIDE ?=

.DEFAULT_GOAL := help
.PHONY: help demo build install uninstall deb test test-unit test-e2e test-cluster test-qemu test-libvirt test-kernels bench bench-decisions bench-hosts fuzz miri soak doc reference lint audit fmt deps clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / { printf "  make %-15s %s\n", $$1, $$2 }' Makefile

demo: ## serve a disk under a limit with a burst and watch it hold (about 30 s after the build)
	@scripts/deps build demo
	$(CARGO) build --profile demo --locked -p weir --bin weir
	@bench/demo.py "$(TARGET)/demo/weir"

build: ## build the program, optimised: target/release/weir, and weir.debug with its line tables
	@scripts/deps build
	$(RELEASE)

PREFIX ?= /usr/local
install: ## install what `make build` has made: PREFIX=/usr/local, DESTDIR for a tree to be packed
	@scripts/install "$(TARGET)/release/weir" --prefix "$(PREFIX)" --destdir "$(DESTDIR)"

uninstall: ## remove it again; a config file that was changed stays
	@scripts/install "$(DESTDIR)$(PREFIX)/bin/weir" --prefix "$(PREFIX)" --destdir "$(DESTDIR)" --uninstall

deb: ## make a Debian package: target/deb/weir_VERSION_ARCH.deb; CARGO="cargo auditable" lists the crates in the program
	@scripts/deps build packages
	$(RELEASE)
	@scripts/deb "$(TARGET)/release/weir" "$(TARGET)/deb"

# Each of these names all crates. For some of them alone cargo would choose other features of what
# they share, and build twenty dependencies and the data path twice.
TESTS := $(CARGO) test --locked --workspace

test: ## run every test; installs the clients it needs; the last line is `N passed, N failed`
	@scripts/count-tests $(MAKE) --no-print-directory test-unit test-e2e

test-unit: ## tests in virtual time, and those of one crate: units, properties, simulation
	@scripts/deps build
	$(TESTS)

# The guests and the bench take the program that the tests have made and run: `cargo build` would
# make another, with other features of its dependencies, for minutes. A guest keeps one processor
# busy and waits often: three scripts run at a time, the longest first, and beside them what `BESIDE`
# names, from the beginning.
test-e2e: ## tests with real clients: the program's own, a browser, a guest's kernel, its disks and its cgroups, every row of the bench
	@scripts/deps build clients browser containers guest packages
	@scripts/python-clients
	@scripts/prometheus
	@scripts/etcd
	RUST_TEST_THREADS=$(TEST_THREADS) $(TESTS) --test e2e
	scripts/side-by-side $(words three at once $(BESIDE)) $(foreach test,$(BESIDE),"$(test) $(TARGET)/debug/weir") \
		"bench/run.py --short --weir $(TARGET)/debug/weir" \
		$(foreach test,tests/guest/block-devices tests/guest/against-weir tests/guest/virtual-machines tests/package/run,"$(test) $(TARGET)/debug/weir")

# Not a part of `make test`: it takes 50 MB of packages. `.ci/run` has it.
test-cluster: ## images of a real Ceph cluster, which it installs and starts: bytes, snapshots, faults, takeovers (about four minutes after the build)
	@scripts/deps build cluster
	$(CARGO) build --locked -p weir --bin weir
	tests/cluster/run "$(TARGET)/debug/weir"

# Not a part of `make test` either: it takes 57 MB from a release of Debian that changes daily.
test-qemu: ## virtual machines' disks with the newest QEMU, beside the installed one that `make test` takes, and with its tools (about 3 minutes after the build); MACHINES=--full kills and moves more often
	@scripts/deps build clients guest
	@scripts/current-qemu
	$(CARGO) build --locked -p weir --bin weir
	tests/guest/virtual-machines --qemu "$(TARGET)/qemu/bin/qemu-system-x86_64" $(MACHINES) "$(TARGET)/debug/weir"

# Nor this: it needs a libvirt that runs machines.
test-libvirt: ## a machine of libvirt's with weir's disks, and all that docs/recipes.md has virsh do (about 2 minutes after the build)
	@scripts/deps build clients guest libvirt
	$(CARGO) build --locked -p weir --bin weir
	tests/guest/libvirt "$(TARGET)/debug/weir"

# Nor is this: it takes 220 MB for the one kernel and 135 MB for the other, which changes daily.
KERNELS ?= linux-image-amd64 linux-image-amd64/unstable
test-kernels: ## block devices in guests with this Debian's own kernel, which is 6.1 in Debian 12, and with the newest, beside the 6.12 of `make test`, and all that its short form leaves out (about half an hour after the build)
	@scripts/deps build guest
	$(CARGO) build --locked -p weir --bin weir
	for kernel in $(KERNELS); do tests/guest/block-devices --full --kernel $$kernel "$(TARGET)/debug/weir" || exit; done

bench: ## weir and its peers side by side, as ratios (about 50 minutes); BENCH=--strict judges, BENCH="--rows 'file-*'" is a part
	@scripts/deps build clients
	@scripts/etcd
	$(RELEASE)
	bench/run.py $(BENCH)

bench-decisions: ## what one decision of the throttling, one request of a recording and one chain of a virtual machine's ring cost, in nanoseconds (about 5 minutes)
	@scripts/deps build
	$(CARGO) bench --locked -p weir-policy --bench decide
	$(CARGO) bench --locked -p weir-recording --bench record
	$(CARGO) test --release --locked -p weir-virtio --lib an_indirect_chain_of_three -- --ignored --nocapture

bench-hosts: ## one limit over three hosts and three members of etcd, which are killed, stopped and put to sleep: how fast shares follow, and that the limit holds (about 3 minutes)
	@scripts/deps build clients
	@scripts/etcd
	$(RELEASE)
	bench/hosts.py "$(TARGET)/release/weir"

fuzz: ## fuzz every parser of untrusted bytes, FUZZ_SECONDS (600) each
	@scripts/deps build
	@scripts/fuzz $(FUZZ_SECONDS)

# Its model of weak memory knows no atomic of one size inside one of another, as rings have them;
# loom and the simulation have that part.
miri: ## rings and memory of guests under Miri, a few cases each (nightly with its component miri; about 10 minutes)
	@scripts/deps build
	PROPTEST_CASES=3 WEIR_SEEDS=3 MIRIFLAGS="-Zmiri-disable-isolation -Zmiri-disable-weak-memory-emulation" $(CARGO) +nightly miri test --locked --target-dir "$(TARGET)/miri" -p weir-virtio --lib -- ring::
	PROPTEST_CASES=3 WEIR_SEEDS=3 MIRIFLAGS="-Zmiri-disable-isolation -Zmiri-disable-weak-memory-emulation" $(CARGO) +nightly miri test --locked --target-dir "$(TARGET)/miri" -p weir-reactor --lib -- buffer:: guest::dirty

soak: ## the properties and the simulation with many more cases and seeds; how often advice is as sure as it says; random operations on files over FUSE; qcow2 in every combination, killed, and in random histories with qemu-img; 20,000 damaged images repaired; taken over; figures scraped for ten minutes; cgroups for longer; machines killed and moved
	@scripts/deps build clients guest libvirt systemd
	WEIR_SEEDS=$(SOAK_SEEDS) PROPTEST_CASES=$(SOAK_CASES) $(CARGO) test --release --locked -p weir-policy -p weir-reactor -p weir-nbd -p weir-storage -p weir-image -p weir-block -p weir-virtio -p weir-export
	WEIR_SEEDS=$(SOAK_DAYS) $(CARGO) test --release --locked -p weir-lab --lib advise::tests::coverage -- --nocapture
	WEIR_CONFORMANCE=all WEIR_KILLS=$(SOAK_KILLS) $(CARGO) test --release --locked -p weir --test e2e qcow2_c
	WEIR_SEQUENCES=$(SOAK_SEQUENCES) $(CARGO) test --release --locked -p weir --test e2e image_soak
	WEIR_FSX_OPERATIONS=$(SOAK_OPERATIONS) $(CARGO) test --release --locked -p weir --test e2e fsx::
	WEIR_DAMAGED=$(SOAK_DAMAGED) $(CARGO) test --release --locked -p weir --test e2e qcow2_damage -- --nocapture
	@scripts/prometheus
	WEIR_SCRAPE_SECONDS=600 $(CARGO) test --release --locked -p weir --test e2e metrics::prometheus
	WEIR_WRONG_TOKENS=10000 $(CARGO) test --release --locked -p weir --test e2e http::wrong_tokens
	@scripts/python-clients
	WEIR_SCHEMATHESIS_SECONDS=600 $(CARGO) test --release --locked -p weir --test e2e openapi::
	WEIR_TAKEOVERS=$(SOAK_TAKEOVERS) $(CARGO) test --release --locked -p weir --test e2e takeover:: -- --nocapture
	WEIR_PAUSES=1,10,60 $(CARGO) test --release --locked -p weir --test e2e recipes::a_pause
	$(RELEASE)
	tests/guest/against-weir --full "$(TARGET)/release/weir"
	tests/guest/against-weir --systemd "$(TARGET)/release/weir"
	tests/guest/block-devices --systemd "$(TARGET)/release/weir"
	tests/guest/virtual-machines --full "$(TARGET)/release/weir"
	tests/guest/libvirt "$(TARGET)/release/weir"
	tests/guest/block-devices --full "$(TARGET)/release/weir"
	@scripts/deps cluster
	tests/cluster/run --full "$(TARGET)/release/weir"

doc: ## build the documentation of the crates, private items included, and a page for each command: target/doc/share
	@scripts/deps build
	RUSTDOCFLAGS="-D warnings -A rustdoc::private_intra_doc_links" $(CARGO) doc --locked --workspace --no-deps --document-private-items
	$(TESTS) --test e2e --no-run
	"$(TARGET)/debug/weir" generate "$(TARGET)/doc/share" --date "$$(date -u +%F)"

reference: ## renew the tables of keys and the schema of the config file in docs/reference
	@scripts/deps build
	$(CARGO) run --locked -p weir -- generate --reference docs/reference

lint: ## what CI refuses: formatting, warnings, scripts that do not parse, prose over 100 columns
	@scripts/deps build
	$(CARGO) fmt --all --check
	$(CARGO) clippy --locked --workspace --all-targets --test e2e -- -D warnings
	@scripts/lint-scripts
	@scripts/lint-prose
	@scripts/check-imports
	@scripts/check-blocking

audit: ## known vulnerabilities of the dependencies, their licences and sources, by cargo-deny (needs the advisories' host)
	@scripts/deps build
	@scripts/audit

fmt: ## format the sources
	$(CARGO) fmt --all

deps: ## install, or name, every Debian package that some target needs
	@scripts/deps build clients browser containers guest packages

clean: ## remove what was built and measured, the guest's kernel included
	$(CARGO) clean
	rm -rf bench/results
