import datetime
import io
import shutil

import pytest

from dflash import assets, errors
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
    asked = [example.opening for example in datasets.task_examples("math", 3)]
    assert [prompt.messages for prompt in found] == asked
    assert all(prompt.ids for prompt in found)


def prepared(*overrides):
    """A dry job of the tiny random models."""
    config = loader.load(f"configs/{CONFIG}", ["prompts.text=[Hi]", *overrides])
    return job.prepare(config, stdin=io.StringIO(), dry=True)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ("drafter.block_size=2", "drafter.overlap: ssd verifies all drafts but the last"),
        ("drafter.fan_out=64 target.architecture.vocab_size=64 drafter.architecture.mask_token_id=9"
         " target.architecture.eos_token_id=[1]", "drafter.fan_out: 64 is not below"),
    ],
)  # fmt: skip
def test_speculation_needs_two_drafts_and_other_tokens(overrides, message):
    with pytest.raises(errors.ConfigError, match=message):
        prepared("drafter.overlap=ssd", *overrides.split())


def test_quantized_weights_are_planned_without_devices():
    narrow = "target.quantization=int8", "drafter.quantization=int8", "decode.kv_dtype=int8"
    plain, quantized = prepared().plan().memory, prepared(*narrow).plan().memory
    assert quantized["target weights"].total_bytes < plain["target weights"].total_bytes


def test_a_server_compiles_programs_for_any_request():
    job = prepared()
    own, served = job.plan().programs, job.plan(grammars=True).programs
    assert "generate_greedy" in own
    assert {"generate", "draft", "conclude"} <= {*served} - {*own}


def test_a_drafter_of_its_own_devices_is_planned_apart():
    beside, together = prepared("drafter.overlap=ssd", "drafter.devices=2"), prepared()
    plan = beside.plan()
    assert plan.lines()[0].endswith("1 device, and 2 for the drafter")
    assert "drafter weights" in plan.drafter_memory
    assert "drafter weights" not in plan.memory
    assert "drafter: speculate" in plan.programs
    assert not together.plan().drafter_memory
    assert beside.longest_path == together.longest_path - 1


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
    (example,) = datasets.task_examples("math", 1)
    answer = answers.find(example.response)

    def grade(text, finish_reason):
        record = Record(0, "", (1,), (2,), text, finish_reason, (1,), 1.0, 1.0, 1.0)
        return prepared.grade({0: record})

    assert grade(f"That is {answer}", "stop") == {"checked": 1, "correct": 1}
    assert grade(f"That is {answer}", "length") == {"checked": 1, "correct": 0}
    assert grade(f"\\boxed{{{answer}}}. But", "length") == {"checked": 1, "correct": 1}
    assert prepared.grade({}) == {}


def test_chosen_rows_are_divided_by_confidence_unless_the_config_says_no():
    overrides = "drafter.block_size=auto", "decode.batch_size=2"

    def choices(*more):
        return prepared(*overrides, *more).engine().rules.choices.names

    tree = "drafter.tree.budget=6"
    divided = [choice for choice in choices(tree) if choice.startswith("~")]
    assert divided
    assert choices(tree, "drafter.divide_rows=false") == choices(tree)[: -len(divided)]
    assert not any(choice.startswith("~") for choice in choices()), "chains have no confidence"


def test_a_run_says_once_from_which_length_on_it_decodes_plainly():
    adaptive = "drafter.block_size=auto", "decode.max_length=64", "decode.max_new_tokens=8"
    (note,) = prepared(*adaptive, "drafter.longest_context=48").notes()
    assert note == (
        "drafter.longest_context: of at most 64 tokens of a sequence, those after the first 48 are "
        "decoded plainly"
    )
    assert not prepared(*adaptive, "drafter.longest_context=64").notes()


def test_scaling_of_the_target_alone_is_noted():
    keys = "rope_scaling.factor=4", "rope_scaling.original_max_position_embeddings=64"
    target, drafter = ([f"{group}.{key}" for key in keys] for group in ("target", "drafter"))
    (note,) = prepared(*target).notes()
    assert note.startswith("target.rope_scaling: the drafter's positions stay unscaled")
    assert not prepared(*target, *drafter).notes()
