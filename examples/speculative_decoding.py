"""Greedy speculative decoding as a plain Python loop over the library's own models.

    python examples/speculative_decoding.py

A DFlash drafter proposes a block, the target verifies it in one pass, and the accepted prefix is
committed together with one bonus token. The output equals that of plain decoding.
"""

import dataclasses

import jax
import jax.numpy as jnp

from dflash.config import schema
from dflash.drafters.dflash_config import DFlashConfig
from dflash.inference import verify
from dflash.inference.request import Sampling
from dflash.inference.sampling import SamplingParams, SequenceSampler
from dflash.loading import models, weights
from dflash.parallel.sharding import make_sharding
from dflash.text import tokenizer_loading


def load():
    """Returns the embedded target, its DFlash drafter, and their tokenizer."""
    options = {"dtype": "float32", "sharding": make_sharding({}, schema.SHARDING_RULES)}
    config = schema.TargetConfig(checkpoint="assets/tiny_target")
    source = models.find_target(config)
    target = models.build_target(config, source, **options)
    weights.load(target, source, options["sharding"])
    config = DFlashConfig(checkpoint="assets/tiny_dflash")
    source = models.find_drafter(config)
    drafter = models.build_drafter(config, source, target.arch, **options)
    weights.load(drafter, source, options["sharding"])
    return target, drafter, tokenizer_loading.for_target(source.directory, thinking=False)


def generate(target, drafter, prompt, max_new_tokens):
    """Decodes greedily; returns the output ids and the acceptance length of each cycle."""
    max_length = len(prompt) + max_new_tokens + drafter.block_size  # with room for a last block
    pages = -(-max_length // 16)
    sizes = {"pages_per_sequence": pages, "num_pages": pages + 1, "page_size": 16}
    empty = target.new_cache(batch=1, **sizes), drafter.init_state(1, max_length)
    cache, state = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), empty)
    table = jnp.arange(1, pages + 1, dtype=jnp.int32)[None]  # Page 0 is scratch.
    cache = dataclasses.replace(cache, page_table=table)
    greedy = jax.tree.map(lambda x: jnp.array([x]), SamplingParams.of(Sampling())).with_keys()
    sampler = SequenceSampler(greedy)

    def forward(tokens, position, cache):
        positions = position + jnp.arange(tokens.shape[1])[None]
        output = target(tokens, positions, cache, feature_layers=drafter.feature_layers)
        return target.unembed(output.hidden).argmax(-1), output.features, output.cache

    tokens, position = jnp.array([prompt], jnp.int32), 0
    sampled, features, cache = forward(tokens, position, cache)
    following = jnp.concatenate([tokens, sampled[:, -1:]], axis=1)
    count, output, lengths = len(prompt), [int(sampled[0, -1])], []
    while True:
        at, rows = jnp.array([position]), jnp.array([count])
        state = drafter.observe(state, at, following, rows, features, target)
        if len(output) >= max_new_tokens:
            return output, lengths
        position, anchor = position + count, jnp.array([output[-1]], jnp.int32)
        proposal, state = drafter.draft(state, anchor, jnp.array([position]), sampler, target)
        rows = jnp.concatenate([anchor[:, None], proposal.tokens], axis=1)
        sampled, features, cache = forward(rows, position, cache)
        accepted = int(verify.coupled_chain(proposal.tokens, sampled).num_accepted[0])
        committed = sampled[0, : accepted + 1].tolist()[: max_new_tokens - len(output)]
        following = jnp.concatenate([anchor[:, None], sampled], axis=1)
        count, output, lengths = len(committed), output + committed, [*lengths, len(committed)]


if __name__ == "__main__":
    target, drafter, words = load()
    question = "Write an invitation from Dana to Peter. The occasion is a birthday party."
    prompt = words.encode_chat([{"role": "user", "content": question}])
    output, lengths = generate(target, drafter, prompt, max_new_tokens=48)
    print(
        words.decode(output), f"Mean acceptance length: {sum(lengths) / len(lengths):.2f}", sep="\n"
    )
