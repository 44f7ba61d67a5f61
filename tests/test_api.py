"""The Python API: `import dflash`, dflash.LLM, and the commands as functions."""

import copy
import dataclasses
import doctest
import json
import math
import pathlib
import re

import numpy as np
import pytest
from safetensors import numpy as safetensors
from support import TESTS, failure
from support.engines import count_compilations
from support.models import small_llm
from support.trained_tokenizers import train_metaspace

import dflash
from dflash import errors, llm, sampling
from dflash.config import schema
from dflash.models.decoder import Decoder
from dflash.text.tokenizer_loading import load_tokenizer

CONFIG = "configs/tiny_dflash.yml"
QUESTION = "Tom has 4 boxes with 6 pens each. How many pens does Tom have?"
MESSAGES = [{"role": "user", "content": QUESTION}]


@pytest.fixture(scope="module")
def small():
    """A small random target, with all of its programs for short prompts."""
    made = small_llm()
    made.generate(QUESTION)
    made.generate(QUESTION, dflash.Sampling(temperature=1.0, max_tokens=2))
    return made


@pytest.fixture(scope="module")
def tiny():
    """The embedded tiny family."""
    made = dflash.LLM(CONFIG, "decode.batch_size=2", "decode.max_new_tokens=24")
    made.generate(QUESTION)
    return made


@pytest.mark.parametrize("last", [None, "stop"])
def test_an_output_keeps_the_space_of_its_first_token(small, tmp_path, last):
    """With a tokenizer whose decoder drops the first space of a text; a stop token has no text."""
    train_metaspace(tmp_path)
    spaced = copy.copy(small)
    spaced._job = dataclasses.replace(small._job, tokenizer=load_tokenizer(tmp_path))
    tokenizer = spaced.tokenizer
    prompt, word = tokenizer.encode("Hello"), tokenizer.encode("a b")[-2:]
    assert tokenizer.decode([*prompt, *word]) == "Hello b"
    space, letter = word
    # The biases make one token certain, so the output repeats it.
    bias, stops = {space: 100.0, letter: 0.0}, [space] if last else []
    given = dflash.Sampling(max_tokens=3, logit_bias=bias, stop_token_ids=stops)
    (completion,) = spaced.generate([prompt], given)
    stream = spaced.stream(prompt, given)
    text = "".join(piece.text for piece in stream)
    assert completion.token_ids == ((space,) if last else (space,) * 3)
    assert completion.text == text == stream.completion.text == ("" if last else "   ")


@pytest.fixture
def in_tmp(tmp_path, monkeypatch):
    """An empty working directory."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(scope="module")
def plain(small):
    return small.with_drafter("none")


def test_names_of_the_package():
    assert dflash.LLM is llm.LLM
    assert dflash.train.run.__module__ == "dflash.train"
    assert all(hasattr(dflash, name) for name in dflash.__all__)
    with pytest.raises(AttributeError, match="module 'dflash' has no attribute 'Llm'"):
        dflash.Llm  # noqa: B018
    assert (pathlib.Path(dflash.__file__).parent / "py.typed").exists()


def test_examples_in_docstrings(tiny, monkeypatch):
    """With the family of these tests, so that nothing is compiled for them."""
    monkeypatch.setattr(llm, "LLM", lambda config, *overrides: tiny)
    scope = {"LLM": llm.LLM, "Sampling": llm.Sampling}
    run = 0
    for module in (dflash, llm, sampling):
        for test in doctest.DocTestFinder().find(module, extraglobs=scope):
            assert doctest.DocTestRunner().run(test).failed == 0
            run += len(test.examples)
    assert run > 8


def test_the_notebook_prints_what_it_shows(tiny, capsys):
    notebook = json.loads((TESTS.parent / "docs" / "first_steps.ipynb").read_text("utf-8"))
    scope: dict = {}
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            exec("".join(cell["source"]), scope)
            shown = "".join(line for output in cell["outputs"] for line in output["text"])
            assert capsys.readouterr().out == shown
    assert scope["llm"].config.decode.batch_size == tiny.config.decode.batch_size


def test_completions_come_in_order_and_tell_how_they_came_about(small, plain):
    ids = small.tokenizer.encode(QUESTION)
    prompts = [QUESTION, np.array(ids), MESSAGES, QUESTION]
    how = dflash.Sampling(max_tokens=24)
    done, others = small.generate(prompts, how), plain.generate(prompts, how)
    assert all(one.prompt is prompt for one, prompt in zip(done, prompts, strict=True))
    assert done[1].prompt_token_ids == tuple(ids)
    assert done[0].token_ids == done[2].token_ids == done[3].token_ids, "greedy, and chat is on"
    for one, other in zip(done, others, strict=True):
        assert one.text == other.text == small.tokenizer.decode(one.token_ids)
        assert (one.finish_reason, len(one.token_ids)) == ("length", 24)
        assert sum(one.acceptance_lengths) == 23
        assert one.tau == 23 / len(one.acceptance_lengths)
        assert set(other.acceptance_lengths) == {1}
    assert max(map(max, (one.acceptance_lengths for one in done))) > 1
    assert small.generate([]) == []
    assert math.isnan(small.generate(QUESTION, dflash.Sampling(max_tokens=1))[0].tau)


def test_sampling_decides_how_an_output_is_drawn_and_ends(small, plain):
    # At this temperature even a sure model varies.
    how = dflash.Sampling(temperature=5.0, top_k=50, top_p=0.9, seed=3, max_tokens=8)
    drawn = small.generate([QUESTION] * 2, how)
    assert drawn[0].token_ids != drawn[1].token_ids, "each has noise of its own"
    again = [one.token_ids for one in plain.generate([QUESTION] * 2, how)]
    assert [one.token_ids for one in drawn] == again
    (greedy,) = small.generate(QUESTION)
    assert len(greedy.token_ids) == 24, "what is left out is the config's"
    stop = dflash.Sampling(stop_token_ids=[greedy.token_ids[9]])
    (stopped,) = small.generate(QUESTION, stop)
    end = greedy.token_ids.index(greedy.token_ids[9]) + 1
    assert (stopped.finish_reason, stopped.token_ids) == ("stop", greedy.token_ids[:end])


def test_pieces_of_a_stream_are_its_completion(small):
    (whole,) = small.generate(QUESTION)
    stream = small.stream(QUESTION)
    assert stream.completion is None
    pieces = list(stream)
    assert "".join(piece.text for piece in pieces) == whole.text == stream.completion.text
    assert tuple(id for piece in pieces for id in piece.token_ids) == whole.token_ids
    own = [piece for piece in pieces if not piece.drafted]
    assert all(len(piece.token_ids) == 1 for piece in own)
    # One from the prompt's own pass, and one at the end of each cycle, unless the limit cut it off.
    assert len(own) == 1 + len(whole.acceptance_lengths) - pieces[-1].drafted
    assert any(piece.drafted for piece in pieces)
    assert next(stream, None) is None


def test_a_stream_may_be_left(small):
    stream = small.stream(MESSAGES)
    first = next(stream)
    del stream
    assert small.chat(MESSAGES).token_ids[:1] == first.token_ids


def test_a_second_call_of_like_lengths_compiles_nothing(small):
    with count_compilations() as compilations:
        drawn = dflash.Sampling(temperature=1.0, max_tokens=40)
        small.generate(["Ann has 5 pens.", QUESTION], drawn)
        list(small.stream("def g(x):", dflash.Sampling(max_tokens=9, stop_token_ids=(3, 4))))
    assert compilations == []


def test_drafters_share_the_target(small, plain):
    assert plain._job.target is small._job.target
    assert plain.config.drafter == schema.DrafterConfig()
    assert plain.config.decode == small.config.decode
    assert small.config.drafter.name == "ngram", "it has not changed"


def test_drafters_of_one_build_share_their_programs(small):
    other = small.with_drafter("ngram")
    with count_compilations() as compilations:
        (mine,) = other.generate(QUESTION)
    assert compilations == []
    assert mine.acceptance_lengths == small.generate(QUESTION)[0].acceptance_lengths
    assert small.with_drafter("ngram", "drafter.block_size=4")._engine is None


@pytest.mark.parametrize(
    ("arguments", "given", "kind", "message"),
    [
        ((), {}, errors.ConfigError, "expected a config file, or target="),
        (("nowhere.yml",), {}, errors.ConfigError, "nowhere.yml: no such file"),
        ((), {"target": "no/where"}, errors.CheckpointError, "no/where: no such directory"),
        ((CONFIG,), {"drafter": "ngarm"}, errors.CheckpointError, "did you mean 'ngram'?"),
        (("dtype=float32",), {"target": "assets/tiny_target", "drafter": "assets/tiny_eagle3/.."},
         errors.CheckpointError, "config.json"),
    ],
)  # fmt: skip
def test_unusable_models_are_the_commands_errors(arguments, given, kind, message):
    assert message in failure(dflash.LLM, *arguments, kind=kind, **given)


@pytest.mark.parametrize(
    ("prompts", "sampling", "message"),
    [
        ([""], {}, "prompts[0]: empty prompt"),
        (["a", 3], {}, "prompts[1]: prompt: expected a string, not 3"),
        ([[1, "x"]], {}, 'prompts[0]: prompt_ids[1]: expected an integer, not "x"'),
        ([[99999]], {}, "prompts[0]: token id 99999 (position 0) is out of the vocabulary"),
        ([[{"role": "user"}]], {}, "prompts[0]: messages[0]: no content"),
        (["a"], {"max_tokens": 5000}, "prompts[0]: 2 prompt tokens + decode.max_new_tokens = 5002"),
        (["a"], {"max_tokens": 0}, "prompt 0: max_new_tokens: 0, expected 1 or more"),
        (["a"], {"max_tokens": "8"}, "Sampling: max_tokens: expected an integer, got '8'"),
        (["a"], {"temperature": -1}, "prompt 0: temperature: -1, expected a number of 0 or more"),
        (["a"], {"top_p": "x"}, "Sampling: top_p: expected a number, got 'x'"),
        (["a"], {"stop_token_ids": [-4]}, "prompt 0: stop id -4 is outside the vocabulary"),
        (["a"], {"min_p": 1.5}, "prompt 0: min_p: 1.5, expected a number from 0 to 1"),
        (["a"], {"logit_bias": {"5": 1.0}}, "Sampling: logit_bias: expected token ids that are"),
        (["a"], {"logit_bias": {5: "x"}}, "Sampling: logit_bias: expected biases that are numbers"),
        (["a"], {"logit_bias": {70000: 1.0}}, "prompt 0: logit_bias: token 70000 is outside"),
        (["a"], {"logit_bias": [5]}, "Sampling: logit_bias: expected biases by token id, got [5]"),
        (["a"], {"stop_token_ids": 3}, "Sampling: stop_token_ids: expected token ids, got 3"),
        (["a"], {"temperature": True}, "Sampling: temperature: expected a number, got True"),
        (["a"], {"ignore_eos": 1e39}, "Sampling: ignore_eos: expected True or False, got 1e+39"),
        (["a"], {"regex": 3}, "Sampling: regex: expected a string, got 3"),
        (["a"], {"regex": "a", "lark": "b"},
         "Sampling: regex and lark: expected at most one of them"),
        (["a"], {"regex": "("}, "regex: "),
        (["a"], {"json_schema": {"type": "nothing"}}, "json_schema: Invalid type: nothing"),
        (["a"], {"regex": "a", "ignore_eos": True}, "prompt 0: an output that matches a grammar"),
    ],
)  # fmt: skip
def test_unusable_prompts_are_the_commands_errors(small, prompts, sampling, message):
    def generate():
        small.generate(prompts, dflash.Sampling(**sampling))

    assert message in failure(generate, kind=errors.InputError)


def test_the_target_stays_when_the_drafter_changes(small):
    with pytest.raises(errors.ConfigError, match="with_drafter shares the target"):
        small.with_drafter("ngram", "dtype=bfloat16")


def test_a_model_without_a_config_file():
    made = dflash.LLM("dtype=float32", target="assets/tiny_target", drafter="assets/tiny_eagle3")
    assert made.config.drafter.name == "eagle3"
    assert made.config.target.checkpoint == "assets/tiny_target"
    assert isinstance(made._job.target, Decoder)
    assert made.with_drafter("assets/tiny_target").config.drafter.name == "autoregressive"
    assert made.with_drafter("ngram", "drafter.block_size=3").config.drafter.block_size == 3


@pytest.mark.parametrize(
    ("call", "kind", "message"),
    [
        (lambda: dflash.train.run("configs/train/dflash2.yml", "train.steps=0", workdir="w"),
         errors.ConfigError, "command line: train.steps: expected an integer >= 1 or null, got 0"),
        (lambda: dflash.convert.run("nowhere", "there", to="hf"), errors.CheckpointError,
         "nowhere: no such directory"),
        (lambda: dflash.convert.run("assets/tiny_target", "there", to="gguf"), errors.ConfigError,
         "flag --to=gguf: value should be one of <orbax|hf|maxtext>"),
    ],
)  # fmt: skip
def test_commands_as_functions_raise_what_the_commands_print(call, kind, message, in_tmp):
    with pytest.raises(kind, match=re.escape(message)):
        call()
    assert not any(in_tmp.iterdir())


def test_a_checkpoint_is_converted_from_python(in_tmp, capsys):
    path = dflash.convert.run("assets/tiny_dflash", "here", to="orbax")
    assert path == pathlib.Path("here")
    assert "orbax layout" in capsys.readouterr().out
    back = dflash.convert.run(path, in_tmp / "back", to="hf", dtype="bfloat16")
    assert (back / "model.safetensors").exists()


def test_new_weights_reach_every_instance_over_the_target(tiny):
    """And not while a stream is being read; see tests/inference/test_weight_update.py."""
    plain, (before,) = tiny.with_drafter("none"), tiny.generate(QUESTION)
    tensors = safetensors.load_file("dflash/assets/tiny_target/model.safetensors")
    # With the last norm negated, the likeliest token becomes the least likely one.
    changed = tensors | {"model.norm.weight": -tensors["model.norm.weight"]}
    stream = tiny.stream(QUESTION)
    next(stream)
    with pytest.raises(errors.InputError, match="an output is being streamed"):
        plain.update_weights(changed)
    assert "".join(piece.text for piece in stream) in before.text
    plain.update_weights(changed)
    (after,) = tiny.generate(QUESTION)
    assert after.token_ids == plain.generate(QUESTION)[0].token_ids != before.token_ids
    tiny.update_weights(tensors)
    assert tiny.generate(QUESTION)[0].token_ids == before.token_ids
