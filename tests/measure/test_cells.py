"""The figures of a cell follow from its samples as docs/measuring.md says."""

import dataclasses

import numpy as np
import pytest
from support.made_samples import completion, task_round

from dflash.measure import cells, plots, samples, table
from dflash.measure.engine import Parts
from dflash.measure.samples import MIN_GROUPS, Sample, TaskRound, bootstrap, prompt_times

BLOCKS = {"none": 1, "dflash": 4}
LENGTHS = ([4, 2, 4, 2], [3, 3, 3, 3])


def rounds(cycle_ms=(6.0,), *, task="math", parts=(1.0, 4.0), pairs=1):
    """Plain tokens of 3 ms, and cycles of four rows that take as long as given, a round each."""
    plain = [[1] * 12] * 2 * pairs
    times = {"none": (0.0, 2.5), "dflash": parts}
    return [
        task_round(task, number, {"none": (plain, 3.0), "dflash": (LENGTHS * pairs, ms)}, times)
        for number, ms in enumerate(cycle_ms)
    ]


def cells_of(some, **options):
    return {cell.strategy: cell for cell in every_cell(some, **options)}


def every_cell(some, *, block_sizes=BLOCKS, **options):
    return cells.cells(some, cells.Setting("none", block_sizes, block_sizes, **options))


def sample_of(strategy, *completions, number=0, marks=()):
    """Prompts of one queue; each is a conversation."""
    ids = tuple(one.id for one in completions)
    return Sample("math", strategy, number, completions, ids, marks)


def test_a_cell_says_what_happened():
    cell = cells_of(rounds())["dflash"]
    assert (cell.rounds, cell.prompts, cell.groups) == (1, 2, 2)
    assert (cell.cycles, cell.output_tokens) == (8, 24)
    assert cell.tau == 3.0
    assert cell.acceptance_histogram == {"1": 0, "2": 2, "3": 4, "4": 2}
    assert cell.tpot_ms == pytest.approx(2.0)
    assert cell.tokens_per_second == pytest.approx(500.0)
    assert cell.speedup == pytest.approx(1.5)
    assert cell.ttft_ms == 5.0
    assert cell.identical_share == 1.0


def test_the_baseline_is_its_own_measure():
    cell = cells_of(rounds(pairs=3))["none"]
    assert cell.tau == cell.speedup == 1.0
    assert cell.speedup_interval == pytest.approx((1.0, 1.0))
    assert cell.joint_acceptance == ()


def test_the_cost_adds_up_and_gives_the_ideal():
    cell = cells_of(rounds((6.0, 6.2, 5.8)))["dflash"]
    cost = cell.cost_ms
    assert cost.cycle == pytest.approx(6.0)
    assert cost.draft + cost.verify + cost.rest == pytest.approx(cost.cycle)
    assert (cost.draft, cost.verify) == (1.0, 4.0)
    assert cell.baseline_cycle_ms == pytest.approx(3.0)
    assert cell.ideal_speedup == pytest.approx(3.0 * 3.0 / 5.0)
    assert cell.share_of_ideal == pytest.approx(5.0 / 6.0)
    product = np.prod(list(cell.losses.values()))
    assert cell.tau / product == pytest.approx(cell.speedup)


def test_acceptance_leaves_out_the_cycle_that_was_cut_short():
    joint, conditional = samples.position_acceptance(
        [([4, 2, 1], [4, 4, 4]), ([1, 4, 4], [4, 4, 4])], longest_path=4
    )
    # 4, 2 and 1, 4 count: three of four accept position 1, two of these three positions 2 and 3.
    assert joint == pytest.approx((0.75, 0.5, 0.5))
    assert conditional == (0.75, pytest.approx(2 / 3), 1.0)


def test_a_cycle_says_nothing_about_positions_that_it_did_not_draft():
    lengths, rows = [1, 2, 4, 2, 1, 1], [1, 2, 4, 4, 2, 4]
    joint, conditional = samples.position_acceptance([(lengths, rows)], longest_path=4)
    # Position 1 was drafted by four cycles that count, kept by three; 2 by two, kept by one.
    assert conditional == (0.75, 0.5, 1.0)
    assert joint == pytest.approx((0.75, 0.375, 0.375))


def test_chosen_block_sizes_leave_a_cycle_without_parts():
    done = rounds()
    alone = [dataclasses.replace(one, parts={"none": one.parts["none"]}) for one in done]
    cell, wanted = cells_of(alone)["dflash"], cells_of(done)["dflash"]
    assert cell.cost_ms == cells.CycleCost(wanted.cost_ms.cycle, None, None, None)
    assert cell.ideal_speedup is cell.share_of_ideal is None
    assert cell.losses == {}
    assert (cell.speedup, cell.tau) == (wanted.speedup, wanted.tau)


def test_prompts_that_ended_at_their_first_token_have_no_times():
    done = task_round("math", 0, {"none": ([[]], 3.0), "dflash": ([[]], 6.0)}, {
        "none": (0.0, 2.5), "dflash": (1.0, 4.0)})  # fmt: skip
    cell = cells_of([done])["dflash"]
    assert cell.tau is cell.speedup is cell.cost_ms is cell.ideal_speedup is None
    assert cell.identical_share == 1.0
    assert cells.averages([cell], [done], baseline="none")[0].speedup is None


def test_outputs_are_compared_with_the_baseline_of_the_same_prompt():
    plain = sample_of("none", completion(0, [1, 1], 3.0, output=[5, 6, 7]))
    same = sample_of("dflash", completion(0, [2], 3.0, output=[5, 6, 7]))
    other = sample_of("dflash", completion(0, [2], 3.0, output=[5, 6, 8]), number=1)
    assert samples.identical_share([same], [plain]) == 1.0
    assert samples.identical_share([same, other], [plain]) == 0.5


def test_outputs_under_forced_acceptance_are_not_compared():
    assert cells_of(rounds(), forced=True)["dflash"].identical_share is None


def test_the_share_of_right_answers_is_of_those_that_were_checked():
    def sample(*marks, number=0):
        done = tuple(completion(index, [1], 3.0) for index in range(len(marks)))
        return sample_of("none", *done, number=number, marks=marks)

    parts = {"none": Parts(0.0, 2.5, context_tokens=64)}
    marked = (sample(True, None, False), sample(True, None, True, number=1))
    done = [TaskRound("math", one.round, (one,), parts) for one in marked]
    cell = cells_of(done, block_sizes={"none": 1})["none"]
    assert (cell.checked, cell.correct_share) == (4, 0.75)
    assert cells.averages([cell], done, baseline="none")[0].correct_share == 0.75
    assert cells_of(rounds())["none"].correct_share is None


def test_time_is_divided_among_the_prompts_in_flight():
    """Two slots: the second prompt comes 5 ms later, the third when the first one is over."""
    first = completion(0, [2, 2], 10.0, begin=100.005, prefill_ms=5.0)
    second = completion(1, [2, 2, 2, 2], 10.0, begin=100.009, prefill_ms=4.0)
    third = completion(2, [2], 20.0, begin=100.031, prefill_ms=6.0)
    times = prompt_times([first, second, third])
    # 100.005 to .025, of which the second prompt's prefill takes 4 ms: 16 are left.
    assert times[0].elapsed_ms == pytest.approx(16)
    # .009 to .049, without the 6 ms of the third one's prefill.
    assert times[1].elapsed_ms == pytest.approx(34)
    assert times[2].elapsed_ms == pytest.approx(20)
    # Two in flight from .009 to .025 and from .031 to .049; one at .049 to .051.
    assert times[0].share_ms == pytest.approx(16 / 2)
    assert times[1].share_ms == pytest.approx(16 / 2 + 18 / 2)
    assert times[2].share_ms == pytest.approx(18 / 2 + 2)
    sample = sample_of("none", first, second, third)
    # All the time from the first token to the last, but for two prefills.
    assert sample.clock_ms == pytest.approx(16 + 18 + 2)
    assert (sample.cycles, sample.tokens) == (7, 14)


def test_slots_that_are_refilled_are_timed_as_one_queue():
    """Four prompts of 20 ms in two slots, and of 40 ms with the slower strategy."""

    def queue(strategy, cycle_ms):
        begin = [100.0, 100.0, 100.0 + 2 * cycle_ms / 1e3, 100.0 + 2 * cycle_ms / 1e3]
        done = [completion(i, [2, 2], cycle_ms, begin=at, prefill_ms=0.0)
                for i, at in enumerate(begin)]  # fmt: skip
        return sample_of(strategy, *done)

    both = queue("none", 10.0), queue("x", 20.0)
    done = TaskRound("math", 0, both, {})
    found = {one.strategy: one for one in every_cell([done], block_sizes={"none": 1, "x": 2})}
    cell = found["x"]
    assert cell.busy_slots == pytest.approx(2)
    assert cell.groups == cell.prompts == 4
    assert cell.cost_ms.cycle == pytest.approx(20)
    assert cell.tpot_ms == pytest.approx(cell.cost_ms.cycle / cell.tau) == pytest.approx(10)
    assert cell.tokens_per_second == pytest.approx(16 / 0.080)
    assert cell.speedup == pytest.approx(0.5)


def test_the_largest_loss_holds_the_speedup_back():
    cell = cells_of(rounds(parts=(2.5, 3.0), pairs=3))["dflash"]
    assert table.limits([cell]) == [
        "math, dflash: τ 3.00 gives 1.50×; largest loss: draft and verification cost 1.83 times "
        "the verification"
    ]
    assert table.limits([cells_of(rounds(pairs=3))["none"]]) == []


def test_the_interval_covers_the_truth_as_often_as_it_says():
    """Times with noise of 10 % about a true speed-up of 1.5: 95 % of intervals should hold it."""
    random = np.random.default_rng(0)
    held, trials = 0, 40
    for _ in range(trials):
        plain, ours = [], []
        for group in range(12):
            for number in range(3):
                times = [ms * random.normal(1, 0.1) for ms in (3.0, 6.0)]
                lengths = random.permutation([4, 2, 3]).tolist()
                plain.append(sample_of("none", completion(group, [1] * 9, times[0]), number=number))
                ours.append(sample_of("x", completion(group, lengths, times[1]), number=number))
        _, (low, high) = bootstrap([ours], [plain])
        held += low <= 1.5 <= high
        assert high - low < 0.35
    assert held >= 0.85 * trials


@pytest.mark.parametrize(("groups", "has_interval"), [(1, False), (5, False), (6, True)])
def test_few_groups_have_no_interval(groups, has_interval):
    """One group drawn from itself gave an interval of no width: 2.00-2.00, said to be of 95 %."""
    lengths = [LENGTHS[number % 2] for number in range(groups)]
    few = task_round("math", 0, {"none": ([[1] * 12] * groups, 3.0), "dflash": (lengths, 6.0)}, {
        "none": (0.0, 2.5), "dflash": (1.0, 4.0)})  # fmt: skip
    enough = rounds(pairs=3, task="chat")
    cell = cells_of([few])["dflash"]
    assert cell.groups == groups
    assert cell.speedup == pytest.approx(1.5)
    assert (cell.speedup_interval is not None) == has_interval
    # Nor has a mean that such a task is part of.
    found = every_cell([few, *enough])
    average = cells.averages(found, [few, *enough], baseline="none")[1]
    assert average.speedup == pytest.approx(1.5)
    assert (average.speedup_interval is not None) == has_interval
    # The table has an empty field, the plot no bar.
    shown = table.lines([cell], [], wide=True)[1].split()
    assert (shown[6:8] == ["1.50?", "–"]) != has_interval
    assert bool(cell.warnings) != has_interval
    assert plots.speedups([cell], "none").startswith(b"\x89PNG")


def test_turns_of_a_conversation_are_drawn_together():
    """Fast first turns and slow second ones: apart they would spread the interval."""
    samples = {"none": [], "x": []}
    for name, times in (("none", (4.0, 4.0)), ("x", (2.0, 6.0))):
        for turn, ms in enumerate(times):
            for group in range(MIN_GROUPS):
                done = (completion(2 * group + turn, [1] * 9, ms),)
                samples[name].append(Sample("t", name, 0, done, (group,)))
    speedup, interval = bootstrap([samples["x"]], [samples["none"]])
    assert speedup == pytest.approx(1.0)
    assert interval == pytest.approx((1.0, 1.0))


def test_averages_count_every_task_alike():
    some = rounds(pairs=3) + rounds((12.0,), task="chat", pairs=3)
    found = every_cell(some)
    by_name = {one.strategy: one for one in cells.averages(found, some, baseline="none")}
    assert by_name["dflash"].speedup == pytest.approx((1.5 + 0.75) / 2)
    assert by_name["dflash"].tasks == 2
    low, high = by_name["dflash"].speedup_interval
    assert low <= by_name["dflash"].speedup <= high
