# The front door. Snakemake does the work: see Snakefile.
# Works with GNU make 3.81 and any POSIX shell.

PYTHON  ?= python3
PROFILE ?= quick
MACHINE ?=
CONFIGURATION ?=
TARGET  ?=
DRAFT   ?=
ARGS    ?=

QUIET     = --quiet rules host reason
SNAKEMAKE = -m snakemake --cores 1 --rerun-incomplete $(QUIET) $(ARGS)
CONFIG    = $(strip $(if $(MACHINE),machine=$(MACHINE)) $(if $(CONFIGURATION),configuration=$(CONFIGURATION)))
# The shell finds jupyter-book and papermill of the same environment first.
RUN       = PATH="$(CURDIR)/.venv/bin:$$PATH" .venv/bin/python
RENDER    = PATH="$(CURDIR)/.venv-book/bin:$$PATH" .venv-book/bin/python
FAILED    = { echo "make $@ stopped: the reason is above. The same command goes on from there. Logs: .snakemake/log"; exit 1; }

.PHONY: help book test html pdf study llama advise clean

help:
	@echo "make book   the quick study on this machine, then the book   [PROFILE=smoke|quick|standard|full]"
	@echo "make html   the published book, without torch or weights     [MACHINE=name]"
	@echo "make pdf    the same as one PDF; needs Chromium              [MACHINE=name]"
	@echo "make study  measure only; goes on where it stopped            [PROFILE=smoke|quick|standard|full CONFIGURATION=name]"
	@echo "make llama  build llama.cpp for its configurations; make study does it by itself"
	@echo "make advise does it pay here? two minutes, no study          [TARGET=name|folder|hub DRAFT=...]"
	@echo "make test   the whole test suite                             [ARGS='-k name']"
	@echo "make clean  remove what was rendered; data and environments stay"
	@echo "Python: $(PYTHON) (3.11 or newer; choose another with PYTHON=...)"

book: .venv/.stamp
	@$(RUN) $(SNAKEMAKE) --config profile=$(PROFILE) $(CONFIG) -- book || $(FAILED)
	@echo "The book: _build/html/index.html"

html: .venv-book/.stamp
	@$(RENDER) $(SNAKEMAKE) $(if $(CONFIG),--config $(CONFIG)) -- html || $(FAILED)
	@echo "The book: _build/html/index.html"

pdf: .venv-book/.stamp
	@$(RENDER) $(SNAKEMAKE) $(if $(CONFIG),--config $(CONFIG)) -- pdf || $(FAILED)
	@echo "The book: _build/pdf/lossless-but-not-free.pdf"

study: .venv/.stamp llama
	@$(RUN) $(SNAKEMAKE) --config profile=$(PROFILE) $(CONFIG) -- study || $(FAILED)

advise: .venv/.stamp
	@$(RUN) -m specdec.study.advise $(if $(TARGET),--target $(TARGET)) $(if $(DRAFT),--draft $(DRAFT))

llama: .venv/.llama

test: .venv/.stamp
	@$(RUN) -m pytest $(ARGS)

clean:
	@rm -rf _build book/notebooks book/configurations

.venv/.stamp: requirements.txt pyproject.toml
	@$(call environment,.venv,requirements.txt,a few minutes and 2 GB the first time)

.venv-book/.stamp: requirements-book.txt pyproject.toml
	@$(call environment,.venv-book,requirements-book.txt,about a minute)

# Not everybody has a compiler, and the study is whole without llama.cpp: a build that cannot be made is no error.
# Its AMX kernel crashes where it is built for the CPU at hand, so it is left out.
.venv/.llama: .venv/.stamp requirements-llama.txt
	@leave() { echo "llama.cpp: $$1. Its configurations are skipped" >&2; exit 0; }; \
	command -v cc >/dev/null 2>&1 && command -v c++ >/dev/null 2>&1 || leave "no C and C++ compiler here"; \
	echo "llama.cpp: building (some five minutes, once)"; \
	no_amx="-mno-amx-tile -mno-amx-int8 -mno-amx-bf16"; \
	grep -qs amx_tile /proc/cpuinfo && CMAKE_ARGS="$$CMAKE_ARGS -DCMAKE_C_FLAGS='$$no_amx' -DCMAKE_CXX_FLAGS='$$no_amx'"; \
	export CMAKE_ARGS; .venv/bin/python -m pip install -qq --no-deps -r requirements-llama.txt \
	  && .venv/bin/python -c "import llama_cpp" || leave "the build failed, see above"; \
	touch $@

# $(1) folder, $(2) lock, $(3) what it takes. A folder that a broken install left without a working pip is made anew.
define environment
say() { echo "$$1" >&2; exit 1; }; \
command -v "$(PYTHON)" >/dev/null 2>&1 || say "No $(PYTHON) here. Install Python 3.11 or newer, or: make $(MAKECMDGOALS) PYTHON=path"; \
"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
  || say "$(PYTHON) is older than 3.11. Choose a newer one: make $(MAKECMDGOALS) PYTHON=path"; \
"$(PYTHON)" -c 'import venv, ensurepip' 2>/dev/null \
  || say "$(PYTHON) cannot make environments: install its venv module (Debian, Ubuntu: apt install python3-venv)"; \
echo "Environment $(1): installing ($(3))"; \
$(1)/bin/python -m pip --version >/dev/null 2>&1 || "$(PYTHON)" -m venv --clear $(1) || say "$(1) could not be made"; \
$(1)/bin/python -m pip install -qq -r $(2) && $(1)/bin/python -m pip install -qq --no-deps -e . \
  || say "$(1): pip failed, see above. Check the network and the disk, then run the same command again"; \
touch $@
endef
