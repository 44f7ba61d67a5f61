import io
import re
import time

import jax
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import Terminal

from dflash.runs import display, outputs, result_text


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch):
    """Unsets environment variables that change the output of rich."""
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE", "COLUMNS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")


def make_display(*, terminal=False, shared=False, **options):
    """Returns a display, and its stdout and stderr: one and the same stream where `shared`."""
    kind = Terminal if terminal else io.StringIO
    stdout = kind()
    stderr = stdout if shared else kind()
    return display.Display(stdout=stdout, stderr=stderr, **options), stdout, stderr


def test_text_streams_at_once():
    shown, stdout, stderr = make_display()
    shown.expect({3: 27})
    shown.token(3, "Hel")
    assert stdout.getvalue() == "Hel"
    assert stderr.getvalue() == "── prompt 3 · 27 tokens\n"
    shown.token(3, "lo")
    assert stdout.getvalue() == "Hello"
    shown.finish(3, "τ 5.42")
    assert stdout.getvalue() == "Hello\n"
    assert stderr.getvalue() == "── prompt 3 · 27 tokens\n── τ 5.42\n"


def test_later_prompts_wait_for_their_turn():
    shown, stdout, stderr = make_display(shared=True)
    shown.expect({5: 2, 0: 1, 2: 3})
    shown.token(5, "five")
    shown.token(2, "two\n")
    shown.finish(2, "done two")
    assert stdout.getvalue() == ""
    shown.token(0, "zero")
    assert stdout.getvalue() == "── prompt 0 · 1 token\nzero"
    shown.finish(0, "done zero")
    assert stderr.getvalue() == (
        "── prompt 0 · 1 token\nzero\n── done zero\n"
        "── prompt 2 · 3 tokens\ntwo\n── done two\n"
        "── prompt 5 · 2 tokens\nfive"
    )
    shown.token(5, "!")
    assert stdout.getvalue().endswith("\nfive!")


@given(st.lists(st.lists(st.text(max_size=3), max_size=4), max_size=5), st.randoms())
def test_any_interleaving_gives_the_same_text(texts, random):
    """Texts in order, each with its last line ended, however the prompts of a batch advance."""
    shown, stdout, stderr = make_display()
    shown.expect(dict.fromkeys(range(len(texts)), 1))
    queues = {index: list(pieces) for index, pieces in enumerate(texts)}
    while queues:
        index = random.choice(list(queues))
        if queues[index]:
            shown.token(index, queues[index].pop(0))
        else:
            shown.finish(index, f"end {index}")
            del queues[index]
    whole = ["".join(pieces) for pieces in texts]
    expected = "".join(t if t.endswith("\n") or not t else t + "\n" for t in whole)
    assert stdout.getvalue() == expected
    assert stderr.getvalue() == "".join(
        f"── prompt {index} · 1 token\n── end {index}\n" for index in range(len(texts))
    )


def test_without_streaming():
    shown, stdout, stderr = make_display(stream=False)
    shown.expect({0: 4, 1: 5})
    shown.token(1, "text")
    shown.finish(1, "τ 2.00")
    assert stdout.getvalue() == ""
    assert stderr.getvalue() == "prompt 1 · 5 tokens · τ 2.00\n"  # at once, though 0 runs still


def test_no_escape_codes_outside_terminals():
    for terminal in (False, True):
        shown, stdout, stderr = make_display(terminal=terminal)
        shown.expect({0: 4})
        shown.token(0, "text")
        shown.finish(0, "end")
        shown.results(outputs.summarize([], block_size=1))
        assert ("\x1b" in stderr.getvalue()) == terminal  # the header is dim there
        assert "\x1b" not in stdout.getvalue()


def test_control_characters_reach_no_terminal():
    text = "a\x1b[2J\r\x7f\x9b\tb\n"
    for terminal, expected in ((False, text), (True, "a␛[2J␍␡\ufffd\tb\n")):
        shown, stdout, _ = make_display(terminal=terminal)
        shown.expect({0: 1})
        shown.token(0, text)
        assert stdout.getvalue() == expected


def test_markup_in_messages_is_text():
    shown, _, stderr = make_display()
    shown.note("[bold]target[/bold] [1, 2]")
    assert stderr.getvalue() == "[bold]target[/bold] [1, 2]\n"


def test_encodings_without_the_characters():
    raw = io.BytesIO()
    stdout = io.TextIOWrapper(raw, encoding="ascii")
    shown = display.Display(stdout=stdout, stderr=io.StringIO())
    shown.expect({0: 1})
    shown.token(0, "naïve \udc80")
    assert raw.getvalue() == b"na\\xefve \\udc80"


@pytest.fixture
def clock(monkeypatch):
    """Every look at the clock is two seconds later."""
    times = iter(range(0, 100, 2))
    monkeypatch.setattr(display.time, "perf_counter", lambda: float(next(times)))


def test_status(clock):
    shown, stdout, stderr = make_display()
    with shown.status("compiling prefill 128"):
        assert stderr.getvalue() == "compiling prefill 128 … "  # before the wait, not after it
    assert stderr.getvalue() == "compiling prefill 128 … 2.0 s\n"
    assert stdout.getvalue() == ""
    shown, _, stderr = make_display(terminal=True)
    with shown.status("loading"):
        pass  # A bar in between erases the line, so the time comes with its message.
    assert stderr.getvalue().endswith("\rloading … 2.0 s\n")


@pytest.mark.parametrize(
    ("hits", "words"),
    [(0, ""), (2, ", 2 from the cache"), (3, ", all from the cache"), (4, ", all from the cache")],
)
def test_compiling_counts_programs(clock, hits, words):
    for terminal in (False, True):
        shown, _, stderr = make_display(terminal=terminal)
        with shown.compiling() as progress:
            for ready in range(4):
                progress(ready, 3)
            for _ in range(hits):
                jax.monitoring.record_event("/jax/compilation_cache/cache_hits")
        lines = stderr.getvalue().removesuffix("\n").split("\r")
        assert re.fullmatch(rf"compiling 3.* … \d+\.\d s{words}", lines[-1])
        if terminal:
            assert lines[1:4] == [f"compiling {ready}/3 … " for ready in range(3)]
        else:
            assert lines[0].startswith("compiling 3 programs … ")
            assert len(lines) == 1


def test_status_that_fails_leaves_the_line_to_be_ended():
    shown, _, stderr = make_display()
    with pytest.raises(KeyError), shown.status("loading"):
        raise KeyError
    shown.close()
    shown.close()
    assert stderr.getvalue() == "loading … \n"


def test_lines_do_not_run_into_live_text_on_a_terminal():
    shown, stdout, _ = make_display(terminal=True, shared=True)
    shown.expect({0: 1})
    shown.token(0, "half")
    shown.note("note")
    shown.token(0, " more")
    shown.close()
    assert stdout.getvalue().endswith("half\nnote\n more\n")


def test_progress_off_a_terminal_is_a_line_now_and_then(clock, monkeypatch):
    monkeypatch.setattr(display, "QUIET_S", 4.0)
    shown, stdout, stderr = make_display()
    with shown.progress("measuring") as step:
        step("math, none", 0.0)  # 2 s after the start
        step("math, dflash", 0.25)
        step("code, none", 0.5)
        step("code, dflash", 0.75)
    assert stdout.getvalue() == ""
    *lines, last = stderr.getvalue().splitlines()
    assert lines[0] == "measuring · 25 % · math, dflash"
    assert len(lines) == 2
    assert last.startswith("measuring … ")


def test_a_bar_keeps_its_place_whatever_runs(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    shown, stdout, stderr = make_display(terminal=True)
    with shown.progress("measuring") as step:
        step("x", 0.5)
        while "50%" not in stderr.getvalue():  # A thread draws it.
            time.sleep(0.01)
        step("a step whose name is far too long for what is left of the line, " * 3, 1.0)
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", stderr.getvalue())
    drawn = [line for line in re.split(r"[\r\n]+", plain) if "%" in line]
    assert {line.index("%") for line in drawn} == {drawn[0].index("%")}
    assert any("100%" in line and "a step whose" in line and "…" in line for line in drawn)
    assert all(len(line) <= 80 for line in drawn)
    assert stdout.getvalue() == ""


def test_a_prompt_stands_before_its_answer():
    shown, stdout, stderr = make_display()
    long = "\n".join(["What is", "", "three\x1b[2J?", *["more"] * 9])
    shown.expect({0: 4, 1: 5}, {0: "Hello?", 1: long})
    shown.finish(1, "end")
    shown.token(0, "Hi.")
    shown.finish(0, "end")
    assert stdout.getvalue() == "Hi.\n"
    assert stderr.getvalue().splitlines() == [
        "── prompt 0 · 4 tokens", "> Hello?", "── end", "── prompt 1 · 5 tokens", "> What is", ">",
        "> three␛[2J?", "> more", "> more", "> more", "> … and 30 more characters", "── end",
    ]  # fmt: skip


def make_record(**changes):
    values = {
        "index": 0, "prompt": None, "prompt_ids": (1,), "output_ids": tuple(range(9)), "text": "",
        "finish_reason": "stop", "acceptance_lengths": (4, 4, 1), "prefill_ms": 12.5,
        "decode_ms": 40.0, "decode_clock_s": 0.04,
    }  # fmt: skip
    return outputs.Record(**{**values, **changes})


def test_summary_line():
    assert result_text.summary_line(make_record()) == "τ 3.00 · 9 tokens · stop · 5.00 ms per token"
    single = make_record(output_ids=(1,), acceptance_lengths=(), finish_reason="length")
    assert result_text.summary_line(single) == "1 token · length"


def test_results():
    shown, stdout, stderr = make_display()
    shown.results(outputs.summarize([make_record()], block_size=4))
    assert stdout.getvalue() == ""
    lines = [line.rstrip() for line in stderr.getvalue().split("\n")]
    assert lines == [
        "", "τ                    3.00 tokens per cycle", "throughput           200.00 tokens/s",
        "time to first token  12.50 ms (median)", "time per token       5.00 ms (median)",
        "prompts              1", "output tokens        9", "cycles               3", "",
        "tokens per cycle", "    1  33.3 % " + "█" * 20, "  2–3   0.0 %",
        "    4  66.7 % " + "█" * 40, "",
    ]  # fmt: skip


def test_comparison():
    shown, stdout, stderr = make_display()
    said = make_record(prompt="What is\nit?", output_ids=tuple(range(8, -1, -1)), decode_ms=20.0)
    long = make_record(index=1, prompt=({"role": "user", "content": "w" * 99},))
    records = {0: said, 1: long}
    plain = {i: make_record(index=i, acceptance_lengths=(1,) * 8) for i in records}
    summary = outputs.summarize(records.values(), block_size=4)
    compared = outputs.compare(records, plain, block_size=4)
    shown.comparison(records, plain, summary, compared)
    assert stdout.getvalue() == ""
    rows = [line.split() for line in stderr.getvalue().splitlines()[2:]]
    assert rows == [
        ["What", "is", "3.00", "400", "200", "2.00×", "no"],
        ["w" * 23 + "…", "3.00", "200", "200", "1.00×", "yes"],
        ["all", "3.00", "400", "400", "1.00×", "no", "(1", "of", "2)"],
    ]


@pytest.mark.parametrize(
    ("plain_ms", "warning", "words"),
    [
        (900.0, None, "?: not trustworthy: more than τ, so a time was disturbed"),
        (40.0, "other processes", "?: not trustworthy: other processes"),
    ],
)
def test_a_speed_up_that_cannot_be_trusted_is_marked(plain_ms, warning, words):
    shown, _, stderr = make_display()
    records = {0: make_record(decode_ms=40.0)}
    plain = {0: make_record(decode_ms=plain_ms, acceptance_lengths=(1,) * 8)}
    summary = outputs.summarize(records.values(), block_size=4)
    shown.comparison(
        records, plain, summary, outputs.compare(records, plain, block_size=4), warning
    )
    _, _, prompt, total, note = stderr.getvalue().splitlines()
    assert "×?" in prompt
    assert ("×?" in total) == (warning is not None)
    assert note == words
