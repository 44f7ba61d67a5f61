from support import engines, scripts


def test_speculative_decoding_equals_plain_decoding():
    example = scripts.load("examples/speculative_decoding.py")
    target, drafter, tokenizer = example.load()
    question = "Write an invitation from Dana to Peter. The occasion is a birthday party."
    prompt = tokenizer.encode_chat([{"role": "user", "content": question}])
    plain = engines.engine(on=target, batch_size=1, sync_every=8, max_length=len(prompt) + 39)
    stop_ids = target.arch.eos_token_id
    for limit, reason in ((24, "length"), (39, "stop")):  # Both need 5 pages: one compilation.
        output, lengths = example.generate(target, drafter, prompt, max_new_tokens=limit)
        (done,) = engines.decode(plain, [tuple(prompt)], limit, stop_ids=stop_ids)
        assert (tuple(output), reason) == (done.output_ids, done.finish_reason)
        assert sum(lengths) == len(output) - 1
        assert max(lengths) > 1
