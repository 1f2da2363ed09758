# make help lists the targets. Everything runs from a virtual environment that belongs to the user who makes it:
# an environment shared by root and an ordinary user is either unreadable to one or writable by the wrong one.

SHELL := /bin/bash
VENV ?= .venv-$(shell id -u)
BIN := $(VENV)/bin
PYTEST_ARGS ?=
# How many processes share the tests: three for each processor, up to six. Much of a test is waiting.
WORKERS ?= $(shell n=$$(nproc); echo $$((n > 2 ? 6 : 3 * n)))
# Where PYTHONDONTWRITEBYTECODE is set, each worker, command and sandbox would compile the package again: half of the time.
PYTHON_KEPT = env -u PYTHONDONTWRITEBYTECODE "$(BIN)/python"
PYTEST = $(PYTHON_KEPT) -m pytest -n $(WORKERS)
# What `make test-quick` runs: no kernel feature needed but for a few commands in sandboxes.
QUICK_TESTS := tests/unit tests/kernel/test_exec.py tests/kernel/test_files.py
# What `make test-kernel` runs: all that touches the kernel.
KERNEL_TESTS := tests/kernel tests/adversarial tests/conformance tests/e2e tests/unit/test_host.py
# dev: the tools and all extras without torch and Ray; tests that need these are skipped. full: all extras, with torch where TORCH says which.
ENVIRONMENT ?= dev
TORCH ?=
FULL ?= $(VENV)-full
EXPERIMENT ?= runs/learning
SOURCES := src tests benchmarks tools examples

# For tests that take minutes each: slow ones too, and no deadline of ten minutes.
LONG := --slow -o faulthandler_timeout=0
# How many lines of src the tests reach in their own processes; the launcher and the commands as typed run in others.
COVERAGE := --cov=minisandbox --cov-report=term

.PHONY: help quickstart test compiled test-quick test-all test-passes test-foreign test-as-user test-kernel test-no-reaper test-interpreters test-validations test-rollouts test-cluster test-journey test-agents soak-cluster cluster-scaling test-skyrl test-harbor test-newest test-vllm test-kernels test-cpython dockerfile-conformance fuzz fuzz-parsers test-view adversarial adversarial-load soak soak-steady stress-store grading-load paper-scale verdict-parity patch-parity validation-page lint format lock docs bench bench-engines bench-evaluate bench-images bench-languages bench-view gpu-parts gpu-check clean train-demo experiment

help:
	@echo "make quickstart   build the bundled tasks, check them, run agents on them; needs Python >= 3.11 and git"
	@echo "make train-demo   train a small model by SFT and RL in sandboxes, and print the reward before and after; 20 minutes"
	@echo "make experiment   the whole experiment of docs/results.md, in EXPERIMENT=$(EXPERIMENT); hours; it goes on where it was"
	@echo "make test         the tests of every kind but the slow ones, as the user who calls; 8 minutes on two processors"
	@echo "make test-quick   the unit tests and a few sandboxes; 3 minutes"
	@echo "make test-all     lint, every test with all extras, and of other projects; as root, those not slow as an ordinary user too; 70 minutes"
	@echo "make test-kernel  only the tests that touch the kernel, as whoever calls"
	@echo "make test-no-reaper  all tests where the first process reaps no orphans, as in many containers"
	@echo "make test-interpreters  build a project for each of five interpreters, 2.7 to 3.13, and run its tests; minutes"
	@echo "make test-validations  200 validations, their controller killed three times: the report is that of an undisturbed run"
	@echo "make test-rollouts  300 rollouts, their controller killed 30 times: each is finished exactly once; half an hour"
	@echo "make test-cluster  300 rollouts over 12 images on three nodes; nodes and drivers killed, three times; other faults; as root, an hour"
	@echo "make soak-cluster  the same ten times"
	@echo "make test-journey  both guides of the original, end to end: ten rows, three nodes, 128 sandboxes, SFT, RL; as root; 25 minutes; JOURNEY=DIR"
	@echo "make test-agents  install Claude Code, Codex, mini-swe-agent and Qwen Code, and let each solve a task, against a script and a model that samples; 15 minutes; AGENTS='codex'"
	@echo "make cluster-scaling  64 nodes that only pretend, 20,000 rollouts: how far one driver goes; SCALING='--nodes 8 ...'"
	@echo "make test-skyrl   what SkyRL's own code says of our generator, in an environment with it: Python 3.12, 5 GB"
	@echo "make test-harbor  Harbor itself over sandboxes, and its models of what we export: Python 3.12, 0.5 GB; two minutes"
	@echo "make test-view    the pages in Debian's Chromium, by Playwright; a minute"
	@echo "make test-newest  what meets other projects' code, with the newest version of each instead of the locked one; Python 3.12, too; 15 minutes"
	@echo "make test-kernels  what depends on the kernel, on Debian's 6.1 and 6.12 in QEMU; as root; 45 minutes; KERNELS='6.1', KERNELS_CACHE=DIR"
	@echo "make test-cpython  CPython's own tests of system calls, in a sandbox and on the host; CPYTHON='--suite DIR'; minutes"
	@echo "make dockerfile-conformance  109 Dockerfiles by buildah and by us, compared; as root; 15 minutes; CASES='--cache DIR NAME...'"
	@echo "make test-vllm    a real vLLM on processors: server, proxy, decoder, training; Python 3.11, 3.5 GB; eight minutes"
	@echo "make fuzz         2,000 random sequences of operations on sandboxes, compared with a model; ten minutes"
	@echo "make fuzz-parsers  fuzz the readers of layers, manifests and Dockerfiles with Atheris, 15 minutes each; PARSERS='tar', FUZZ_SECONDS=60"
	@echo "make adversarial  275 attacks from inside, without a sandbox and in one; as root, as an ordinary user too"
	@echo "make adversarial-load  bombs in sandboxes while 20 neighbours answer"
	@echo "make soak         200 times: kill -9 among 50 busy sandboxes, and see what is left"
	@echo "make soak-steady  128 busy sandboxes for 30 minutes: what grows; STEADY='--minutes 5 ...'"
	@echo "make stress-store 60 processes want the same 10 layers; then the same with makers killed"
	@echo "make grading-load  grade 200 honest passes, eight at once, under tight limits: none may fail; GRADING_LOAD='--gradings 20 ...'"
	@echo "make paper-scale  compute the store's size for the paper's whole data sets; PAPER_SCALE='--pins DIR ...'"
	@echo "make verdict-parity  compare verdicts with those of swebench and swesmith; VERDICT_PARITY='ROWS -o DIR ...'"
	@echo "make patch-parity    compare how damaged patches are applied with the harnesses' commands; PATCH_PARITY='ROWS --repo-mirrors DIR'"
	@echo "make validation-page  write the tables of docs/validation.md; VALIDATION_PAGE='DIR --rows FILE... --parity DIR'"
	@echo "make lint         ruff and mypy"
	@echo "make format       let ruff rewrite the sources"
	@echo "make lock         update requirements.lock, -dev.lock, -docs.lock and -full.lock from pyproject.toml; UPGRADE=1: to the newest versions"
	@echo "make docs         build the documentation site in build/site, and check every link; two minutes"
	@echo "make bench        the benchmarks of docs/benchmarks.md, without the next"
	@echo "make bench-engines  compare with bubblewrap, kern, sandlock, podman, docker and the original's way; as root; 20 minutes; ENGINES='...' QUICK=1 PAGE=1"
	@echo "make bench-evaluate  validate and evaluate next to the bare host, and what confirming costs; as root; ROWS=FILE PINS=DIR MIRRORS=DIR"
	@echo "make bench-images  compare 8 container images with podman's, then measure; as root; 30 minutes, 6 GB; IMAGES='compare --as root ...'"
	@echo "make bench-languages  tasks of real commits in six languages: validate them, compare with podman; as root; an hour, 8 GB; LANGUAGES='go php ...'"
	@echo "make bench-view   how soon the pages of minisandbox view are painted in Chromium; next to harbor view with HARBOR=harbor; two minutes"
	@echo "make gpu-check    sandboxes, engine, memory and RL on one GPU without network; under 9 minutes; resumes; small without a GPU; GPU_CHECK='--only rl'"
	@echo "make gpu-parts    pack what such a machine lacks into build/gpu-check, in parts of 26 MB"
	@echo "make clean        remove environments and caches of this checkout (never the store)"
	@echo "Variables: VENV=$(VENV)  PYTHON=a Python >= 3.11  PYTEST_ARGS=...  WORKERS=$(WORKERS)"
	@echo "           ENVIRONMENT=full TORCH=torch==2.13.0 for an environment with all extras, as test-all has it"

# The stamps are remade when what they were made from changes.
$(VENV)/.run: pyproject.toml requirements.lock tools/make-venv
	@tools/make-venv "$(VENV)" run

$(VENV)/.dev: pyproject.toml requirements-$(ENVIRONMENT).lock tools/make-venv
	@TORCH="$(TORCH)" tools/make-venv "$(VENV)" $(ENVIRONMENT)

quickstart: $(VENV)/.run
	@"$(BIN)/minisandbox" quickstart

# Both need all extras, and so an environment of their own.
$(FULL)/.dev: pyproject.toml requirements-full.lock tools/make-venv
	@TORCH="$(or $(TORCH),torch==2.13.0)" tools/make-venv "$(FULL)" full

train-demo: $(FULL)/.dev
	@"$(FULL)/bin/python" -m examples.learning.demo runs/train-demo

experiment: $(FULL)/.dev
	@"$(FULL)/bin/python" -m examples.learning.experiment $(EXPERIMENT) --parallel 2

test: compiled
	$(PYTEST) $(PYTEST_ARGS)

test-quick: $(VENV)/.dev
	$(PYTEST) $(QUICK_TESTS) $(PYTEST_ARGS)

# Compile once, and not in every worker; the tests, and what they import, by collecting them.
compiled: $(VENV)/.dev
	@$(PYTHON_KEPT) -m compileall -q src/minisandbox
	@if [ ! -e "$(VENV)/.compiled" ]; then $(PYTHON_KEPT) -m pytest --collect-only -qq >/dev/null 2>&1 || true; fi
	@touch "$(VENV)/.compiled"

# In an environment with all extras, so that training, the engine and the workers on Ray are tested too.
test-all:
	@$(MAKE) --no-print-directory VENV="$(FULL)" FULL="$(FULL)-full" ENVIRONMENT=full TORCH="$(or $(TORCH),torch==2.13.0)" test-passes

# In this order, so that the last line printed is pytest's about the whole suite. What other projects' code finds keeps no
# other test from running.
test-passes: $(VENV)/.dev
	@$(MAKE) --no-print-directory -j2 lint compiled
	@$(MAKE) --no-print-directory test-as-user
	@suites=0; .ci/suites || suites=1; \
	$(PYTEST) --slow $(COVERAGE) $(PYTEST_ARGS) && exit $$suites

# Other projects' code tests ours.
test-foreign:
	@.ci/suites

# Where the first process never reaps what it did not start, as in many containers. Nothing else may make sandboxes
# meanwhile: owners of control groups are known by their pids, which mean something else there.
test-no-reaper: $(VENV)/.dev
	"$(BIN)/python" tests/without_reaper.py $(PYTEST) $(PYTEST_ARGS)

test-as-user: $(VENV)/.dev
	@if [ "$$(id -u)" = 0 ]; then "$(BIN)/python" tests/as_user.py $(USER_TESTS); fi

# Directories that hold no test yet are left out: pytest calls an empty run a failure.
test-kernel: $(VENV)/.dev
	@set -e; \
	with_tests=$$(find $(KERNEL_TESTS) -name 'test_*.py' -printf '%H\n' 2>/dev/null | sort -u); \
	if [ -z "$$with_tests" ]; then echo "no kernel tests in this checkout"; exit 0; fi; \
	$(PYTEST) $(PYTEST_ARGS) $$with_tests

test-interpreters: $(VENV)/.dev
	MINISANDBOX_TEST_INTERPRETERS=1 "$(BIN)/python" -m pytest $(LONG) $(PYTEST_ARGS) tests/kernel/test_build_interpreters.py

test-validations: $(VENV)/.dev
	MINISANDBOX_TEST_VALIDATIONS=200 "$(BIN)/python" -m pytest $(LONG) $(PYTEST_ARGS) tests/kernel/grading/test_validations.py -k killed

test-rollouts: $(VENV)/.dev
	MINISANDBOX_TEST_ROLLOUTS=300 MINISANDBOX_TEST_KILLS=30 "$(BIN)/python" -m pytest $(LONG) $(PYTEST_ARGS) tests/kernel/grading/test_rollouts_killed.py

# Needs Ray: ENVIRONMENT=full, or pip install -e '.[ray]'. What of it also trains needs the extra train
CLUSTER := MINISANDBOX_TEST_CLUSTER_ROLLOUTS=300 MINISANDBOX_TEST_CLUSTER_IMAGES=12 MINISANDBOX_TEST_CLUSTER_PAUSE=20
test-cluster: $(VENV)/.dev
	$(CLUSTER) MINISANDBOX_TEST_CLUSTER_REPEAT=3 MINISANDBOX_TEST_CLUSTER_STEPS=16 "$(BIN)/python" -m pytest $(LONG) $(PYTEST_ARGS) tests/cluster

soak-cluster: $(VENV)/.dev
	$(CLUSTER) MINISANDBOX_TEST_CLUSTER_REPEAT=10 "$(BIN)/python" -m pytest $(LONG) $(PYTEST_ARGS) tests/cluster/test_cluster.py

# The released agents of the bundled recipes, each on a quickstart task: three gigabytes, most of them downloaded once.
test-agents: $(FULL)/.dev
	MINISANDBOX_TEST_AGENTS="$(or $(AGENTS),1)" "$(FULL)/bin/python" -m pytest $(LONG) -s $(PYTEST_ARGS) tests/agents

# JOURNEY: a directory for its files, where the same command resumes
test-journey: $(FULL)/.dev
	MINISANDBOX_TEST_JOURNEY="$(or $(abspath $(JOURNEY)),1)" "$(FULL)/bin/python" -m pytest $(LONG) $(PYTEST_ARGS) tests/journey

cluster-scaling: $(VENV)/.dev
	@"$(BIN)/python" -m benchmarks.cluster_scaling $(SCALING)

# SkyRL takes Python 3.12 and packages that exclude ours of development: an environment of its own, without a GPU's.
SKYRL_VENV ?= .venv-skyrl-$(shell id -u)
SKYRL_PYTHON ?= python3.12
test-skyrl: $(SKYRL_VENV)/.made
	"$(SKYRL_VENV)/bin/python" -m pytest $(LONG) $(PYTEST_ARGS) tests/kernel/grading/test_skyrl.py tests/unit/test_skyrl_step.py

$(SKYRL_VENV)/.made: tools/make-skyrl-venv pyproject.toml
	@tools/make-skyrl-venv "$(SKYRL_VENV)" "$(SKYRL_PYTHON)"

HARBOR_VENV ?= .venv-harbor-$(shell id -u)
HARBOR_PYTHON ?= $(SKYRL_PYTHON)
test-harbor: $(HARBOR_VENV)/.made
	"$(HARBOR_VENV)/bin/python" -m pytest $(LONG) $(PYTEST_ARGS) tests/integrations/test_harbor.py

$(HARBOR_VENV)/.made: tools/make-harbor-venv pyproject.toml
	@tools/make-harbor-venv "$(HARBOR_VENV)" "$(HARBOR_PYTHON)"

# What meets other projects' code, with the newest version of each; Harbor in an environment of its own, for it needs Python 3.12.
NEWEST_VENV ?= .venv-newest-$(shell id -u)
NEWEST_PYTHON ?= python3
NEWEST_TESTS := tests/integrations tests/cluster/test_small.py \
	$(addprefix tests/unit/,test_models_e*.py test_models_s*.py test_models_forced.py test_train*.py test_tasks_reading.py test_tasks_parsers.py)
test-newest:
	@tools/make-newest-venv "$(NEWEST_VENV)" "$(NEWEST_PYTHON)"
	@HARBOR=harbor tools/make-harbor-venv "$(NEWEST_VENV)-harbor" "$(HARBOR_PYTHON)"
	@"$(NEWEST_VENV)-harbor/bin/python" -c 'from importlib.metadata import version; print("== newest: harbor", version("harbor"))'
	"$(NEWEST_VENV)-harbor/bin/python" -m pytest $(LONG) $(PYTEST_ARGS) tests/integrations/test_harbor.py
	"$(NEWEST_VENV)/bin/python" -m pytest -n $(WORKERS) --slow $(PYTEST_ARGS) $(NEWEST_TESTS)

# KERNELS: Debian 12 has 6.1 and 6.12. KERNELS_CACHE: where disks are kept. KERNELS_ARGS: --users, --tests, --pytest-args ...
KERNELS ?= 6.1 6.12
test-kernels: $(VENV)/.dev
	@$(if $(KERNELS_CACHE),KERNELS_CACHE="$(KERNELS_CACHE)") "$(BIN)/python" -m tools.kernels $(KERNELS_ARGS) -- $(KERNELS)

# CPYTHON: --suite DIR, --modules NAME...; needs Debian's python3.11 and libpython3.11-testsuite
test-cpython: $(VENV)/.dev
	@"$(BIN)/python" tests/foreign/cpython.py $(CPYTHON)

dockerfile-conformance: $(VENV)/.dev
	@"$(BIN)/python" tests/foreign/dockerfiles.py $(CASES)

# vLLM's build for processors, with torch in the one version that it takes: an environment of its own, too.
VLLM_VENV ?= .venv-vllm-$(shell id -u)
VLLM_PYTHON ?= python3.11
test-vllm: $(VLLM_VENV)/.made
	"$(VLLM_VENV)/bin/python" -m pytest $(LONG) -rP $(PYTEST_ARGS) tests/vllm tests/unit/test_train_vllm.py

$(VLLM_VENV)/.made: tools/make-vllm-venv pyproject.toml
	@tools/make-vllm-venv "$(VLLM_VENV)" "$(VLLM_PYTHON)"

fuzz: $(VENV)/.dev
	MINISANDBOX_FUZZ_SEQUENCES=2000 "$(BIN)/python" -m pytest $(LONG) $(PYTEST_ARGS) tests/conformance/test_fuzz.py

# What a fuzzer finds is in build/fuzz. A copy of its smallest inputs that reach new code is kept in tests/fuzz/corpus.
FUZZ_VENV ?= .venv-fuzz-$(shell id -u)
FUZZ_SECONDS ?= 900
fuzz-parsers: $(FUZZ_VENV)/.made
	@set -e; for parser in $(or $(PARSERS),tar manifest dockerfile); do \
		echo "== $$parser, $(FUZZ_SECONDS) s"; "$(FUZZ_VENV)/bin/python" -m tests.fuzz $$parser build/fuzz/$$parser -max_total_time=$(FUZZ_SECONDS); done

# The browser is Debian's package chromium; Playwright downloads none.
VIEW_VENV ?= .venv-view-$(shell id -u)
# HARBOR: the command harbor, to compare with its viewer
bench-view: $(VIEW_VENV)/.made
	"$(VIEW_VENV)/bin/python" -m benchmarks.view_pages $(if $(HARBOR),--harbor "$(HARBOR)")

AXE_VERSION := 4.14.1
AXE := $(VIEW_VENV)/axe-core-$(AXE_VERSION)/package/axe.min.js
test-view: $(AXE)
	MINISANDBOX_AXE="$(AXE)" "$(VIEW_VENV)/bin/python" -m pytest $(LONG) $(PYTEST_ARGS) tests/browser

$(AXE): $(VIEW_VENV)/.made
	@mkdir -p "$(@D)"
	@cd "$(@D)/.." && npm pack --silent axe-core@$(AXE_VERSION) >/dev/null && tar -xzf axe-core-$(AXE_VERSION).tgz package/axe.min.js
	@touch "$@"

$(VIEW_VENV)/.made: pyproject.toml
	@python3 -m venv --clear "$(VIEW_VENV)"
	@"$(VIEW_VENV)/bin/python" -m pip install -qq --disable-pip-version-check playwright hypothesis pytest pytest-rerunfailures pytest-xdist httpx2 -e '.[view,atif]'
	@touch "$@"

$(FUZZ_VENV)/.made: pyproject.toml
	@python3 -m venv --clear "$(FUZZ_VENV)"
	@"$(FUZZ_VENV)/bin/python" -m pip install -qq --disable-pip-version-check "atheris>=3.0" pytest -e .
	@touch "$@"

# ATTACKS: names or kinds of probes, --brief
adversarial: $(VENV)/.dev
	@"$(BIN)/python" tests/adversarial/everywhere.py $(ATTACKS)

adversarial-load: $(VENV)/.dev
	@"$(BIN)/python" tests/adversarial/load.py

soak: $(VENV)/.dev
	@"$(BIN)/python" tests/adversarial/soak.py

# STEADY: --sandboxes, --minutes, --window, --every, --threads
soak-steady: $(VENV)/.dev
	@"$(BIN)/python" tests/adversarial/steady.py $(STEADY)

stress-store: $(VENV)/.dev
	@"$(BIN)/python" benchmarks/stress_store.py

# GRADING_LOAD: --gradings, --workers, --load, --times, --tasks
grading-load: $(VENV)/.dev
	@"$(BIN)/python" benchmarks/grading_under_load.py $(GRADING_LOAD)

# PAPER_SCALE: --pins DIR --rows FILE --mirrors DIR; benchmarks/paper_scale.py says what they hold
paper-scale: $(VENV)/.dev
	@"$(BIN)/python" -m benchmarks.paper_scale $(PAPER_SCALE)

# VERDICT_PARITY: ROWS... -o DIR; the environment needs swebench 4.1 and swesmith: pip install -e '.[swe]'
verdict-parity: $(VENV)/.dev
	@"$(BIN)/python" -m benchmarks.verdict_parity $(VERDICT_PARITY)

# PATCH_PARITY: ROWS... --repo-mirrors DIR [--five]
patch-parity: $(VENV)/.dev
	@"$(BIN)/python" -m benchmarks.patch_parity $(PATCH_PARITY)

# VALIDATION_PAGE: [DIR --rows FILE...] [--parity DIR]
validation-page: $(VENV)/.dev
	@"$(BIN)/python" -m tools.make_validation_page $(VALIDATION_PAGE)

lint: $(VENV)/.dev
	"$(BIN)/ruff" check .
	"$(BIN)/ruff" format --check .
	"$(BIN)/mypy" $$(find $(SOURCES) -name '*.py' -printf '%H\n' 2>/dev/null | sort -u)

format: $(VENV)/.dev
	"$(BIN)/ruff" check --fix .
	"$(BIN)/ruff" format .

# hatchling and editables build the package itself, without an isolated build environment.
LOCK_OPTIONS := $(if $(UPGRADE),--upgrade) --universal --python-version 3.11 --generate-hashes --no-emit-index-url --no-header --quiet
lock: $(VENV)/.dev
	printf 'hatchling\neditables\n' | "$(BIN)/uv" pip compile pyproject.toml - $(LOCK_OPTIONS) --output-file requirements.lock
	printf 'hatchling\neditables\n' | "$(BIN)/uv" pip compile pyproject.toml - $(LOCK_OPTIONS) --extra dev \
		--constraint requirements.lock --output-file requirements-dev.lock
	printf 'hatchling\neditables\n' | "$(BIN)/uv" pip compile pyproject.toml - $(LOCK_OPTIONS) --extra docs \
		--constraint requirements.lock --output-file requirements-docs.lock
	printf 'hatchling\neditables\n' | "$(BIN)/uv" pip compile pyproject.toml - $(LOCK_OPTIONS) --all-extras \
		--constraint requirements-dev.lock --override tools/without-torch.txt --output-file requirements-full.lock

# Material and its plugins share no package with the tests: an environment of its own.
DOCS_VENV ?= .venv-docs-$(shell id -u)
docs: $(DOCS_VENV)/.run
	NO_MKDOCS_2_WARNING=1 "$(DOCS_VENV)/bin/mkdocs" build
	@echo "open build/site/index.html, or: $(DOCS_VENV)/bin/mkdocs serve"

$(DOCS_VENV)/.run: pyproject.toml requirements-docs.lock tools/make-venv
	@tools/make-venv "$(DOCS_VENV)" docs

bench: $(VENV)/.dev
	@set -e; for script in benchmarks/bench_*.py benchmarks/rollouts.py; do \
		[ -e "$$script" ] || { echo "no benchmarks in this checkout"; exit 0; }; \
		echo "== $$script"; "$(BIN)/python" "$$script"; done

# ENGINES: some of minisandbox, bubblewrap, kern, sandlock, podman, docker, original. QUICK=1: 3 minutes. FRESH=1: anew. PAGE=1: write docs/benchmarks.md
bench-engines: $(VENV)/.dev
	@"$(BIN)/python" -m benchmarks.engines $(ENGINES) $(if $(QUICK),--quick) $(if $(FRESH),--fresh) $(if $(PAGE),--page)

# ROWS: a file or folder of SWE-bench and SWE-smith rows. PINS, MIRRORS: as --pins and --repo-mirrors. EVALUATE: --rounds, --only ...
bench-evaluate: $(FULL)/.dev
	@"$(FULL)/bin/python" -m benchmarks.evaluate "$(ROWS)" $(if $(PINS),--pins "$(PINS)") $(if $(MIRRORS),--repo-mirrors "$(MIRRORS)") $(EVALUATE)

# IMAGES: compare, measure or speed, with the options that benchmarks/images/__main__.py lists
bench-images: $(VENV)/.dev
	@set -e; for action in $(if $(IMAGES),'$(IMAGES)',compare measure speed); do "$(BIN)/python" -m benchmarks.images $$action; done

# LANGUAGES: some languages or tasks, --list, --cache DIR
bench-languages: $(VENV)/.dev
	@"$(BIN)/python" -m benchmarks.languages $(LANGUAGES)

# A machine with torch of its own, such as one with a GPU, gets the other packages from the parts.
gpu-check:
	@if python3 -c "import torch" 2>/dev/null; then python3 -m benchmarks.gpu_check $(GPU_CHECK); \
	else $(MAKE) --no-print-directory "$(FULL)/.dev" && "$(FULL)/bin/python" -m benchmarks.gpu_check $(GPU_CHECK); fi

gpu-parts: $(FULL)/.dev
	@"$(FULL)/bin/python" -m benchmarks.gpu_check.parts

clean:
	rm -rf .venv-* build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .coverage .coverage.*
	find $(SOURCES) -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true
