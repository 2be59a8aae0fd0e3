# make run          everything needed, then the main job: trace the bundled demo
# make test         everything needed, then the tests that every change must pass: 10 minutes on two processors
# make test-long    all tests, with many drawn examples and repetitions: more than half an hour, on a quiet machine
# make vm-test      the tracer on other kernels and the other architecture, in guests that QEMU emulates
# make recorders    moescope-recorder for x86-64 and arm64, for machines without Python
# make fuzz         damaged input for every verb that reads; CASES=10000 of each kind
# make mutations    whether the tests find small faults that are planted in the product; JOBS=2 at the same time
# make lint         what the code must pass before that
# make size         the lines of each package beside its budget
# make reference    docs/reference: every verb and table, from the code
# make wheel        a source archive and the wheels for x86-64 and arm64, in dist/
# make constraints  the newest releases of what is used, tried by nobody yet, into constraints.txt
SHELL := /bin/bash
PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
SUDO := $(shell [ "$$(id -u)" = 0 ] || echo sudo)
MACHINE := $(shell uname -m)
DEBIAN_ARCH := $(if $(filter aarch64,$(MACHINE)),arm64,amd64)
RUN ?= recordings/$(shell date +%Y%m%d-%H%M%S)
APT_RUN := clang cmake ninja-build libbpf-dev gcc libc6-dev make python3-dev python3-venv python3-bpfcc linux-headers-$(DEBIAN_ARCH)
APT := $(APT_RUN) chromium chromium-driver bpftrace adb toybox mksh # of the tests; none of them starts a service
CROSS := $(if $(filter x86_64,$(MACHINE)),gcc-aarch64-linux-gnu libc6-dev-arm64-cross qemu-user)
APT_LONG := libopenblas-dev mesa-vulkan-drivers npm
APT_VM := qemu-system-x86 qemu-system-arm cpio e2fsprogs zstd $(CROSS)
CONFIGURE = cmake -S . -B build/cmake -G Ninja -DPython_EXECUTABLE=$(CURDIR)/$(PY) -DRECORDER_LIBRARIES=$(CURDIR)/build/static \
	> build/cmake.log || { cat build/cmake.log; exit 1; }
WORKERS ?= 4
GUESTS = $(if $(ARCH),--arch $(ARCH)) $(if $(KERNEL),--kernel $(KERNEL))
PIP := $(VENV)/bin/pip --quiet --disable-pip-version-check

.PHONY: run test test-long size recorders vm-test vm-guests fuzz mutations lint lint-types lint-style lint-structure reference results setup build headers doctor wheel constraints clean

run: build/.pip-run build headers
	@echo "== tracing the bundled demo"
	$(SUDO) $(PY) -m tracer run -o $(RUN)

# arm64 code is compiled and run emulated, too. Four workers keep two processors busy, as tests wait for a third of their time.
test: setup $(if $(shell command -v apt-get),recorders)
	@echo "== tests (those that probe the kernel run as root)"
	$(SUDO) $(PY) -m pytest -n $(WORKERS) --dist loadfile -m "not long" $(PYTEST_ARGS)

test-long: setup build/.apt-long $(if $(shell command -v apt-get),recorders)
	$(SUDO) MOESCOPE_TESTS=long $(PY) -m pytest -n 2 --dist loadfile $(PYTEST_ARGS)

# The guests of tests/vm/guests.toml, one after the other; ARCH=arm64, KERNEL=6.1 choose some, QUICK=1 the short rungs of a few,
# JSON=FILE writes what the rungs said. Then those without Python, where moescope-recorder records (tests/vm/bare.py), at last over ssh.
vm-test: setup recorders vm-guests
	$(PY) -m tests.vm.guest $(GUESTS) $(if $(QUICK),--quick) $(if $(JSON),--json $(JSON))
	$(if $(QUICK),,$(PY) -m tests.vm.bare $(GUESTS))
	$(if $(QUICK),,$(PY) -m tests.vm.over_ssh $(GUESTS))

# What the guests boot from: downloaded and unpacked, while pip installs what the tests need.
vm-guests: build/.apt-vm | $(PY)
	$(PY) -m tests.vm.guest $(GUESTS) $(if $(QUICK),--quick) --prepare

fuzz: setup
	nice $(PY) -m benchmarks.fuzz --cases $(or $(CASES),1000) --keep build/fuzz

mutations: setup recorders
	$(SUDO) $(PY) -m benchmarks.mutations --jobs $(or $(JOBS),1) --json

lint: lint-types lint-style lint-structure

lint-types: setup
	$(VENV)/bin/mypy

lint-style: setup
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(PY) -m scripts.size
	$(VENV)/bin/check-jsonschema --builtin-schema vendor.github-workflows .github/workflows/*.yml
	$(VENV)/bin/check-jsonschema --builtin-schema vendor.github-actions action.yml

lint-structure: setup
	$(VENV)/bin/lint-imports
	$(PY) -m scripts.c_circles tracer/recorder
	$(PY) -m workloads.bpf_objects

size:
	@$(PY) -m scripts.size

# docs/reference from the parsers' help and the tables' schema.
reference: build/.pip build
	$(PY) -m scripts.render_reference

# docs/results.md and docs/results/ from what benchmarks kept in benchmarks/results.
results: setup
	$(PY) -m benchmarks.render

setup: build/.apt build/.pip build headers

# Incremental; the built parts go into the packages that load them.
build: build/cmake/build.ninja
	@cmake --build build/cmake
	@cmake --install build/cmake --prefix . > build/install.log

# The recorder is a static program: its libraries are fetched, without anything being installed; elsewhere the system's are linked.
build/cmake/build.ninja: | build/.apt-run $(PY) $(if $(shell command -v apt-get),build/static/$(DEBIAN_ARCH))
	@$(CONFIGURE)
	@touch $@

# The recorder for both architectures.
recorders: build/.apt build/.apt-cross build/static/amd64 build/static/arm64 build | $(PY)
	@$(CONFIGURE)
	@$(MAKE) --no-print-directory build
	@ls -l tracer/recorder/bin

build/static/%: scripts/static_libraries.sh
	@echo "== fetching static libraries for $*"
	@scripts/static_libraries.sh $* $@
	@touch $@

doctor: build/.pip-run build
	$(SUDO) $(PY) -m tracer doctor

# Debian packages: only what is missing, and only where there is apt.
build/.apt-run: PACKAGES = $(APT_RUN)
build/.apt: PACKAGES = $(APT)
build/.apt-cross: PACKAGES = $(CROSS)
build/.apt-vm: PACKAGES = $(APT_VM)
build/.apt-long: PACKAGES = $(APT_LONG)
build/.apt: | build/.apt-run
build/.apt-cross: | build/.apt
build/.apt-vm: | build/.apt-cross
build/.apt-long: | build/.apt-vm
build/.apt-run build/.apt build/.apt-cross build/.apt-vm build/.apt-long: Makefile
	@mkdir -p build
	@missing=$$(for p in $(PACKAGES); do dpkg-query -W -f '$${db:Status-Status}' $$p 2>/dev/null | grep -q '^installed' || echo $$p; done); \
	if [ -n "$$missing" ] && command -v apt-get > /dev/null; then \
		echo "== installing Debian packages:" $$missing; \
		$(SUDO) apt-get update -qq && $(SUDO) env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $$missing > build/apt.log 2>&1 \
			|| { tail -n 5 build/apt.log; echo "apt-get failed; see build/apt.log"; exit 1; }; \
	fi
	@touch $@

$(PY): | build/.apt-run
	@echo "== creating $(VENV)"
	@$(PYTHON) -m venv $(VENV)

build/.pip: pyproject.toml constraints.txt build/.apt | $(PY)
	@echo "== installing Python packages (torch, for the parity tests, is the largest)"
	@$(PIP) install -c constraints.txt -e '.[all,dev]'
	@touch $@

# What recording and looking need; the tests' packages, torch the largest, are left to `setup`.
build/.pip-run: pyproject.toml constraints.txt | $(PY)
	@echo "== installing Python packages"
	@[ -e build/.pip ] || $(PIP) install -c constraints.txt -e '.[all]'
	@touch $@

headers: build/.headers-$(shell uname -r)

build/.headers-%: | build/.apt-run
	@$(SUDO) scripts/link_kernel_headers.sh
	@touch $@

# The wheels are built from the source archive.
wheel: build/.pip build/.apt-cross build/static/amd64 build/static/arm64
	rm -rf dist build/dist
	$(PY) -m build --sdist --outdir dist .
	RECORDER_LIBRARIES=$(CURDIR)/build/static $(PIP) wheel --no-deps -w build/dist dist/*.tar.gz
	$(if $(CROSS),RECORDER_LIBRARIES=$(CURDIR)/build/static _PYTHON_HOST_PLATFORM=linux-aarch64 $(PIP) wheel --no-deps -w build/dist -Ccmake.toolchain-file=$(CURDIR)/cmake/aarch64-linux-gnu.cmake dist/*.tar.gz)
	PATH=$(CURDIR)/$(VENV)/bin:$$PATH scripts/check_wheels.py build/dist dist

constraints: build/.pip
	$(PY) scripts/raise_constraints.py constraints.txt

clean:
	rm -rf build dist tracer/kernel/objects tracer/recorder/bin analyzer/stacks/bin
	find moescope tracer analyzer views runtime -name '*.so' -delete
