# make run      everything needed, then the main job: trace the bundled demo
# make test     everything needed, then all tests
SHELL := /bin/bash
PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
SUDO := $(shell [ "$$(id -u)" = 0 ] || echo sudo)
CC ?= cc
CLANG ?= clang
MACHINE := $(shell uname -m)
TARGET_ARCH := $(if $(filter aarch64,$(MACHINE)),arm64,x86)
DEBIAN_ARCH := $(if $(filter aarch64,$(MACHINE)),arm64,amd64)
RUN ?= recordings/$(shell date +%Y%m%d-%H%M%S)
APT := clang libbpf-dev libbpf1 libelf1 gcc libc6-dev make python3-dev python3-venv python3-bpfcc linux-headers-$(DEBIAN_ARCH) chromium chromium-driver bpftrace

.PHONY: run test lint results setup build bpf native headers doctor clean

run: setup
	@echo "== tracing the bundled demo"
	$(SUDO) $(PY) -m tracer run -o $(RUN)

test: setup
	@echo "== tests (those that probe the kernel run as root)"
	$(SUDO) $(PY) -m pytest -n 2 --dist loadfile $(PYTEST_ARGS)

lint: setup
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(VENV)/bin/lint-imports

# docs/results.md from what benchmarks kept in benchmarks/results.
results: setup
	$(PY) -m benchmarks.render

setup: build/.apt build/.pip build headers

build: bpf native

bpf: build/moescope.bpf.o build/maps.bpf.o build/moescope-perf.bpf.o build/maps-perf.bpf.o

native: build/calibrate.so runtime/telemetry/_probes.so runtime/backends/_blocks.so views/timeline/_messages.so analyzer/records/_joins.so

doctor: setup
	$(SUDO) $(PY) -m tracer doctor

# Debian packages: only what is missing, and only where there is apt.
build/.apt: Makefile
	@mkdir -p build
	@missing=$$(for p in $(APT); do dpkg-query -W -f '$${db:Status-Status}' $$p 2>/dev/null | grep -q '^installed' || echo $$p; done); \
	if [ -n "$$missing" ] && command -v apt-get > /dev/null; then \
		echo "== installing Debian packages:" $$missing; \
		$(SUDO) apt-get update -qq && $(SUDO) env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $$missing > build/apt.log 2>&1 \
			|| { tail -n 5 build/apt.log; echo "apt-get failed; see build/apt.log"; exit 1; }; \
	fi
	@touch $@

build/.pip: pyproject.toml build/.apt
	@[ -x $(PY) ] || { echo "== creating $(VENV)"; $(PYTHON) -m venv $(VENV); }
	@echo "== installing Python packages (torch, for the parity tests, is the largest)"
	@$(VENV)/bin/pip install --quiet --disable-pip-version-check -e '.[npu,dev]'
	@touch $@

BPF_CC = $(CLANG) -O2 -g -Wall -Werror -target bpf -D__TARGET_ARCH_$(TARGET_ARCH) -I/usr/include/$(MACHINE)-linux-gnu
BPF_SOURCES := $(wildcard bpf/*.c bpf/*.h)

build/%-perf.bpf.o: bpf/%.bpf.c $(BPF_SOURCES) build/.apt
	@mkdir -p build
	$(BPF_CC) -DBUFFER_PERF -c $< -o $@

build/%.bpf.o: bpf/%.bpf.c $(BPF_SOURCES) build/.apt
	@mkdir -p build
	$(BPF_CC) -c $< -o $@

build/calibrate.so: tracer/probes/calibrate.c build/.apt
	@mkdir -p build
	$(CC) -O2 -Wall -shared -fPIC -o $@ $<

runtime/telemetry/_probes.so: runtime/telemetry/_probes.c build/.pip
	$(CC) -O3 -ffp-contract=off -Wall -fPIC -shared -fcf-protection=none -I$$($(PY) -c 'import sysconfig; print(sysconfig.get_paths()["include"])') -o $@ $<

runtime/backends/_blocks.so: $(wildcard runtime/backends/kernels/*) build/.apt
	$(CC) -O3 -Wall -fPIC -shared -fvisibility=hidden -fno-math-errno -ffp-contract=off -o $@ runtime/backends/kernels/*.c -lm

views/timeline/_messages.so: views/timeline/_messages.c build/.pip
	$(CC) -O2 -Wall -fPIC -shared -I$$($(PY) -c 'import sysconfig; print(sysconfig.get_paths()["include"])') -o $@ $<

analyzer/records/_joins.so: analyzer/records/_joins.c build/.pip
	$(CC) -O3 -Wall -fPIC -shared -I$$($(PY) -c 'import sysconfig; print(sysconfig.get_paths()["include"])') -o $@ $<

headers: build/.headers-$(shell uname -r)

build/.headers-%: build/.apt
	@$(SUDO) scripts/link_kernel_headers.sh
	@touch $@

clean:
	rm -rf build runtime/telemetry/_probes.so runtime/backends/_blocks.so views/timeline/_messages.so analyzer/records/_joins.so
