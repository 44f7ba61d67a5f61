"""Tests of the scripts in examples/."""

import importlib.util
import pathlib

from support import engines

ROOT = pathlib.Path(__file__).parents[1]


def test_speculative_decoding_equals_plain_decoding():
    path = ROOT / "examples/speculative_decoding.py"
    spec = importlib.util.spec_from_file_location("speculative_decoding", path)
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    target, drafter, words = example.load()
    prompt = words.encode_chat([{"role": "user", "content": "Hugo plants 28 trees in a park."}])
    output, lengths = example.generate(target, drafter, prompt, max_new_tokens=24)
    plain = engines.engine(on=target, batch_size=1, sync_every=8, max_length=len(prompt) + 24)
    (done,) = engines.decode(plain, [tuple(prompt)], 24)
    assert tuple(output) == done.output_ids
    assert sum(lengths) == len(output) - 1
    assert max(lengths) > 1
