"""What a user would pick instead, beside the loops here: the same prompts, the same number of greedy tokens. Torch is loaded when asked."""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import multiprocessing
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from specdec.study import configurations, pairs
from specdec.study.configurations import Configuration


@dataclass(frozen=True)
class Arm:
    """One way to decode.

    name: of the arm; library: whose loop it is, with its version; baseline: name of the arm in which the same library
    decodes with the same target alone, its own for that one; k: draft length, 0 without drafts, ``configurations.ADAPTIVE``
    where it adapts; decode: (prompt ids, tokens wanted) -> new tokens, greedy, past any end token, so many exactly, and
    everything forgotten from call to call.
    """

    name: str
    library: str
    baseline: str
    k: int
    decode: Callable[[list[int], int], list[int]]


def arms(names: Sequence[str], k: int, prompt_ids: Sequence[int]) -> tuple[list[Arm], dict[str, str]]:
    """The arms of configurations ``names``, of which the first says what the peers decode; and why others are left out.

    The first has an arm more, whose K adapts, up to 2 k; behind ``prompt_ids`` its costs are measured.
    """
    study = configurations.study().configurations
    reasons = {name: pairs.unavailable(study[name]) for name in names}
    found = ours({name: study[name] for name in names if not reasons[name]}, k, {names[0]: prompt_ids})
    first = study[names[0]]
    for maker in (transformers, llama_cpp_python, xllamacpp):
        made = maker(first, k)
        if isinstance(made, str):
            reasons[maker.__name__] = made
        else:
            found += made
    return found, {name: why for name, why in reasons.items() if why}


def ours(chosen: dict[str, Configuration], k: int, adaptive: dict[str, Sequence[int]]) -> list[Arm]:
    """Target-only and speculative decoding of this package; configurations with one and the same target share it.

    ``adaptive``: names of those that have an arm whose K adapts, and ids behind which its costs are measured.
    """
    import specdec
    from specdec import latency

    greedy, targets, found = specdec.Sampling(temperature=0), {}, []
    library = f"specdec {specdec.__version__}"

    def decoder(target, draft, k):
        return lambda ids, tokens: specdec.speculative(target, draft, ids, k, tokens, greedy).tokens

    for name, one in chosen.items():
        key = one.target_key()
        if key not in targets:
            target, alone = targets[key] = pairs.load_target(one), f"{name}, target alone"
            found.append(Arm(alone, library, alone, 0, decoder(target, None, 0)))
        target, alone = targets[key]
        draft = pairs.load_draft(one, target)
        found.append(Arm(name, library, alone, k, decoder(target, draft, k)))
        if name in adaptive:
            length = specdec.AdaptiveK(latency.measure_costs(target, draft, adaptive[name], 2 * k), 2 * k)
            found.append(
                Arm(f"{name}, adaptive", library, alone, configurations.ADAPTIVE, decoder(target, draft, length))
            )
    return found


def transformers(one: Configuration, k: int) -> list[Arm] | str:
    """``generate`` and assisted generation of transformers, on the weights as it loads them."""
    import torch
    from transformers import AutoModelForCausalLM

    from specdec.models import weights

    def load(name):
        folder = weights.converted(name)
        with weights.without_bars():
            return AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, one.dtype)).to(one.device)

    return generating(load(one.target), load(one.draft.weights) if one.draft.kind == "model" else None, k)


def generating(model, assistant, k: int) -> list[Arm]:
    """The arms of :func:`transformers` on two of its models, every field that matters set by value; one without assistant.

    The models' own ``generation_config`` is put aside for good.
    """
    import torch
    from transformers import GenerationConfig

    plain = {"do_sample": False, "num_beams": 1, "repetition_penalty": 1.0, "eos_token_id": None, "pad_token_id": 0}
    model.generation_config = GenerationConfig()
    if assistant is not None:
        assistant.generation_config = GenerationConfig(
            num_assistant_tokens=k, num_assistant_tokens_schedule="constant", assistant_confidence_threshold=0.0
        )

    def decode(helper, ids, tokens):
        batch = torch.tensor([ids], device=model.device)
        settings = GenerationConfig(**plain, max_new_tokens=tokens, min_new_tokens=tokens, use_cache=True)
        with torch.inference_mode():
            answer = model.generate(
                batch, attention_mask=torch.ones_like(batch), generation_config=settings, assistant_model=helper
            )
        return answer[0, len(ids) :].tolist()

    alone, library = "generate", f"transformers {importlib.metadata.version('transformers')}"
    found = [Arm(alone, library, alone, 0, lambda ids, tokens: decode(None, ids, tokens))]
    if assistant is not None:
        found.append(Arm("assisted generation", library, alone, k, lambda ids, tokens: decode(assistant, ids, tokens)))
    return found


def llama_cpp_python(one: Configuration, k: int) -> list[Arm] | str:
    """llama.cpp alone, built for this machine."""
    from specdec.models import loading, weights

    if why := loading.llama_cpp_missing(one.device):
        return why
    import llama_cpp
    import torch

    threads = torch.get_num_threads()
    model = llama_cpp.Llama(
        str(weights.fetch(one.target)),
        n_ctx=4096,
        n_gpu_layers=0 if one.device == "cpu" else -1,
        n_threads=threads,
        n_threads_batch=threads,
        verbose=False,
    )

    def decode(ids, tokens):
        model.reset()
        return [token for token, _ in zip(model.generate(ids, temp=0.0), range(tokens), strict=False)]

    alone = "llama.cpp, native build"
    return [Arm(alone, f"llama-cpp-python {llama_cpp.__version__}", alone, 0, decode)]


def xllamacpp(one: Configuration, k: int) -> list[Arm] | str:
    """llama.cpp from a wheel for many machines: alone, and with its own speculation."""
    if not importlib.util.find_spec("xllamacpp"):
        return "xllamacpp is not installed (`make llama` installs it)"
    import torch

    from specdec.models import weights

    files = [str(weights.fetch(name)) for name in one.weights()]

    def server(drafts):
        given = files if drafts else files[:1]
        here, there = multiprocessing.Pipe()
        spawn = multiprocessing.get_context("spawn")
        spawn.Process(target=_serve, args=(there, given, k, torch.get_num_threads()), daemon=True).start()
        there.close()
        try:
            here.recv()
        except EOFError:
            raise RuntimeError(f"xllamacpp cannot serve {' with '.join(given)}: see above") from None
        return here

    tokenizer = pairs.tokenizer(one)

    def decoder(server):
        def decode(ids, tokens):
            request = {"prompt": ids, "n_predict": tokens, "temperature": 0.0, "ignore_eos": True}
            server.send(request | {"cache_prompt": False})
            answer = server.recv()
            if answer.get("usage", {}).get("completion_tokens") != tokens:
                raise RuntimeError(f"xllamacpp was asked for {tokens} tokens and answered {answer}")
            # It gives text only: these ids may be fewer or more than were generated.
            return tokenizer(answer["choices"][0]["text"], add_special_tokens=False)["input_ids"]

        return decode

    alone, version = "llama.cpp, wheel", f"xllamacpp {importlib.metadata.version('xllamacpp')}"
    found = [Arm(alone, version, alone, 0, decoder(server(False)))]
    if one.draft.kind == "model":
        found.append(Arm("llama.cpp, wheel, own drafts", version, alone, k, decoder(server(True))))
    return found


def _serve(pipe, files, k, threads):
    """Answer completions until the pipe is closed, in a process of its own.

    The server computes in a thread of its own. In one process with torch that is one thread too many for the OpenMP
    library, which then lets idle threads sleep at once: every operation of every arm waits for them to wake.
    """
    import xllamacpp as library

    params = library.CommonParams()
    params.model.path = files[0]
    params.n_ctx, params.n_parallel, params.cache_prompt, params.verbosity = 4096, 1, False, -1
    own = params.speculative.draft
    for pool in (params.cpuparams, params.cpuparams_batch, own.cpuparams, own.cpuparams_batch):
        pool.n_threads = threads
    if len(files) > 1:
        own.mparams.path = files[1]
        own.n_max, own.n_min, own.p_min = k, 0, 0.0
        params.speculative.types = [library.common_speculative_type.COMMON_SPECULATIVE_TYPE_DRAFT_SIMPLE]
    server = library.Server(params)
    pipe.send(None)  # ready
    with contextlib.suppress(EOFError):
        while True:
            pipe.send(server.handle_completions(pipe.recv()))
