"""Tests of where a run's prompts come from."""

import io

from dflash.config import loader
from dflash.data import datasets
from dflash.offline import job

CONFIG = "random_tiny_dflash.yml"


def test_prompts_of_a_data_set():
    settings = ["prompts.text=[]", "prompts.dataset=math", "prompts.limit=3"]
    config = loader.load(f"configs/{CONFIG}", settings)
    found = job.prepare(config, stdin=io.StringIO(), dry=True).prompts
    assert [prompt.source for prompt in found] == [f"math/test[{index}]" for index in range(3)]
    assert [prompt.messages for prompt in found] == datasets.task_prompts("math", "test", 3)
    assert all(prompt.ids for prompt in found)
