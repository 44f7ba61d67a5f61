import json

import pytest

from dflash import errors
from dflash.data import files
from dflash.data.example import SPLITS

QUESTION = {"role": "user", "content": "Why?"}
ANSWER = {"role": "assistant", "content": "Because."}
EMPTY = 'messages[1]: the answer is empty: remove it, or give it "weight": 0 to keep it as context'
WEIGHT = "weight: expected 0 or 1, and 1 only for answers, which follow a message"
UNREAD = "is not read here; put it into messages, or remove it"


@pytest.fixture
def write(tmp_path):
    def write_lines(*lines, name="a.jsonl"):
        path = tmp_path / name
        texts = (line if isinstance(line, str) else json.dumps(line) for line in lines)
        path.write_text("".join(f"{text}\n" for text in texts))
        return str(path)

    return write_lines


def failure(*paths):
    with pytest.raises(errors.InputError) as caught:
        list(files.examples(paths, "train", 0.0))
    return str(caught.value)


def test_kinds(write):
    path = write(
        {"messages": [QUESTION, ANSWER], "id": 7},
        "",
        {"prompt": "Why?", "response": "Because."},
        {"index": 0, "prompt": "Why?", "prompt_ids": [1, 2], "output_ids": [3], "text": "x"},
    )
    one, two, three = files.examples([path], "train", 0.0)
    assert one.messages == two.messages == (QUESTION, ANSWER)
    assert one.source == two.source
    assert (three.prompt_ids, three.output_ids, three.messages) == ((1, 2), (3,), ())


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "not JSON: Expecting property name enclosed in double quotes at column 2"),
        ("[]", "expected a JSON object, not []"),
        ({}, "expected messages, prompt and response, or prompt_ids and output_ids; found nothing"),
        ({"prompt": "a"},
         "expected messages, prompt and response, or prompt_ids and output_ids; found 'prompt'"),
        ({"prompt": "a", "response": ""}, "empty response"),
        ({"prompt": "", "response": "a"}, "empty prompt"),
        ({"prompt": "a", "response": 1}, "response: expected a string, not 1"),
        ({"messages": [QUESTION]}, "messages: expected a question, and an answer at the end"),
        ({"messages": [ANSWER]}, "messages: expected a question, and an answer at the end"),
        ({"messages": [QUESTION, {**ANSWER, "content": ""}]}, EMPTY),
        ({"messages": [QUESTION, {**ANSWER, "content": " \n"}, QUESTION, ANSWER]}, EMPTY),
        ({"messages": [QUESTION, {**ANSWER, "content": None}]}, EMPTY),
        ({"messages": [QUESTION, {**ANSWER, "weight": 0}]},
         "messages: no answer to learn: all have weight 0"),
        ({"messages": [QUESTION, {**ANSWER, "weight": 0.5}]}, f"messages[1].{WEIGHT}; found 0.5"),
        ({"messages": [{**QUESTION, "weight": 1}, ANSWER]}, f"messages[0].{WEIGHT}; found 1"),
        ({"messages": [QUESTION, ANSWER], "tools": "[]"}, 'tools: expected a list, not "[]"'),
        ({"messages": [QUESTION, {**ANSWER, "reasoning_content": "\ud800"}]},
         "messages[1].reasoning_content: \\ud800 is an unpaired surrogate"),
        ({"prompt": "a", "response": " "}, "empty response"),
        ({"prompt": "a", "response": "b", "system": "c"},
         f"system: {UNREAD}"),
        ({"messages": [QUESTION, ANSWER], "weight": 0}, f"weight: {UNREAD}"),
        ({"prompt": "a", "response": "b", "history": [["c", "d"]]},
         f"history: {UNREAD}"),
        ({"messages": [QUESTION, ANSWER], "chat_template_kwargs": {"enable_thinking": True}},
         f"chat_template_kwargs: {UNREAD}"),
        ({"messages": [{"role": "user"}]}, "messages[0]: no content"),
        ({"output_ids": [1]}, "prompt_ids: expected a list, not null"),
        ({"prompt_ids": [1], "output_ids": []}, "empty output: no output_ids"),
        ({"prompt_ids": [1], "output_ids": ["a"]},
         'output_ids[0]: expected an integer, not "a"'),
        ({"prompt_ids": [1], "output_ids": [-1]}, "token id -1 is not in the range 0 to 2**31 - 1"),
        ({"prompt": "a", "response": "\ud800"}, "response: \\ud800 is an unpaired surrogate"),
    ],
)  # fmt: skip
def test_malformed(write, line, message):
    path = write({"prompt": "a", "response": "b"}, "", line)
    assert failure(path) == f"{path}:3: {message}"


def test_many_problems_are_counted(write):
    path = write(*["{}"] * 12)
    lines = failure(path).splitlines()
    assert len(lines) == 11
    assert lines[-1] == f"{path}: 2 more unusable lines (12 in all)"


def test_empty(write, tmp_path):
    path = write("", " ")
    assert failure(path) == f"{path}: contains no conversations"
    absent = str(tmp_path / "none.jsonl")
    assert failure(absent) == f"{absent}: cannot be read: No such file or directory"


def test_questions_are_held_out_whole(write):
    lines = [{"prompt": f"q{i % 500}", "response": f"a{i}"} for i in range(1000)]
    path = write(*lines)
    found = {split: list(files.examples([path], split, 10.0)) for split in SPLITS}
    assert sum(map(len, found.values())) == 1000
    assert 20 < len(found["test"]) < 200
    assert 20 < len(found["validation"]) < 200
    questions = {split: {one.prompt[0]["content"] for one in found[split]} for split in SPLITS}
    assert not questions["train"] & (questions["test"] | questions["validation"])
    assert len(list(files.examples([path], "train", 0.0))) == 1000


def test_the_question_alone_decides_the_split(write):
    """Answers to one question, and samples of one prompt, stay in one split."""
    path = write(
        *({"messages": [QUESTION, {**ANSWER, "content": f"{index}"}]} for index in range(3)),
        *({"prompt": "Why?", "response": f"{index}"} for index in range(3)),
        *({"prompt_ids": [1, 2], "output_ids": [index]} for index in range(3)),
    )
    sources = [example.source for example in files.examples([path], "train", 0.0)]
    assert sources[:6] == sources[:1] * 6
    assert sources[6:] == sources[6:7] * 3
    assert sources[0] != sources[6]


def test_fields_of_messages_are_kept_unless_empty(write):
    call = {**ANSWER, "content": None, "tool_calls": [{"function": {"name": "f"}}]}
    tool = {"role": "tool", "content": "x", "tool_call_id": "1"}
    unset = {**ANSWER, "tool_calls": None, "reasoning_content": "", "weight": 1}
    path = write({"messages": [QUESTION, call, tool, unset], "tools": [{"name": "f"}]})
    (example,) = files.examples([path], "train", 0.0)
    assert example.messages == (QUESTION, {**call, "content": ""}, tool, ANSWER)
    assert example.variables == {"tools": [{"name": "f"}]}
    assert example.context_only == ()
    assert example.place == f"{path}:1"


def test_answers_of_weight_0_are_context(write):
    empty = {**ANSWER, "content": "", "weight": 0}
    path = write({"messages": [{**QUESTION, "weight": 0}, empty, QUESTION, ANSWER]})
    (example,) = files.examples([path], "train", 0.0)
    assert example.messages == (QUESTION, {**ANSWER, "content": ""}, QUESTION, ANSWER)
    assert example.context_only == (1,)


def test_turns_that_are_lines_of_their_own_are_held_out_together(write):
    lines = []
    for number in range(400):
        messages = [{**ANSWER, "content": "Hello."}] if number % 2 else []
        prompt = []
        for turn in range(3):
            messages = [*messages, {**QUESTION, "content": f"question {number} turn {turn}"}]
            prompt.append(len(lines))
            answer = {**ANSWER, "content": f"answer {number} {turn}"}
            if number % 3:
                lines.append({"messages": [*messages, answer]})
            else:  # as in outputs.jsonl
                lines.append({"prompt": messages, "prompt_ids": [*prompt], "output_ids": [number]})
            messages.append(answer)
    path = write(*lines)
    numbers = {}
    for split in SPLITS:
        found = files.examples([path], split, 10.0)
        numbers[split] = {
            int(example.response.split()[1]) if example.messages else example.output_ids[0]
            for example in found
        }
    assert all(len(found) > 20 for found in numbers.values())
    assert sum(map(len, numbers.values())) == 400
