"""What limits trees: replays of trees, drafts that foresee the right candidate, and the study."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash import errors
from dflash.config import benchmark_schema, loader
from dflash.drafters.parts.draft_vocabulary import Shortlist
from dflash.inference.logits.sampling import SamplingParams, SequenceSampler
from dflash.inference.prefill import GREEDY
from dflash.inference.replay import Cycles
from dflash.measure import bench as benches
from experiments.acceptance import trees
from experiments.acceptance.foresight import Foresight

LOGITS = jnp.array([[[3.0, 2.0, 1.0, 0.0]] * 3])
POSITIONS = jnp.array([[1, 2, 3]])
TOKENS = jnp.array([[0, 0, 1, 3]])


def foresight(count):
    greedy = jax.tree.map(lambda x: x[None], SamplingParams.of(GREEDY)).with_keys()
    return Foresight(SequenceSampler(greedy), TOKENS, count)


@pytest.mark.parametrize(("count", "drafts"), [(1, [0, 0, 0]), (2, [0, 1, 0]), (4, [0, 1, 3])])
def test_the_right_token_is_drafted_if_it_is_among_the_likeliest(count, drafts):
    tokens, probs = foresight(count).propose(LOGITS, POSITIONS)
    assert tokens.tolist() == [drafts]
    assert probs is None
    best = foresight(count).candidates(LOGITS, POSITIONS, 2)
    assert best.tokens[0, :, 0].tolist() == drafts
    certain = np.isclose(best.scores[0, :, 0], 0)
    assert certain.tolist() == [token == own for token, own in zip(drafts, [0, 1, 3], strict=True)]


def test_the_right_token_is_found_by_its_name_in_a_shortlist():
    shortlist = Shortlist(jnp.array([[[7, 1, 3, 0]] * 3]), 8)
    tokens, _ = foresight(3).among(shortlist).propose(LOGITS, POSITIONS)
    assert tokens.tolist() == [[7, 1, 3]], "0 is the fourth"


def test_the_ends_of_answers_cut_whole_blocks():
    found = trees.whole_blocks([5, 2, 0], 4)
    assert found.tolist() == [[4, 1], [2, 0], [0, 0]]
    assert trees.tau(found) == 7 / 3


def test_each_rejection_has_a_reason():
    """One block whole, one that a larger tree accepts further, one without the right candidate."""
    own = Cycles(np.array([[4, 2, 1, 0]]), np.array([[9, 5, 3, 2]]), None)
    best = Cycles(np.array([[4, 9, 9, 9, 3, 9, 1, 9, 9]]), None, None)
    assert own.anchors.tolist() == [[0, 4, 6, 7]]
    found = trees.rejections(own, best, 4, [0])
    assert found == {"missing": pytest.approx(1 / 3), "undrafted": pytest.approx(1 / 3)}
    ended = Cycles(np.array([[3]]), np.array([[3]]), None)
    assert trees.rejections(ended, ended, 4, [0]) == {"missing": 0.0, "undrafted": 0.0}


CONFIG = """
target: {checkpoint: assets/tiny_target}
drafter: {name: dflash2, checkpoint: assets/tiny_dflash2}
strategies:
  chain:
  tree: {tree: {budget: 20}}
tasks: [math, chat]
prompts_per_task: 1
decode: {max_new_tokens: 40}
dtype: float32
"""


def load(tmp_path, *overrides):
    path = tmp_path / "config.yml"
    path.write_text(CONFIG)
    return loader.load(str(path), overrides, benchmark_schema.BenchmarkRun)


def test_the_study_replays_what_the_engine_does(tmp_path):
    config = load(tmp_path)
    result = list(trees.trees(config, (2, 16)))[-1].result
    rows = {(row["strategy"], row["task"]): row for row in result.rows}
    assert list(rows) == [(name, task) for name in ("chain", "tree") for task in ("math", "chat")]
    bench = benches.prepare(config)
    bench.load()
    bench.decode_later_turns()
    bench.compile()
    for (name, task), row in rows.items():
        done = [one for queue in bench.queues(task) for one in bench.decode(name, queue)]
        lengths = [length for one in done for length in one.acceptance_lengths]
        assert row["cycles"] == len(lengths)
        assert row["tau"] == pytest.approx(np.mean(lengths))
        gains = [row[key] for key in ("tau", "tau_2", "tau_16", "tau_all", "tau_whole")]
        assert gains == sorted(gains)
        assert 0 <= row["missing"] + row["undrafted"] <= 1
    chat = rows["chain", "chat"], rows["tree", "chat"]
    assert chat[0]["tau"] < chat[1]["tau"] <= chat[1]["tau_all"]
    assert chat[0]["tau_16"] == chat[0]["tau_all"], "a chain has 16 candidates"


def test_sampled_decoding_is_rejected(tmp_path):
    with pytest.raises(errors.ConfigError, match=r"decode\.temperature: trees replays greedy"):
        list(trees.trees(load(tmp_path, "decode.temperature=1")))
