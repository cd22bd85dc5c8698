# Measure, analyse, render: one rule a step. `make` is the front door; see README.
#
#   snakemake --cores 1 html                          the published book, from committed records
#   snakemake --cores 1 pdf                           the same as one PDF
#   snakemake --cores 1 --config profile=quick book   measure this machine first
#   snakemake --cores 1 --config profile=full configuration=gguf-draft study    one configuration only

import json
import os
import shlex
import sys

from specdec.study import configurations, records

MEASURED = "profile" in config  # `html` renders what is there, `book` and `study` measure first
PROFILE = config.get("profile", "quick")
STUDY = configurations.study()
if PROFILE not in STUDY.profiles:
    sys.exit(f"unknown profile {PROFILE!r}; there are {', '.join(STUDY.profiles)}")
PUBLISHED = records.published()
LOCAL = records.folder(PROFILE)
MACHINE = config.get("machine") or (LOCAL.name if MEASURED else next(iter(PUBLISHED), LOCAL.name))
if not MEASURED and not (records.RESULTS / MACHINE).is_dir():
    there = ", ".join(sorted(p.name for p in records.RESULTS.glob("*"))) or "none"
    sys.exit(f"no records of a machine {MACHINE!r} in data/results; there are: {there}")

# Records that are there before anything runs; what is measured now is an output of its own rules.
COMMITTED = sorted({MACHINE, *PUBLISHED} - ({LOCAL.name} if MEASURED else set()))

FILES = {
    "latency": ["latency.csv", "bandwidth.csv"],
    "decode": ["answers.csv", "rounds.csv", "costs.csv"],
    "sample": ["tokens.csv"],
    "rows": ["onestep.csv", "passes.csv"],
    "repeats": ["repeats.csv"],
    "peers": ["peers.csv"],
    "teeth": ["detection.csv", "calibration.csv"],
}
# Code of one step only.
OWN = {
    "sample": ["specdec/study/reference.py"],
    "rows": ["specdec/study/rows.py"],
    "repeats": ["specdec/study/reference.py"],
    "peers": ["specdec/study/peers.py"],
    "teeth": ["specdec/study/teeth.py", "specdec/study/toys.py", "specdec/study/rows.py"],
}
CHAPTERS = ["verification-cost", "acceptance", "speedup", "cost-model", "machines", "peers", "explore"]
CHAPTERS += ["equivalence", "overview"]
EXECUTED = expand("book/notebooks/{chapter}.ipynb", chapter=CHAPTERS)
PAGES = expand("book/configurations/{name}.md", name=configurations.with_page())


def here(path):
    return str(path.relative_to(configurations.ROOT))


def sources(*patterns):
    return sorted(here(path) for pattern in patterns for path in configurations.ROOT.glob(pattern))


BOOK = [
    *["book/index.ipynb", *EXECUTED, *PAGES, "book/notebooks/figures.ipynb"],
    *sources("book/*.md", "book/*.yml", "book/*.bib", "book/_ext/*.py", "book/_static/*", "book/_templates/*"),
    *sources("specdec/**/*.py", "_config.yml"),  # the reference is made from docstrings
]
RENDER = "{sys.executable} -m specdec.study.pages book && jupyter-book build book -n -W --keep-going -q --builder "
PDF = "_build/pdf/lossless-but-not-free.pdf"


def planned():
    """Configurations of the profile that can run here, and why the others cannot."""
    from specdec.study import pairs

    reasons = {name: pairs.unavailable(STUDY.configurations[name]) for name in STUDY.profiles[PROFILE]}
    chosen = [config["configuration"]] if "configuration" in config else list(reasons)
    if unknown := set(chosen) - set(reasons):
        sys.exit(f"profile {PROFILE} measures no configuration {unknown.pop()!r}; it has {', '.join(reasons)}")
    return [n for n in chosen if reasons[n] is None], {n: why for n, why in reasons.items() if why}


PLANNED, SKIPPED = planned() if MEASURED else ([], {})
RECORDS = [
    f"{here(LOCAL)}/{name}/{file}"
    for name in PLANNED
    for step in STUDY.profiles[PROFILE][name].steps()
    for file in FILES[step]
] + ([f"{here(LOCAL)}/skipped.json"] if MEASURED else [])


# What the pages are made from: the records of the machine, and those of the published ones that it is compared with.
READ = RECORDS + sources(*[f"data/results/{name}/**/*.*" for name in COMMITTED])
BESIDE = next(iter(PUBLISHED), MACHINE)


RUN = "{sys.executable} -m specdec.study.execute {input.notebook} {params.executed} --parameters {params.json:q}"

# Snakemake tells every job to use as many threads as its rule claims. What is measured is what the machine does when it
# is left alone: the variables are put back to what they were.
THREADS = ("OMP", "GOTO", "OPENBLAS", "MKL", "VECLIB", "NUMEXPR")
ALONE = "".join(
    f"export {v}={shlex.quote(os.environ[v])}; " if v in os.environ else f"unset {v}; "
    for v in (f"{name}_NUM_THREADS" if name != "VECLIB" else "VECLIB_MAXIMUM_THREADS" for name in THREADS)
)


def measuring(step):
    def parameters(wildcards):
        plan = STUDY.profiles[PROFILE][wildcards.configuration].steps()[step].model_dump()
        own = {"configuration": wildcards.configuration, "profile": PROFILE}
        return json.dumps(own | {"results": f"{here(LOCAL)}/{wildcards.configuration}"} | plan)

    return parameters


def weight_files(wildcards):
    return [f"_build/weights/{name}.ok" for name in STUDY.configurations[wildcards.configuration].weights()]


def analysing(wildcards):
    return json.dumps({"machine": MACHINE, "published": BESIDE})


def earlier(wildcards):
    """The page of figures shows those of the chapters, in the order of the book, and says how to cite them."""
    return [*EXECUTED, "CITATION.cff", "_config.yml", "book/_toc.yml"] if wildcards.chapter == "figures" else []


rule html:
    input:
        "_build/html/index.html",


rule pdf:
    input:
        PDF,


rule book:
    input:
        RECORDS,
        "_build/html/index.html",


rule study:
    input:
        RECORDS,


rule weights:
    output:
        touch("_build/weights/{name}.ok"),
    shell:
        "{sys.executable} -m specdec.models.weights {wildcards.name}"


rule skipped:
    output:
        f"{here(LOCAL)}/skipped.json",
    params:
        skipped=SKIPPED,
    run:
        records.write_text(configurations.ROOT / output[0], json.dumps(params.skipped, indent=1) + "\n")


for step, files in FILES.items():

    rule:
        name:
            step
        input:
            notebook=f"notebooks/measure/{step}.ipynb",
            weights=weight_files,
            prompts=sources("data/prompts/*.yml"),
            code=sources("specdec/*.py", "specdec/models/*.py") + OWN.get(step, []),
        output:
            [f"{here(LOCAL)}/{{configuration}}/{file}" for file in files],
        params:
            executed=f"_build/measure/{LOCAL.name}/{{configuration}}/{step}.ipynb",
            json=measuring(step),
        threads: workflow.cores  # timings never run side by side
        shell:
            ALONE + RUN


rule analyse:
    input:
        notebook="notebooks/analyse/{chapter}.ipynb",
        records=READ,
        paper="data/paper.yml",
        study="data/configurations.yml",
        code=sources("specdec/*.py", "specdec/study/*.py", "specdec/study/*.html"),
        earlier=earlier,
    output:
        "book/{folder,(notebooks/)?}{chapter,[a-z-]+}.ipynb",
    params:
        executed=lambda wildcards, output: output[0],
        json=analysing,
    shell:
        RUN


rule configuration_pages:
    input:
        records=READ,
        study="data/configurations.yml",
        code=sources("specdec/*.py", "specdec/study/*.py"),
    output:
        PAGES,
    params:
        machines=[MACHINE, *PUBLISHED],
    shell:
        "{sys.executable} -m specdec.study.configuration_pages {params.machines}"


rule render:
    input:
        BOOK,
    output:
        "_build/html/index.html",
    shell:  # source maps serve those who debug the theme's scripts, and weigh a quarter of the site
        RENDER + "html && rm -f _build/html/_static/*/*.map"


rule printed:
    input:
        BOOK,
    output:
        PDF,
    shell:
        "{sys.executable} -m specdec.study.pdf && " + RENDER + "singlehtml && "
        "{sys.executable} -m specdec.study.pdf _build/singlehtml/index.html {output}"
