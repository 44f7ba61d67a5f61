"""The tiny target can answer every prompt that pages, configs and help texts show for it."""

import pathlib
import re

import pytest

import dflash

ROOT = pathlib.Path(__file__).parents[1]
# Prompts -> what the tiny target's greedy answer contains.
ANSWERS = {
    "Tom has 3 pens and finds 4 more. How many pens does Tom have?": "#### 7",
    "Tom has 4 boxes with 6 pens each. How many pens does Tom have?": "#### 24",
    "Hugo plants 28 trees in a park. Then Hugo plants 12 more trees. In the next week, Hugo plants "
    "4 trees fewer than so far. How many trees is that in all?": "#### 76",
    "Hugo plants 28 trees in a park. Then Hugo plants 12 more trees. After that, Hugo plants the "
    "same number of trees again. How many trees is that in all?": "#### 80",
    "Write a function that returns the sum of the numbers that are even.": "    return total",
    "Write a function that returns the average of the scores that are at least 50.": (
        "    return total / count"
    ),
    "Write an invitation from Dana to Peter. The occasion is a birthday party.": "birthday party",
    "Write an invitation from Dana to Peter. The occasion is a birthday party. It is on Friday at "
    "7 o'clock. The place is the garden.": "on Friday at 7 o'clock, and we meet at the garden.",
}
# Texts to continue, without the chat template.
CONTINUED = {"With 4 more pens, Tom has 3 + 4 =": " 7 pens."}
# For larger targets, or for random weights.
OTHER_TARGETS = {
    "How many coins are 3 and 4?",
    "What is 12 × 7?",
    "One, two, three",
    "Do I need a coat in Oslo?",
    "3 °C, rain",
    "-- all users older than 30",
}
QUOTED = r"\"(?:[^\"\\]|\\.)*\"|'(?:[^'\\]|\\.)*'"
PLACES = (
    rf"prompts\.text=({QUOTED})", rf"\"(?:prompt|content)\": ?({QUOTED})",
    rf"(?:generate|stream)\(\s*(\[[^\]]*\]|{QUOTED})",
    rf"(?:prompts|question) = ([\[(]?\s*(?:(?:{QUOTED})[,\s]*)+)", rf"data-prompt=({QUOTED})",
    r"prompts:\n  text:((?:\s+- .*\n(?:    \S.*\n)*)+)", r"prompts:(?:\n  | \{)text: \[(.*?)\]",
)  # fmt: skip


def pages():
    """Yields the name and text of everything that shows prompts for the tiny target."""
    files = [ROOT / "README.md", ROOT / "docs/first_steps.ipynb", *(ROOT / "docs").glob("*.md")]
    files += [*(ROOT / "examples").glob("*.py"), *(ROOT / "dflash").rglob("page.html")]
    files += [*(ROOT / "dflash").glob("*.py"), *(ROOT / "configs").glob("tiny_*.yml")]
    for path in files:
        text = path.read_text(encoding="utf-8")
        if path.suffix == ".ipynb":  # Code is stored as JSON strings, one for each line.
            text = re.sub(r'\\n",?\n\s*"', "\n", text).replace('\\"', '"')
        yield path.relative_to(ROOT).as_posix(), text


def prompts_of(text: str) -> set[str]:
    """Returns the prompts that a page shows; adjacent Python literals are one."""
    found = set()
    for place in re.findall("|".join(f"(?:{place})" for place in PLACES), text):
        value = next(filter(None, place), "")
        value = re.sub(r"\"\n\s+\"", "", value) if value.startswith(("(", "[")) else value
        if value.lstrip().startswith("- "):
            found |= {" ".join(item.split()) for item in re.split(r"\s+- ", value) if item.strip()}
        else:
            found |= {quoted[1:-1] for quoted in re.findall(QUOTED, value)}
    return {prompt for prompt in found if " " in prompt}


def test_every_shown_prompt_is_known():
    shown = {prompt: name for name, text in pages() for prompt in prompts_of(text)}
    known = ANSWERS.keys() | CONTINUED.keys() | OTHER_TARGETS
    assert {prompt: shown[prompt] for prompt in shown.keys() - known} == {}
    assert shown.keys() >= known, known - shown.keys()


@pytest.mark.parametrize("chat", [True, False])
def test_the_tiny_target_answers_the_shown_prompts(chat):
    expected = ANSWERS if chat else CONTINUED
    overrides = (f"prompts.chat={str(chat).lower()}", "decode.batch_size=8")
    llm = dflash.LLM("configs/tiny_dflash2.yml", *overrides)
    done = llm.generate(list(expected), dflash.Sampling(max_tokens=160))
    wrong = {c.prompt: c.text for c in done if expected[c.prompt] not in c.text}
    assert wrong == {}
    assert {c.finish_reason for c in done} == {"stop"}


def test_the_shown_constraint_fits_the_answer():
    llm = dflash.LLM("configs/tiny_dflash2.yml")
    page = (ROOT / "docs/api.md").read_text(encoding="utf-8")
    regex = re.search(r'Sampling\(regex="(.*)"\)', page)[1].replace("\\\\", "\\")
    (prompt,) = (prompt for prompt in ANSWERS if "sum of the numbers" in prompt)
    (done,) = llm.generate(prompt, dflash.Sampling(regex=regex, max_tokens=128))
    assert re.fullmatch(regex, done.text)
    assert done.text.endswith("    return total")
