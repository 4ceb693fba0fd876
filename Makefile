# dora: `make demo` trains a model over a local Kafka, `make test` runs the tests.
# Both set everything up first: .venv with pinned packages, and Kafka's jars.
#
# make setup TORCH=cpu    takes the smaller CPU build of torch (needs internet access beyond PyPI)
# make demo  CONFIG=...   another run configuration
# make test JOBS=1        one test after the other (3 unless told; each job has a Kafka of its own)
# make chaos SEED=1 FAULTS=300 ENGINE=emulated|vllm   kill and freeze everything, prove nothing lost

PYTHON ?= python3
TORCH  ?= pypi
CONFIG ?= examples/spell_backward.toml
SEED   ?= 0
FAULTS ?= 20
ENGINE ?= emulated
JOBS   ?= 3
BIN    := .venv/bin
UV     := $(shell command -v uv 2>/dev/null || echo .uv/bin/uv)
export PATH := $(CURDIR)/.venv/bin:$(PATH)

.PHONY: setup demo chaos test test-unit check format docs dashboard requirements clean

setup: .venv/ready .venv/jars

.uv/bin/uv:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "dora needs Python 3.11 or newer; $(PYTHON) is older. Set PYTHON=/path/to/python3.11"; exit 1; }
	$(PYTHON) -m venv .uv
	.uv/bin/pip install --quiet --disable-pip-version-check uv

.venv/ready: requirements/cpu.txt pyproject.toml | $(filter .uv/bin/uv,$(UV))
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "dora needs Python 3.11 or newer; $(PYTHON) is older. Set PYTHON=/path/to/python3.11"; exit 1; }
	test -x $(BIN)/python || $(UV) venv --quiet --python $(PYTHON) .venv
ifeq ($(TORCH),cpu)
	grep -vE '^(nvidia-|cuda-|triton==)' requirements/cpu.txt > .venv/requirements.txt
	VIRTUAL_ENV=$(CURDIR)/.venv $(UV) pip sync --quiet --compile-bytecode --torch-backend cpu .venv/requirements.txt
else
	VIRTUAL_ENV=$(CURDIR)/.venv $(UV) pip sync --quiet --compile-bytecode requirements/cpu.txt
endif
	VIRTUAL_ENV=$(CURDIR)/.venv $(UV) pip install --quiet --no-deps --no-build-isolation --editable .
	touch $@

.venv/jars: ops/kafka/pom.xml | .venv/ready
	$(BIN)/dora broker fetch
	touch $@

# A schema registry, for the tests only.
.venv/registry: ops/registry/pom.xml | .venv/ready
	rm -rf $@ $@.new
	mvn --batch-mode --quiet --strict-checksums -Dstyle.color=never --file=$< dependency:unpack-dependencies \
	  -DoutputDirectory=$(CURDIR)/$@.new -DmarkersDirectory=$(CURDIR)/$@.new/markers
	mv $@.new $@
	touch $@

# Kafka Connect with a sink and a converter, for the tests and for docs/connect.md.
.venv/connect: ops/connect/pom.xml ops/connect/fetch.sh | .venv/ready
	sh ops/connect/fetch.sh $(CURDIR)/$@
	touch $@

demo: setup
	$(BIN)/dora run $(CONFIG)

# Writes chaos-report.json.
chaos: setup
	$(BIN)/python -m tests.chaos --seed $(SEED) --faults $(FAULTS) --engine $(ENGINE)

# First a browser and Prometheus, which some tests use. Then JOBS jobs, more than there are
# processors, because most tests wait more than they compute. vLLM's tests run beside them in a
# process without DeepSpeed. Chaos runs alone, because it needs the machine. With CI=true a test that
# lacks a tool fails; otherwise it is skipped.
test: setup .venv/registry .venv/connect
	sh ops/test-tools.sh
	@$(BIN)/python -m pytest tests/integration -m vllm -q >.venv/vllm-tests.log 2>&1 & vllm=$$!; \
	trap 'kill $$vllm 2>/dev/null' INT TERM; code=0; \
	$(BIN)/python -m pytest tests/unit tests/integration -m "not vllm" -n $(JOBS) || code=$$?; \
	wait $$vllm || code=$$?; cat .venv/vllm-tests.log; exit $$code
	$(BIN)/python -m pytest tests/chaos --timeout=600

test-unit: .venv/ready
	$(BIN)/python -m pytest tests/unit -n 2

check: .venv/ready
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: .venv/ready
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

docs: .venv/ready
	$(BIN)/python docs/generate.py

# A picture of the run RUN for the documentation; its Kafka must be up.
dashboard: .venv/ready
	$(BIN)/dora status $(RUN) --svg docs/images/dashboard.svg --size 110x32

# Pins every package without recording where it was downloaded from.
requirements: | $(filter .uv/bin/uv,$(UV))
	$(UV) pip compile --quiet --upgrade --python-version 3.11 --override requirements/overrides.txt \
	  --extra cpu --extra math --extra traces --extra registry --extra lakes --extra lineage \
	  --extra dev --no-header --no-emit-index-url --no-annotate \
	  pyproject.toml requirements/build.in -o requirements/cpu.txt

clean:
	rm -rf .venv .uv dist build .mypy_cache .ruff_cache .pytest_cache .hypothesis
