"""One adapter per request, over loopback."""

import pytest
from support import served
from support.adapters import write_adapter
from support.models import make_architecture, make_sharding

import dflash
from dflash.models.dense import Qwen3

PROMPT = "abcabcabcab"


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    place = tmp_path_factory.mktemp("adapted")
    arch = make_architecture(vocab_size=128, num_hidden_layers=1)
    target = Qwen3(arch, dtype="float32", sharding=make_sharding())
    directories = {name: write_adapter(place / name, target, seed=i) for i, name in enumerate("ab")}
    named = (f"serve.adapters.{name}={directory}" for name, directory in directories.items())
    with served.serving(place, *named, "serve.grammars=false", "decode.batch_size=2") as running:
        yield running, directories
        assert "Traceback" not in running.log.read_text()


def test_a_request_names_its_adapter(server):
    running, directories = server
    cards = running.get("/v1/models")[1]["data"]
    names = [(card["id"], card["parent"]) for card in cards]
    assert names == [("tiny", None), ("a", "tiny"), ("b", "tiny")]
    assert running.get("/v1/models/b")[1]["root"] == str(directories["b"])
    body = {"prompt": PROMPT, "max_tokens": 20}
    texts = {}
    for name in ("a", "tiny", "b", "a"):
        status, answer = running.post("/v1/completions", body | {"model": name})
        assert (status, answer["model"]) == (200, name)
        texts[name] = answer["choices"][0]["text"]
    generated = running.post(
        "/generate", {"text": PROMPT, "lora_path": "b", "sampling_params": {"max_new_tokens": 20}}
    )[1]
    assert generated["text"] == texts["b"]
    assert len(set(texts.values())) == 3
    config = served.config_for_decoding(running.config)
    for name in ("a", "b"):
        merged = dflash.LLM(config, f"target.adapter={directories[name]}", "drafter.name=none")
        (completion,) = merged.generate(PROMPT, dflash.Sampling(max_tokens=20))
        assert completion.text == texts[name]
    text = running.get("/metrics")[1].decode()
    assert 'dflash:adapter_cycles_total{adapter="b",' in text
    status, answer = running.post("/v1/completions", body | {"model": "c"})
    message = "model: \"c\" is not served here; this server has 'tiny', 'a', 'b'"
    assert (status, answer["error"]["message"]) == (404, message)
