"""Answers by transformers' own ``generate``: a sampler that shares no code with the loops here. Torch is loaded when asked."""

from __future__ import annotations

from collections.abc import Sequence


def generate(target, prompt_ids: Sequence[int], count: int, max_new_tokens: int, seed: int) -> list[list[int]]:
    """``count`` answers at temperature 1, drawn side by side in one batch.

    Every field of sampling is set by value, and the model's own ``generation_config`` is put aside: a field left out would
    be filled from it, or from defaults such as ``top_k=50``. Global random state is left as it was.

    Args:
        target: a :class:`specdec.TorchModel`; its cache is not touched.
        prompt_ids: n >= 2 ids; all but the last are read once for the whole batch.
        max_new_tokens: tokens of each answer. End tokens do not end it.
        seed: of the whole batch.
    """
    import torch
    from transformers import DynamicCache, GenerationConfig

    model, own = target.model, target.model.generation_config
    settings = GenerationConfig(
        do_sample=True,
        num_beams=1,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        min_p=0.0,
        typical_p=1.0,
        repetition_penalty=1.0,
        max_new_tokens=max_new_tokens,
        min_new_tokens=max_new_tokens,
        eos_token_id=None,
        pad_token_id=0,
        use_cache=True,
    )
    ids = torch.tensor([list(prompt_ids)], device=target.device)
    with torch.inference_mode(), torch.random.fork_rng():
        cache = DynamicCache()
        model(input_ids=ids[:, :-1], cache=cache, use_cache=True, logits_to_keep=1)
        cache.batch_repeat_interleave(count)
        torch.manual_seed(seed)
        model.generation_config = GenerationConfig()
        try:
            batch = ids.expand(count, -1)
            answers = model.generate(
                batch, attention_mask=torch.ones_like(batch), generation_config=settings, cache=cache
            )
        finally:
            model.generation_config = own
    return answers[:, ids.shape[1] :].tolist()
