"""Greedy speculative decoding in two jitted steps over the library's own models.

    python examples/speculative_decoding.py

A DFlash drafter proposes a block, the target verifies it in one pass, and the accepted prefix is
committed together with one bonus token. The output equals that of plain decoding.
"""

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx

from dflash.config import loader
from dflash.inference import request
from dflash.inference.cycle import verify
from dflash.inference.logits import sampling
from dflash.loading import job


def load():
    """Returns the target, the drafter and the tokenizer of the embedded tiny family."""
    family = job.prepare_models(loader.load("configs/tiny_dflash.yml"))
    family.load_weights()
    return family.target, family.drafter, family.tokenizer


def forward(target, drafter, tokens, position, cache):
    """Runs the target; returns its next token after each token, its features, and the cache."""
    positions = position[:, None] + jnp.arange(tokens.shape[1])
    output = target(tokens, positions, cache, feature_layers=drafter.feature_layers)
    return target.unembed(output.hidden).argmax(-1), output.features, output.cache


@nnx.jit
def cycle(target, drafter, anchor, position, cache, state):
    """Drafts a block after the anchor, verifies it, and shows the drafter the committed tokens."""
    params = sampling.SamplingParams.of(request.RequestSampling(temperature=0.0))
    greedy = sampling.SequenceSampler(jax.tree.map(lambda x: jnp.array([x]), params).with_keys())
    proposal, state = drafter.draft(state, anchor, position, greedy, target)
    block = jnp.concatenate([anchor[:, None], proposal.tokens], axis=1)
    sampled, features, cache = forward(target, drafter, block, position, cache)
    count = verify.coupled_chain(proposal.tokens, sampled).num_accepted + 1  # with the bonus token
    tokens = jnp.concatenate([anchor[:, None], sampled], axis=1)
    return sampled, count, cache, drafter.observe(state, position, tokens, count, features, target)


@nnx.jit
def prefill(target, drafter, prompt, cache, state):
    """Fills the target's cache and the drafter's state; returns them and the first output token."""
    start, length = jnp.zeros(1, jnp.int32), jnp.full(1, prompt.shape[1])
    sampled, features, cache = forward(target, drafter, prompt, start, cache)
    tokens = jnp.concatenate([prompt, sampled[:, -1:]], axis=1)
    return sampled[:, -1], cache, drafter.observe(state, start, tokens, length, features, target)


def generate(target, drafter, prompt, max_new_tokens):
    """Decodes up to a stop token; returns the output ids and the tokens committed in each cycle."""
    pages = -(-(len(prompt) + max_new_tokens + drafter.block_size) // 16)  # with a last block
    sizes = {"pages_per_sequence": pages, "num_pages": pages + 1, "page_size": 16}
    empty = target.new_cache(batch=1, **sizes), drafter.init_state(1, 16 * pages)
    cache, state = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), empty)
    cache = dataclasses.replace(cache, page_table=1 + jnp.arange(pages)[None])  # 0 is scratch.
    anchor, cache, state = prefill(target, drafter, jnp.array([prompt]), cache, state)
    output, lengths = anchor.tolist(), []
    while len(output) < max_new_tokens and output[-1] not in target.arch.eos_token_id:
        anchor, position = jnp.array(output[-1:]), jnp.array([len(prompt) + len(output) - 1])
        sampled, count, cache, state = cycle(target, drafter, anchor, position, cache, state)
        tokens = sampled[0, : int(count[0])].tolist()
        stops = [i + 1 for i, token in enumerate(tokens) if token in target.arch.eos_token_id]
        lengths.append(min([len(tokens), max_new_tokens - len(output), *stops]))
        output += tokens[: lengths[-1]]
    return output, lengths


if __name__ == "__main__":
    target, drafter, tokenizer = load()
    question = "Write an invitation from Dana to Peter. The occasion is a birthday party."
    prompt = tokenizer.encode_chat([{"role": "user", "content": question}])
    output, lengths = generate(target, drafter, prompt, max_new_tokens=48)
    print(tokenizer.decode(output), f"\nMean acceptance length: {sum(lengths) / len(lengths):.2f}")
