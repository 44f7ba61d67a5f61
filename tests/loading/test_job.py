"""Tests of where a run's prompts come from."""

import datetime
import io
import shutil

from dflash import assets
from dflash.config import loader
from dflash.data import answers, datasets
from dflash.loading import job
from dflash.runs.outputs import Record

CONFIG = "random_tiny_dflash.yml"


def test_prompts_of_a_data_set():
    settings = ["prompts.text=[]", "prompts.dataset=math", "prompts.limit=3"]
    config = loader.load(f"configs/{CONFIG}", settings)
    found = job.prepare(config, stdin=io.StringIO(), dry=True).prompts
    assert [prompt.source for prompt in found] == [f"math/test[{index}]" for index in range(3)]
    asked = [example.opening for example in datasets.task_examples("math", "test", 3)]
    assert [prompt.messages for prompt in found] == asked
    assert all(prompt.ids for prompt in found)


def test_prompts_print_the_date_of_the_run(tmp_path):
    """And not today's, which another process or a later start may see differently."""
    directory = tmp_path / "target"
    ignore = shutil.ignore_patterns("*.safetensors")
    shutil.copytree(f"{assets.__path__[0]}/tiny_target", directory, ignore=ignore)
    template = "{{ strftime_now('%Y-%m-%d') }} {{ messages[0].content }}"
    (directory / "chat_template.jinja").write_text(template)
    overrides = f"target.checkpoint={directory}", "drafter.name=none", "prompts.text=[Hi]"
    config = loader.load("configs/tiny_dflash.yml", overrides)
    date = datetime.date(2024, 2, 29)
    prepared = job.prepare(config, stdin=io.StringIO(), dry=True, date=date)
    assert prepared.date == date
    assert prepared.tokenizer.decode(prepared.prompts[0].ids) == "2024-02-29 Hi"


def test_an_output_that_was_cut_off_must_mark_its_answer():
    """Its last number may be right by chance."""
    settings = ["prompts.text=[]", "prompts.dataset=math", "prompts.limit=1"]
    config = loader.load(f"configs/{CONFIG}", settings)
    prepared = job.prepare(config, stdin=io.StringIO(), dry=True)
    (example,) = datasets.task_examples("math", "test", 1)
    answer = answers.find(example.response)

    def grade(text, finish_reason):
        record = Record(0, "", (1,), (2,), text, finish_reason, (1,), 1.0, 1.0, 1.0)
        return prepared.grade({0: record})

    assert grade(f"That is {answer}", "stop") == {"checked": 1, "correct": 1}
    assert grade(f"That is {answer}", "length") == {"checked": 1, "correct": 0}
    assert grade(f"\\boxed{{{answer}}}. But", "length") == {"checked": 1, "correct": 1}
    assert prepared.grade({}) == {}
