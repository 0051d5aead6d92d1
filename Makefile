# Everything a person types. `make demo` trains, `make test` proves, `make check` reads the code.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.installed
DOCS_READY := $(VENV)/.docs-installed
FRAMEWORKS := .frameworks
PACKAGES := "import sysconfig; print(sysconfig.get_path('purelib'))"
# Without --no-compile pip compiles every module; most are never imported.
PIP_INSTALL := -m pip install --quiet --disable-pip-version-check --no-compile

unexport PYTHONDONTWRITEBYTECODE  # tests start hundreds of processes: each would compile every module again

DATA ?= mnist
SEEDS ?= 1500
MINUTES ?= 30
JOBS ?= 2

.PHONY: demo test test-all test-ci test-containers test-large test-gpu mutants check format protos docs docs-site pictures lock bench bench-peers
.PHONY: clean soak test-lowest test-frameworks test-frameworks-all test-hosts test-ray test-slurm
.PHONY: chaos chaos-threads chaos-campaigns chaos-failpoints chaos-simulation chaos-damage chaos-scripts chaos-hosts chaos-ray

demo: $(READY)  ## train the digits job: 2 shards, 2 workers
	$(BIN)/parashard run examples/digits.toml

test: $(READY)  ## every promise once, in about five minutes on two cores: all but the tests marked full
	$(BIN)/python -m pytest -rs -n 2 --dist loadgroup -m "not full"

# Files whose tests marked full take longest. Only `make test-all` has these tests; what is not marked is in `make test`.
LONG := containers slurm hosts frameworks chaos/test_campaigns.py chaos/test_failpoint_sweep.py deploy/test_alert_causes.py deploy/test_monitored_run.py
LONG += deploy/test_k8s_commands.py coordinator/endpoints/test_hostile_texts.py simulation/test_simulated_jobs.py
LONG += parashard/doctor/test_doctor_in_namespaces.py parashard/launch/test_ssh_hosts.py
LONG += $(patsubst %,integration/test_%.py,click_jobs custom_loops damaged_rows hostile_peers ipv6_runs kept_formats list_columns_job quickstart renewed_certificates row_digests rows_of_a_run \
  same_bits scheduled_functions script_callbacks script_figures script_workers scripts secured_scripts served_runs ssh_runs \
  suspended_cluster tables traced_runs user_folder watched_page worker_threads)

test-ci: test  ## what `.ci/run` asks of them: `make test`, then the tests marked full, but for the longest files (LONG)
	@ls -d $(addprefix tests/,$(LONG)) >/dev/null  # --ignore takes what is not there, too
	$(BIN)/python -m pytest -rs -n 2 --dist loadgroup -m full $(patsubst %,--ignore=tests/%,$(LONG)) tests

test-all: $(READY)  ## every test that needs no GPU, containers among them: docs/containers.md says what those need
	PARASHARD_CONTAINERS=1 $(BIN)/python -m pytest -rs -n 2 --dist loadgroup --hypothesis-profile full

test-frameworks: $(FRAMEWORKS)/.installed  ## the tests of ps.torch, ps.jax and ps.keras, and one of Ray, in an environment of their own
	$(FRAMEWORKS)/bin/python -m pytest -rs -n 2 --dist loadgroup -m "not full" tests/ray/test_ray_smoke.py tests/frameworks

test-frameworks-all: $(FRAMEWORKS)/.installed  ## likewise, with those that are marked full
	$(FRAMEWORKS)/bin/python -m pytest -rs -n 2 --dist loadgroup tests/frameworks

test-ray: $(FRAMEWORKS)/.installed  ## the tests of Ray in the same environment: three nodes of a real Ray on this machine
	$(FRAMEWORKS)/bin/python -m pytest -rs tests/ray

test-containers: $(READY)  ## the compose file brought up by podman, with kills: docs/containers.md says what it needs
	PARASHARD_CONTAINERS=1 $(BIN)/python -m pytest -rs tests/containers

test-slurm: $(READY)  ## jobs on a real Slurm of four nodes, at length: docs/slurm.md; `.ci/packages` has what it needs
	PARASHARD_SLURM=1 $(BIN)/python -m pytest -rs tests/slurm

test-hosts: $(READY)  ## jobs on hosts as network namespaces, by ssh and without; needs root: docs/hosts.md
	PARASHARD_HOSTS=1 $(BIN)/python -m pytest -rs tests/hosts

test-large: $(READY)  ## a shard of more than 2 GiB (12 GiB of free memory, 6 GiB of disk); 200 kills and 2,000 starts of a fork server; minutes
	PARASHARD_LARGE=1 $(BIN)/python -m pytest -rs tests/ps_server/serving/test_large_vector.py tests/parashard/launch/test_forks.py

test-gpu: $(READY)  ## the tests marked gpu, on a machine with a CUDA device; what matters most is first
	$(BIN)/python -m benchmarks.gpu.marked

mutants: $(READY)  ## small faults in the pure cores, each against its unit tests; writes benchmarks/results/mutants.md
	$(BIN)/python tools/mutants.py --jobs $(JOBS) --write

chaos: chaos-damage chaos-threads chaos-simulation chaos-failpoints chaos-campaigns  ## every proof at full length: about two hours

chaos-campaigns: $(READY)  ## jobs of every oracle and policy under every kind of fault, 55 faults each
	$(BIN)/python tests/chaos/campaigns.py --faults 55 --write

chaos-failpoints: $(READY)  ## SIGKILL at every failpoint, 20 times at each
	$(BIN)/python tests/chaos/failpoint_sweep.py --firings 20 --write

chaos-simulation: $(READY)  ## the pure cores in virtual time: SEEDS fresh seeds of each of twelve jobs; prints them
	seq 2 | PYTHONPATH=.:tests xargs -P 2 -I NUMBER $(BIN)/python tests/simulation --seeds $$(($(SEEDS) / 2))

chaos-scripts: $(FRAMEWORKS)/.installed  ## a PyTorch script under 20 kills of workers, then of a shard and the coordinator; not in `chaos`
	$(FRAMEWORKS)/bin/python tests/chaos/script_kills.py --kills 20 --write

chaos-hosts: $(READY)  ## three jobs on five hosts as network namespaces, 102 faults of hosts and links, inside TLS; needs root
	$(BIN)/python tests/hosts/host_campaign.py --faults 102 --write

chaos-ray: $(FRAMEWORKS)/.installed  ## four ledgers on a real Ray, a worker's node killed every five seconds; not in `chaos`
	$(FRAMEWORKS)/bin/python tests/ray/ray_campaign.py --write

chaos-damage: $(READY)  ## torn and damaged checkpoints, 10,000 flipped bits
	PYTHONPATH=.:tests $(BIN)/python tests/damage/checkpoint_damage.py --flips 10000

soak: $(READY)  ## resident memory of every process of a job that goes on for MINUTES; writes benchmarks/results/soak.md
	$(BIN)/python -m benchmarks.soak --minutes $(MINUTES) --write

chaos-threads: $(READY)  ## a shard under 8 real threads for three minutes of each policy, a coordinator under 64
	PYTHONPATH=.:tests $(BIN)/python tests/threads/shard_threads.py --policy async
	PYTHONPATH=.:tests $(BIN)/python tests/threads/shard_threads.py --policy sync:8
	PYTHONPATH=.:tests $(BIN)/python tests/threads/coordinator_threads.py

check: $(READY)  ## format, lint, types, import rules, generated code and documents
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python tools/generate_protos.py --check
	$(BIN)/python tools/job_reference.py --check
	$(BIN)/python -m deploy.grafana.dashboards --check

format: $(READY)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

protos: $(READY)  ## generate the code of protos/*.proto again
	$(BIN)/python tools/generate_protos.py

docs: $(READY)  ## write the reference of the job file and the dashboards again
	$(BIN)/python tools/job_reference.py
	$(BIN)/python -m deploy.grafana.dashboards

docs-site: $(DOCS_READY)  ## the pages of docs/ as a site, build/docs/index.html; a dead link or any other warning fails it
	$(BIN)/python -m sphinx --fail-on-warning --keep-going --nitpicky --quiet -b html -d build/docs-trees docs build/docs

pictures: $(DOCS_READY)  ## record the live view and photograph the status page for docs/pictures again; five minutes
	$(BIN)/python tools/live_picture.py
	$(BIN)/python tools/status_pictures.py

# Both take DATA=FOLDER, where MNIST's four files are.
bench: $(READY)  ## the races that need no peer, and the kernels
	$(BIN)/python -m benchmarks.kernels --write
	$(BIN)/python -m benchmarks.shard_start --write
	$(BIN)/python -m benchmarks.tracing --write
	$(BIN)/python -m benchmarks.races.push_pull
	$(BIN)/python -m benchmarks.scheduling
	$(BIN)/python -m benchmarks.races.memory --write
	$(BIN)/python -m benchmarks.races.growth --write
	$(BIN)/python -m benchmarks.races.promises --data $(DATA) --write
	$(BIN)/python -m benchmarks.races.secured --write
	$(BIN)/python -m benchmarks.default_speed --data $(DATA) --write
	$(BIN)/python -m benchmarks.encodings --data $(DATA) --write

bench-peers: $(READY)  ## the races against peers, each in an environment of its own (3.8 GB under .peers/)
	$(BIN)/python -m benchmarks.peers.environments
	$(BIN)/python -m benchmarks.races.push_pull --peers all --write
	$(BIN)/python -m benchmarks.races.scheduling --peers all --write
	$(BIN)/python -m benchmarks.races.training --data $(DATA) --peers all --write

test-lowest:  ## the quick unit tests on the lowest versions that pyproject.toml allows (needs uv)
	mkdir -p build
	uv pip compile --quiet --python $(PYTHON) --resolution lowest-direct --no-header --extra dev \
	  --output-file build/lowest.txt pyproject.toml
	uv venv --quiet --clear --python $(PYTHON) build/lowest
	uv pip install --quiet --python build/lowest/bin/python --requirements build/lowest.txt
	uv pip install --quiet --python build/lowest/bin/python --no-deps --editable .
	build/lowest/bin/python -m pytest -n 2 --dist loadgroup -m "not full" $(addprefix tests/,parashard coordinator ps_server worker)

lock:  ## resolve pyproject.toml into requirements.lock again (needs uv)
	uv pip compile --universal --python-version 3.11 --generate-hashes --no-header --extra dev \
	  --output-file requirements.lock pyproject.toml
	uv pip compile --universal --python-version 3.11 --generate-hashes --no-header --extra examples --extra kubernetes --extra otel \
	  --extra s3 --constraint requirements.lock --output-file deploy/docker/requirements.lock pyproject.toml
	uv pip compile --universal --python-version 3.11 --generate-hashes --no-header --extra docs --constraint requirements.lock \
	  --output-file docs/requirements.lock pyproject.toml
	uv pip compile --python-platform linux --python-version 3.11 --generate-hashes --no-header \
	  --constraint deploy/docker/requirements.lock --output-file deploy/docker/requirements-cuda.lock \
	  deploy/docker/requirements-cuda.in

# The environment is rebuilt when the lock file or the package's metadata changes.
$(READY): requirements.lock pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python $(PIP_INSTALL) --require-hashes -r requirements.lock
	$(BIN)/python $(PIP_INSTALL) --no-deps --no-build-isolation -e .
	touch $(READY)

# It has the frameworks and this package; what is in $(VENV), it finds there.
$(FRAMEWORKS)/.installed: $(READY) tests/frameworks/requirements.txt
	$(PYTHON) -m venv $(FRAMEWORKS)
	$(BIN)/python -c $(PACKAGES) > $$($(FRAMEWORKS)/bin/python -c $(PACKAGES))/found_in_venv.pth
	$(FRAMEWORKS)/bin/python $(PIP_INSTALL) -r tests/frameworks/requirements.txt
	$(FRAMEWORKS)/bin/python $(PIP_INSTALL) --no-deps --no-build-isolation -e .
	touch $@

# What only the site needs comes on top, with the versions of requirements.lock where both have a package.
$(DOCS_READY): $(READY) docs/requirements.lock
	$(BIN)/python $(PIP_INSTALL) --require-hashes -r docs/requirements.lock
	touch $(DOCS_READY)

clean:
	rm -rf $(VENV) $(FRAMEWORKS) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
