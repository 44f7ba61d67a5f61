"""Measures how fast answers are decoded after long contexts, beside plain decoding.

    python experiments/speed_by_context.py configs/smollm2_135m_dflash.yml \
        --files docs/decoding.md docs/serving.md --contexts 1024 4096 \
        --drafters block_size=6 block_size=6,window=64 block_size=auto

Each prompt is the beginning of a file, of about as many tokens as the context, and a question about
it. Plain decoding and the config's drafter with each of these lists of keys answer greedily, in
turns. Prints the speed of each without the prompts' prefill, over that of plain decoding: the ratio
of medians over the rounds. All answers must be those of plain decoding.
"""

import argparse
import pathlib
import statistics

import acceptance_by_window

import dflash
from dflash import errors


def main() -> None:
    """Prints a line per context."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("config", help="config of decoding")
    parser.add_argument("overrides", nargs="*", help="key=value")
    parser.add_argument("--files", nargs="+", required=True, type=pathlib.Path)
    parser.add_argument("--contexts", nargs="+", type=int, required=True)
    parser.add_argument("--drafters", nargs="+", required=True, help="key=value,key=value")
    parser.add_argument("--tokens", type=int, default=64, help="tokens of each answer")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    documents = [path.read_text(encoding="utf-8") for path in args.files]
    sampling = dflash.Sampling(max_tokens=args.tokens, temperature=0.0)
    for context in args.contexts:
        # Room for the question and the chat template.
        room = f"decode.max_length={context + args.tokens + 64}"
        llm = dflash.LLM(args.config, *args.overrides, room)
        drafter = llm.config.drafter
        ways = {"plain": llm.with_drafter("none")} | {
            keys: llm.with_drafter(
                drafter.name,
                f"drafter.checkpoint={drafter.checkpoint}",
                *(f"drafter.{key}" for key in keys.split(",")),
            )
            for keys in args.drafters
        }
        prompts = [_prompt(llm, text, context) for text in documents]
        rounds = [
            {name: way.generate(prompts, sampling) for name, way in ways.items()}
            for _ in range(1 + args.rounds)
        ][1:]  # The first one compiles.
        print(f"context {context}: {_summary(rounds)}", flush=True)


def _prompt(llm: dflash.LLM, text: str, context: int) -> list[dict[str, str]]:
    tokens = len(llm.tokenizer.encode(text, add_special_tokens=False))
    if tokens < context:
        raise errors.InputError(f"a file has {tokens} tokens, but --contexts asks for {context}")
    asked = acceptance_by_window.question_after(llm.tokenizer, text, context)
    return [{"role": "user", "content": asked}]


def _summary(rounds: list[dict[str, list[dflash.Completion]]]) -> str:
    plain = [one.token_ids for one in rounds[0]["plain"]]
    speeds = {}
    for name in rounds[0]:
        done = [each[name] for each in rounds]
        if any([one.token_ids for one in each] != plain for each in done):
            raise SystemExit(f"{name}: an answer differs from that of plain decoding")
        speeds[name] = statistics.median(map(_tokens_per_second, done))
    taus = {name: _tau(done) for name, done in rounds[0].items()}
    return "  ".join(
        f"{name} {speed:.1f} tokens/s ({speed / speeds['plain']:.2f} x, tau {taus[name]:.2f})"
        for name, speed in speeds.items()
    )


def _tokens_per_second(done: list[dflash.Completion]) -> float:
    return 1e3 * sum(len(one.token_ids) - 1 for one in done) / sum(one.decode_ms for one in done)


def _tau(done: list[dflash.Completion]) -> float:
    lengths = [length for one in done for length in one.acceptance_lengths]
    return statistics.mean(lengths)


if __name__ == "__main__":
    main()
