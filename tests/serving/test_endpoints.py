"""Responses of the endpoints over loopback: their format, and tokens equal to plain decoding."""

import concurrent.futures
import itertools
import json
import pathlib
import re

import pytest
from support.served import decoded

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
PROMPT = "abcabcabcab"


def test_information_endpoints(server):
    assert server.get("/health") == (200, {"status": "ready"})
    assert server.get("/ping")[0] == server.post("/ping", {})[0] == 200
    assert "version" in server.get("/version")[1]
    (model,) = server.get("/v1/models")[1]["data"]
    assert (model["id"], model["root"], model["max_model_len"]) == ("tiny", "random", 128)
    assert server.get("/v1/models/tiny")[1] == model
    assert server.get("/v1/models/gpt-4")[0] == 404
    assert server.get("/get_model_info")[1]["is_generation"]
    assert server.get("/get_server_info")[1]["served_model_name"] == "tiny"
    error = {"message": "GET /nowhere: Not Found", "type": "not_found_error"}
    assert server.get("/nowhere") == (404, {"error": error | {"param": None, "code": None}})
    assert server.get(TEXT)[0] == 405


def test_new_weights_are_off_by_default(server):
    status, answer = server.post("/update_weights", {"path": "/tmp"})
    assert (status, "serve.update_weights=true" in answer["error"]["message"]) == (404, True)


def test_acceptance_of_a_request(server):
    body = {"prompt": PROMPT, "max_tokens": 24, "include_metrics": True}
    _, answer = server.post(TEXT, body)
    counts = answer["metrics"]["speculative_decoding"]
    histogram, steps = counts["acceptance_histogram"], counts["num_spec_steps"]
    assert (sum(histogram), len(histogram)) == (steps, counts["num_spec_tokens"] + 1)
    accepted = sum(count * number for count, number in enumerate(histogram))
    assert accepted == counts["num_accepted_draft_tokens"]
    assert counts["mean_acceptance_length"] == 1 + accepted / steps
    assert counts["draft_acceptance_rate"] == accepted / counts["num_draft_tokens"]
    assert server.events(TEXT, body)[-1]["metrics"]["speculative_decoding"] == counts
    assert "metrics" not in server.post(TEXT, {"prompt": PROMPT, "max_tokens": 2})[1]
    assert server.post(TEXT, body | {"n": 2})[1]["error"]["param"] == "include_metrics"


@pytest.mark.parametrize("by", ["the server", "LLM"])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_output_is_that_of_plain_decoding(server, temperature, by):
    parameters = {"temperature": temperature, "max_tokens": 24, "seed": 5}
    expected = server.plain(PROMPT, **parameters)
    if by == "LLM":
        assert bytes(decoded(server.config, PROMPT, **parameters)).decode() == expected
    body = {"prompt": PROMPT, **parameters}
    assert server.text(body) == server.streamed(body) == expected


def test_output_is_the_same_in_a_batch_of_32(server):
    bodies = [
        {
            "prompt": list(range(1 + i, 4 + 2 * i)),
            "max_tokens": 4 + i % 17,
            "seed": i,
            "temperature": 0.8 if i % 2 else 0.0,
            "top_k": 40 if i % 3 else 0,
            "top_p": 0.9 if i % 5 else 1.0,
        }
        for i in range(33)
    ]

    def ask(body):
        return server.text(body) if body["seed"] % 3 else server.streamed(body)

    with concurrent.futures.ThreadPoolExecutor(33) as pool:
        texts = list(pool.map(ask, bodies))
    for text, body in zip(texts, bodies, strict=True):
        assert text == server.plain(**body), body["seed"]


def test_choices_have_independent_noise(server):
    parameters = {"temperature": 1.0, "max_tokens": 12, "seed": 3}
    body = {"prompt": [PROMPT, "xyz"], "n": 3, **parameters}
    answer, plain = (server.post(TEXT, body | {"drafting": how})[1] for how in (True, False))
    assert answer["choices"] == plain["choices"]
    assert [choice["index"] for choice in answer["choices"]] == list(range(6))
    texts = [choice["text"] for choice in answer["choices"]]
    assert len(set(texts[:3])) > 1
    assert texts[0] == server.plain(PROMPT, **parameters)
    assert answer["usage"]["completion_tokens"] == 72


def test_outputs_differ_without_a_seed(server):
    body = {"prompt": PROMPT, "temperature": 1.5, "max_tokens": 24}
    texts = {server.text(body) for _ in range(3)}
    assert len(texts) > 1


@pytest.mark.parametrize("stream", [False, True])
def test_stop_strings(server, stream):
    parameters = {"temperature": 1.0, "seed": 1, "max_tokens": 60}
    whole = server.plain(PROMPT, **parameters)
    stop = whole[21:26]
    at = whole.index(stop)
    body = {"prompt": PROMPT, "stop": ["never said", stop], **parameters}
    if stream:
        events = server.events(TEXT, body | {"stream_options": {"include_usage": True}})
        choices = [event["choices"][0] for event in events[:-1]]
        text, last, usage = "".join(one["text"] for one in choices), choices[-1], events[-1]
        assert [one["finish_reason"] for one in choices[:-1]] == [None] * (len(choices) - 1)
    else:
        _, usage = server.post(TEXT, body)
        (last,) = usage["choices"]
        text = last["text"]
    assert text == whole[:at]
    assert (last["finish_reason"], last["stop_reason"]) == ("stop", stop)
    assert usage["usage"]["completion_tokens"] == at + len(stop)
    kept = server.text(body | {"include_stop_str_in_output": True})
    assert kept == whole[: at + len(stop)]
    assert server.text(body | {"min_tokens": at + len(stop)}).startswith(kept)


def test_stop_tokens(server):
    parameters = {"temperature": 1.0, "seed": 1, "max_tokens": 60}
    whole = server.plain(PROMPT, **parameters)
    token = ord(whole[9])
    body = {"prompt": PROMPT, "stop_token_ids": [token], **parameters}
    (choice,) = server.post(TEXT, body)[1]["choices"]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", token)
    assert choice["text"] == whole[: whole.index(chr(token))]
    kept = server.text(body | {"include_stop_str_in_output": True})
    assert kept == whole[: whole.index(chr(token)) + 1]


def test_echo(server):
    body = {"prompt": PROMPT, "max_tokens": 4, "echo": True}
    text = server.text(body)
    assert text.startswith(PROMPT)
    assert len(text) == len(PROMPT) + 4
    assert server.streamed(body) == text


def test_a_streamed_chat(server):
    body = {"messages": [{"role": "user", "content": "abcabcabc"}], "max_tokens": 20}
    whole = server.post(CHAT, body)[1]
    events = server.events(CHAT, body)
    assert all("usage" not in event for event in events)
    assert events[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert {event["object"] for event in events} == {"chat.completion.chunk"}
    streamed = "".join(event["choices"][0]["delta"].get("content", "") for event in events)
    assert streamed == whole["choices"][0]["message"]["content"]
    assert events[-1]["choices"][0]["finish_reason"] == "length"
    counted = server.events(CHAT, body | {"stream_options": {"include_usage": True}})
    assert counted[-1]["choices"] == []
    assert counted[-1]["usage"] == whole["usage"]
    assert {event["usage"] for event in counted[:-1]} == {None}


def test_show_drafts_reports_origins(server):
    body = {"prompt": PROMPT, "max_tokens": 40, "show_drafts": True}
    choices = [event["choices"][0] for event in server.events(TEXT, body)]
    pieces = [piece for choice in choices for piece in choice["dflash"]["pieces"]]
    visible = "".join(text for text, origin in pieces if origin != "refused")
    assert visible == "".join(one["text"] for one in choices)
    last = choices[-1]["dflash"]
    drafted = [text for text, origin in pieces if origin == "drafted"]
    assert last["accepted"] == sum(map(len, drafted)) > 0
    own_after = [
        (refused, own)
        for (refused, one), (own, other) in itertools.pairwise(pieces)
        if (one, other) == ("refused", "own")
    ]
    assert own_after, "the target's own token stands in place of what was refused"
    assert all(refused[0] != own[0] for refused, own in own_after)
    assert last["tokens"] == 40
    assert last["decode_ms"] > 0
    assert last["tau"] == pytest.approx(39 / last["cycles"], rel=0.2)
    del body["prompt"]
    body["messages"] = [{"role": "user", "content": PROMPT}]
    whole = server.post(CHAT, body)[1]["choices"][0]
    choices = [event["choices"][0] for event in server.events(CHAT, body)]
    pieces = [piece for one in choices if "dflash" in one for piece in one["dflash"]["pieces"]]
    visible = "".join(text for text, origin in pieces if origin != "refused")
    assert visible == whole["message"]["content"]
    assert visible == "".join(one["delta"].get("content", "") for one in choices)
    assert {origin for _, origin in pieces} == {"drafted", "own", "refused"}


def test_sglang_generate(server):
    sampling = {"max_new_tokens": 12, "temperature": 0, "ignore_eos": True}
    body = {"text": PROMPT, "sampling_params": sampling}
    _, answer = server.post("/generate", body)
    expected = server.plain(PROMPT, max_tokens=12)
    meta = answer["meta_info"]
    assert (answer["text"], answer["output_ids"]) == (expected, list(expected.encode()))
    assert (meta["prompt_tokens"], meta["completion_tokens"]) == (len(PROMPT), 12)
    assert meta["finish_reason"] == {"type": "length", "length": 12}
    assert meta["spec_accept_length"] == 12 / meta["spec_verify_ct"]
    # The last cycle has no token of the target's own if the limit is within its draft.
    assert meta["spec_accept_token_num"] - (11 - meta["spec_verify_ct"]) in (0, 1)
    _, several = server.post("/generate", {**body, "text": [PROMPT, "x"]})
    assert [type(one["text"]) for one in several] == [str, str]
    assert several[0]["text"] == answer["text"]
    chunks = server.events("/generate", body)
    texts = [chunk["text"] for chunk in chunks]
    assert all(late.startswith(early) for early, late in itertools.pairwise(texts))
    assert texts[-1] == answer["text"]
    assert server.post("/flush_cache", {})[0] == 200
    assert server.get("/flush_cache")[0] == 405, "a link must not change the state"


def test_tokenize_and_detokenize(server):
    body = {"model": "tiny", "prompt": "abc", "add_special_tokens": False}
    _, response = server.post("/tokenize", body)
    assert response["tokens"] == [97, 98, 99]
    assert (response["count"], response["max_model_len"]) == (3, 128)
    assert server.post("/detokenize", {"tokens": [97, 98, 99]}) == (200, {"prompt": "abc"})
    chat = {"messages": [{"role": "user", "content": "a"}], "return_token_strs": True}
    assert server.post("/tokenize", chat)[1]["token_strs"] == ["a", "\n"]


def test_responses_carry_the_request_id(server):
    headers = server.exchange("GET", "/health", **{"X-Request-Id": "mine-7"})[1]
    assert headers["x-request-id"] == "mine-7"
    headers = server.exchange("GET", "/health", **{"X-Request-Id": "no id"})[1]
    assert len(headers["x-request-id"]) == 32


def test_the_page_allows_only_its_own_script(server):
    status, headers, content = server.exchange("GET", "/")
    policy = headers["Content-Security-Policy"]
    assert status == 200
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert policy.count("'sha256-") == 2
    assert b"http://" not in content.replace(b"http://www.w3.org", b"")
    assert b"https://" not in content


def test_metrics(server):
    server.post(TEXT, {"prompt": PROMPT, "max_tokens": 24})
    lines = server.get("/metrics")[1].decode().splitlines()
    # As vLLM's own benchmark reads them.
    series = {}
    for line in lines:
        if line.startswith("vllm:spec_decode"):
            name = line.split("{")[0].split()[0]
            if name.endswith("_total"):
                series.setdefault(name, []).append(float(line.split()[-1]))
    drafts = series["vllm:spec_decode_num_drafts_total"][0]
    accepted = series["vllm:spec_decode_num_accepted_tokens_total"][0]
    assert drafts > 0 < accepted
    assert series["vllm:spec_decode_num_draft_tokens_total"] == [3 * drafts]
    positions = series["vllm:spec_decode_num_accepted_tokens_per_pos_total"]
    assert len(positions) == 3
    assert sum(positions) == accepted
    names = {line.split("{")[0] for line in lines if not line.startswith("#")}
    expected = """vllm:num_requests_running vllm:num_requests_waiting vllm:kv_cache_usage_perc
    vllm:cache_config_info vllm:prefix_cache_queries_total vllm:prefix_cache_hits_total
    vllm:num_preemptions_total vllm:prompt_tokens_total vllm:generation_tokens_total
    vllm:request_success_total vllm:time_to_first_token_seconds_bucket
    vllm:inter_token_latency_seconds_bucket vllm:e2e_request_latency_seconds_bucket
    vllm:request_queue_time_seconds_bucket vllm:request_time_per_output_token_seconds_bucket
    dflash:block_sizes_total dflash:dispatches_total dflash:step_seconds_bucket
    dflash:cycle_seconds_total"""
    assert set(expected.split()) <= names


def test_logprobs(server):
    parameters = {"max_tokens": 10, "temperature": 0.7, "seed": 2}
    body = {"prompt": PROMPT, "logprobs": 2, **parameters}
    _, answer = server.post(TEXT, body)
    (choice,) = answer["choices"]
    logprobs = choice["logprobs"]
    assert "".join(logprobs["tokens"]) == choice["text"]
    assert logprobs["text_offset"] == list(range(10))
    assert all(logprob <= 0 for logprob in logprobs["token_logprobs"])
    for token, logprob, top in zip(
        logprobs["tokens"], logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True
    ):
        assert top[token] == logprob
        assert 2 <= len(top) <= 3
        assert max(top.values()) >= logprob
    events = server.events(TEXT, body)
    parts = [event["choices"][0]["logprobs"] for event in events]
    for key in logprobs:
        joined = [one for part in parts for one in part[key]]
        expected = pytest.approx(logprobs[key]) if key == "token_logprobs" else logprobs[key]
        assert joined == expected


def test_logprobs_of_a_chat_and_of_sglang(server):
    parameters = {"max_tokens": 6, "temperature": 0}
    messages = [{"role": "user", "content": "abc"}]
    _, answer = server.post(
        CHAT, {"messages": messages, "logprobs": True, "top_logprobs": 3, **parameters}
    )
    content = answer["choices"][0]["logprobs"]["content"]
    assert "".join(one["token"] for one in content) == answer["choices"][0]["message"]["content"]
    for one in content:
        assert bytes(one["bytes"]).decode() == one["token"]
        assert len(one["top_logprobs"]) == 3
        assert one["top_logprobs"][0]["logprob"] == one["logprob"]  # greedy
    sampling = {"max_new_tokens": 6, "temperature": 0}
    body = {"text": "abc\n", "sampling_params": sampling, "return_logprob": True}
    _, generated = server.post("/generate", {**body, "top_logprobs_num": 3})
    logprobs = generated["meta_info"]["output_token_logprobs"]
    assert [one[0] for one in logprobs] == pytest.approx([one["logprob"] for one in content])
    assert [one[1] for one in logprobs] == generated["output_ids"]


def test_biases_and_penalties(server):
    body = {"prompt": PROMPT, "max_tokens": 12}
    assert server.text(body | {"logit_bias": {str(ord("q")): 100}}) == "q" * 12
    plain = server.text(body)
    penalties = {"presence_penalty": 2.0, "frequency_penalty": 2.0, "repetition_penalty": 50.0}
    for name, value in penalties.items():
        text = server.text({**body, name: value, "temperature": 0})
        assert len(set(text)) > len(set(plain)), name
        assert server.streamed({**body, name: value}) == text


def test_a_prefix_cache_hit_changes_no_output(server):
    """Sends a request twice and compares tokens and accepted drafts."""
    body = {"prompt": "the quick brown fox jumps over the lazy dog; " * 2, "max_tokens": 30}
    server.post("/flush_cache", {})
    (_, first), (_, second) = server.post(TEXT, body), server.post(TEXT, body)
    assert first["choices"] == second["choices"]
    details = "completion_tokens_details"
    assert first["usage"][details] == second["usage"][details]
    cached = [one["usage"]["prompt_tokens_details"]["cached_tokens"] for one in (first, second)]
    assert cached[0] == 0 < cached[1]


def test_outputs_match_their_constraint(server):
    schema = {
        "type": "object",
        "properties": {"name": {"enum": ["ann", "bob"]}, "age": {"type": "integer", "maximum": 9}},
        "required": ["name", "age"],
        "additionalProperties": False,
    }
    # An untrained model would go on with the spaces that JSON allows.
    spaces = {str(ord(one)): -100 for one in " \t\n\r"}
    parameters = {"stop_token_ids": [0], "max_tokens": 60, "temperature": 0.9, "logit_bias": spaces}
    form = {"type": "json_schema", "json_schema": {"name": "person", "schema": schema}}
    messages = [{"role": "user", "content": "who?"}]
    for seed in range(3):
        body = {"messages": messages, "response_format": form, "seed": seed, **parameters}
        choice = server.post(CHAT, body)[1]["choices"][0]
        person = json.loads(choice["message"]["content"].rstrip("\0"))
        assert set(person) == {"name", "age"}
        assert person["age"] <= 9
        assert choice["finish_reason"] == "stop"
    pattern = "[ab]{3}-[0-9]{2}"
    text = server.text({"prompt": "x", "guided_regex": pattern, **parameters})
    assert re.fullmatch(pattern, text.rstrip("\0"))
    sampling = {"regex": pattern, "stop_token_ids": [0], "max_new_tokens": 20}
    _, response = server.post("/generate", {"text": "x", "sampling_params": sampling})
    assert re.fullmatch(pattern, response["text"].rstrip("\0"))


def test_requests_in_the_documentation(server):
    page = pathlib.Path(__file__).parents[2] / "docs" / "serving.md"
    examples = re.findall(r"curl .*?127\.0\.0\.1:8000(\S+) .*?-d '(.*?)'\n", page.read_text(), re.S)
    assert len(examples) >= 2
    for path, body in examples:
        assert server.post(path, body.encode())[0] == 200


def test_cached_tokens_are_those_of_the_same_salt(server):
    """A prompt counts once, however many outputs it has."""
    prompt = "the quick brown fox jumps over the lazy cat; " * 2
    details = "prompt_tokens_details"

    def cached(**fields):
        usage = server.post(TEXT, {"prompt": prompt, "max_tokens": 2, **fields})[1]["usage"]
        return usage[details]["cached_tokens"]

    assert cached(cache_salt="one") == 0
    assert cached(cache_salt="two") == 0
    whole = cached(cache_salt="one")
    assert 0 < whole < len(prompt)
    assert cached(cache_salt="one", n=4) == whole
    assert cached(cache_salt="three", n=4) == 0
    _, answer = server.post("/generate", {"text": prompt, "cache_salt": "two"})
    assert answer["meta_info"]["cached_tokens"] == whole


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rules_of_tokens(server, temperature):
    """A drafted output is that of plain decoding under the same rules."""
    letters = [*map(ord, "abcdefgh")]
    body = {"prompt": PROMPT, "max_tokens": 24, "seed": 1, "temperature": temperature}
    free = server.text(body | {"allowed_token_ids": letters})
    assert {*free} <= {*"abcdefgh"}
    word = free[5:7]
    body |= {"allowed_token_ids": letters, "bad_words": [word], "stop_token_ids": [0]}
    text = server.text(body)
    assert len(text) == 24
    assert word not in text
    place = free.index(word)
    assert text[: place + 1] == free[: place + 1], "only the last token of a word is masked"
    assert text == server.plain(**body)


def test_ids_of_tokens(server):
    body = {"prompt": PROMPT, "max_tokens": 9, "return_token_ids": True}
    (choice,) = server.post(TEXT, body)[1]["choices"]
    assert choice["prompt_token_ids"] == [*map(ord, PROMPT)]
    assert bytes(choice["token_ids"]).decode() == choice["text"]
    first, *others = [event["choices"][0] for event in server.events(TEXT, body)]
    assert first["prompt_token_ids"] == choice["prompt_token_ids"]
    assert not any("prompt_token_ids" in event for event in others)
    ids = itertools.chain(*(event["token_ids"] for event in (first, *others)))
    assert [*ids] == choice["token_ids"]
    chat = {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": 9}
    chat |= {"return_token_ids": True}
    answer = server.post(CHAT, chat)[1]
    assert answer["prompt_token_ids"] == [*map(ord, f"{PROMPT}\n")]
    events = server.events(CHAT, chat)
    assert events[0]["prompt_token_ids"] == answer["prompt_token_ids"]
    assert not any("prompt_token_ids" in event for event in events[1:])
    ids = itertools.chain(*(event["choices"][0].get("token_ids", []) for event in events))
    assert [*ids] == answer["choices"][0]["token_ids"]


def test_log_probabilities_of_a_prompt(server):
    """Those of decoding, once its output is a part of the prompt."""
    ids = [*map(ord, PROMPT)]
    body = {"prompt": ids, "max_tokens": 9, "logprobs": 2, "return_token_ids": True}
    (choice,) = server.post(TEXT, body)[1]["choices"]
    longer = {"prompt": [*ids, *choice["token_ids"]], "max_tokens": 1, "logprobs": 2}
    (echoed,) = server.post(TEXT, longer | {"echo": True})[1]["choices"]
    logprobs, decoded = echoed["logprobs"], choice["logprobs"]
    assert "".join(logprobs["tokens"]) == echoed["text"]
    assert [*itertools.accumulate(map(len, logprobs["tokens"]), initial=0)][:-1] == (
        logprobs["text_offset"]
    )
    assert (logprobs["token_logprobs"][0], logprobs["top_logprobs"][0]) == (None, None)
    output = slice(len(ids), len(ids) + 9)
    assert logprobs["token_logprobs"][output] == pytest.approx(decoded["token_logprobs"], abs=1e-4)
    for one, other in zip(logprobs["top_logprobs"][output], decoded["top_logprobs"], strict=True):
        assert one == pytest.approx(other, abs=1e-4)
    answer = server.post(TEXT, longer | {"prompt_logprobs": 1, "logprobs": None})[1]
    first, *others = answer["choices"][0]["prompt_logprobs"]
    assert first is None
    assert len(others) == len(longer["prompt"]) - 1
    pairs = zip(longer["prompt"][1:], others, logprobs["token_logprobs"][1:], strict=False)
    for token, position, logprob in pairs:
        entry = position[str(token)]
        assert entry["logprob"] == pytest.approx(logprob, abs=1e-4)
        assert len(position) == 1 + (entry["rank"] > 1)
        assert entry["decoded_token"] == chr(token)
    chat = {"messages": [{"role": "user", "content": "ab"}], "prompt_logprobs": 0, "max_tokens": 1}
    assert len(server.post(CHAT, chat)[1]["prompt_logprobs"]) == len("ab\n")
    for name, fields in {"echo": {"echo": True}, "prompt_logprobs": {"prompt_logprobs": 1}}.items():
        status, problem = server.post(TEXT, longer | fields | {"stream": True})
        assert (status, problem["error"]["param"]) == (400, name)
