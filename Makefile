# Penstock. `make demo` and `make test` need nothing but a Python and this file; each environment is
# built on first use and again when its lists of packages change.

ARGS ?=
# `make test-all` sets SLOW. Every leg then runs its slow tests too.
SLOW ?=
NOT_SLOW = $(if $(SLOW),, and not slow)

# Containers often forbid Python to write bytecode. Then each of the hundreds of programs that the
# tests start compiles torch anew: importing it takes 4.4 s instead of 2.1 s.
unexport PYTHONDONTWRITEBYTECODE

BUILD_INPUTS = pyproject.toml requirements/build.txt requirements/test.txt tools/make_env.sh
BIN = .venv/bin
OTHERS = $(addprefix tests/,compat gpu property)
FORMATS = tests/compat tests/unit/sources tests/integration
RAY = tests/integration/engine/remote
REMOTE = tests/integration/sources tests/integration/cli/doctor tests/faults/sources

.DEFAULT_GOAL := help
.PHONY: help demo test test-all check format soak bench docs coverage clean \
	env-core env-vision env-legacy env-formats env-windows env-remote env-ray test-core test-vision test-legacy \
	test-formats test-integration test-faults test-repo test-others test-unit test-python314 \
	test-windows test-remote test-ray

help:
	@echo 'make demo    what Penstock does that other loaders do not'
	@echo 'make test    all test legs without slow tests: core, vision, legacy (one: make test-core)'
	@echo 'make test-all  every leg there is, with the slow tests'
	@echo 'make test-formats  tests with the libraries of other formats (downloads about 1 GB)'
	@echo 'make test-remote  tests of data in object storage, with servers of it'
	@echo 'make test-ray  tests of workers and packing on a Ray cluster of several nodes'
	@echo 'make test-python314  tests that depend on the version of Python, with Python 3.14'
	@echo 'make test-windows  tests with Windows Python under Wine (needs root and a Debian apt)'
	@echo 'make check   format, lint, types, layers, spelling'
	@echo 'make format  rewrite the sources the way make check wants them'
	@echo 'make soak    the long counts'
	@echo 'make bench   benchmarks/loader.py'
	@echo 'make docs    the documentation as a site, in build/site'
	@echo 'make coverage  the core leg with coverage of all processes, in build/coverage'
	@echo 'make clean   remove environments and caches'
	@echo 'More arguments go in ARGS: make test-core ARGS="-k slots -x"'

demo: env-core
	@mkdir -p build
	$(BIN)/penstock demo --page build/demo.html $(ARGS)

test:
	@MAKE='$(MAKE)' tools/test_legs.sh

# Every leg, with the slow tests. Legs of other platforms join here.
test-all:
	@$(MAKE) --no-print-directory test SLOW=yes

check: env-core
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/codespell

format: env-core
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

soak: env-core env-vision env-remote env-ray
	$(BIN)/python -m pytest -m soak --timeout=3600 $(ARGS)
	.venv-vision/bin/python -m pytest -m soak --timeout=3600 tests/soak/test_fuzzed_soak.py \
		tests/soak/test_random_programs_soak.py
	.venv-remote/bin/python -m pytest -m soak --timeout=3600 tests/soak/test_remote_soak.py
	.venv-ray/bin/python -m pytest -m soak tests/soak/test_ray_soak.py

bench: env-core
	$(BIN)/python benchmarks/loader.py $(ARGS)

docs: env-core
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict $(ARGS)
	@echo 'Search works where the site is served: python3 -m http.server -d build/site'

coverage: env-core
	tools/coverage.sh $(BIN)/python $(ARGS)

clean:
	@if grep -qs ' $(CURDIR)/build' /proc/mounts; then \
		echo 'clean: something is mounted under build; unmount it first' >&2; exit 1; fi
	rm -rf .venv .venv-vision .venv-legacy .venv-314 .venv-formats .venv-remote .venv-ray build dist
	rm -rf .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	find src tests benchmarks -type d -name __pycache__ -prune -exec rm -rf {} +

# The legs

test-core: env-core
	@MAKE='$(MAKE)' tools/test_core.sh .venv/bin/python $(ARGS)

# Its parts. `make test` runs them in lanes.
test-integration: env-core
	@$(BIN)/python tools/run_pytest.py integration -m "not soak$(NOT_SLOW)" tests/integration $(ARGS)

test-faults: env-core
	@$(BIN)/python tools/run_pytest.py faults -m "not soak$(NOT_SLOW)" tests/faults $(ARGS)

test-repo: env-core
	@$(BIN)/python tools/run_pytest.py repo -m "not soak$(NOT_SLOW)" tests/repo $(ARGS)

test-others: env-core
	@$(BIN)/python tools/run_pytest.py others -m "not soak$(NOT_SLOW)" $(OTHERS) $(ARGS)

test-unit: env-core
	@$(BIN)/python tools/run_pytest.py unit -m "not soak$(NOT_SLOW)" tests/unit $(ARGS)

test-vision: env-vision
	@.venv-vision/bin/python tools/run_pytest.py vision -m "vision$(NOT_SLOW)" tests/compat $(ARGS)

test-legacy: env-legacy
	@.venv-legacy/bin/python tools/run_pytest.py legacy -m "legacy$(NOT_SLOW)" tests $(ARGS)

test-formats: env-formats
	@.venv-formats/bin/python tools/run_pytest.py formats -m "formats$(NOT_SLOW)" $(FORMATS) $(ARGS)

test-remote: env-remote
	@.venv-remote/bin/python tools/run_pytest.py remote -m "remote$(NOT_SLOW)" $(REMOTE) $(ARGS)

test-ray: env-ray
	@.venv-ray/bin/python tools/run_pytest.py ray -m "ray$(NOT_SLOW)" $(RAY) $(ARGS)

# Python 3.14, or Debian's. Builds .venv-314 on first use.
test-python314: env-core
	@tools/python314_leg.sh test $(ARGS)

# Windows Python under Wine. Builds build/windows on first use.
test-windows:
	@tools/windows_leg.sh test $(ARGS)

env-core: .venv/.ready ; @:
env-vision: .venv-vision/.ready ; @:
env-legacy: .venv-legacy/.ready ; @:
env-formats: .venv-formats/.ready ; @:
env-windows: ; @tools/windows_leg.sh build
env-remote: .venv-remote/.ready ; @:
env-ray: .venv-ray/.ready ; @:

.venv/.ready: requirements/core.txt requirements/docs.txt constraints/core.txt $(BUILD_INPUTS)
	@tools/make_env.sh core .venv 3.11 3.10+

.venv-vision/.ready: requirements/vision.txt constraints/vision.txt $(BUILD_INPUTS)
	@tools/make_env.sh vision .venv-vision 3.11 3.10+

.venv-legacy/.ready: requirements/legacy.txt constraints/legacy.txt $(BUILD_INPUTS)
	@tools/make_env.sh legacy .venv-legacy 3.10

.venv-formats/.ready: requirements/formats.txt constraints/formats.txt $(BUILD_INPUTS)
	@tools/make_env.sh formats .venv-formats 3.11 3.11+

.venv-remote/.ready: requirements/remote.txt constraints/remote.txt $(BUILD_INPUTS)
	@tools/make_env.sh remote .venv-remote 3.11 3.10+

.venv-ray/.ready: requirements/ray.txt constraints/ray.txt $(BUILD_INPUTS)
	@tools/make_env.sh ray .venv-ray 3.11 3.10+
