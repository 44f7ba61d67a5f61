"""A server whose drafter has a device of its own."""

from support import served

DRAFTER = "drafter={name: autoregressive, checkpoint: random, block_size: 4, overlap: ssd}"


def test_answers_are_those_of_plain_decoding(tmp_path):
    with served.serving(tmp_path, DRAFTER) as server:
        for seed, prompt in enumerate(("abcabc", "x", "abcabcabcab" * 4)):
            asked = {"max_tokens": 20, "seed": seed, "temperature": 0.8}
            ids = served.decoded(server.config, prompt, **asked)
            assert "".join(map(chr, ids)) == server.text({"prompt": prompt, **asked})
        structure = {"name": "x", "schema": {"type": "boolean"}}
        shape = {"type": "json_schema", "json_schema": structure}
        body = {"prompt": "abc", "response_format": shape, "stop_token_ids": [0]}
        assert server.text(body) in ("true", "false")
        _, metrics = server.get("/metrics")
        lines = metrics.decode().splitlines()
        (lookups,) = (
            float(line.split()[-1])
            for line in lines
            if line.startswith("dflash:events_total") and 'event="speculation_lookups"' in line
        )
        assert lookups > 0
    assert "decode.prefix_cache: off" in server.log.read_text()
