"""Conversations in the terminal, with a small target of random weights that talks in bytes."""

import io
import signal

import pytest
import rich.console
from support.models import small_llm

import dflash
from dflash import chat


@pytest.fixture
def llm():
    return small_llm()


def talk(llm, *said, terminal=False, out=None, **options):
    """Says lines to a conversation; returns it, and what it printed."""
    waiting = list(said)

    def read():
        if not waiting:
            raise EOFError
        line = waiting.pop(0)
        if isinstance(line, BaseException):
            raise line
        return line

    out, err = out or io.StringIO(), io.StringIO()
    consoles = [
        rich.console.Console(file=file, force_terminal=terminal, highlight=False, width=80)
        for file in (out, err)
    ]
    talking = chat.Conversation(llm, out=consoles[0], err=consoles[1], read=read, **options)
    talking.run()
    return talking, out.getvalue(), err.getvalue()


def test_turns_are_kept_and_given_to_each_answer(llm):
    talking, out, err = talk(llm, "Hello\n", "  ", "Again", system="Be brief.")
    roles = [message["role"] for message in talking.messages]
    assert roles == ["system", "user", "assistant", "user", "assistant"]
    first, second = (talking.messages[i]["content"] for i in (2, 4))
    assert out == f"{first}\n{second}\n"
    assert err.count(" tokens, ") == 2
    assert err.count("length: decode.max_new_tokens or decode.max_length") == 2
    # The same conversation, asked for otherwise.
    again = llm.chat(talking.messages[:4])
    assert again.text == second


def test_quit_leaves_and_help_lists_the_commands(llm):
    talking, out, err = talk(llm, "/help", "/nonsense", "/quit", "Hello", terminal=True)
    assert talking.messages == []
    assert out == ""
    assert err.count("/clear  forgets the conversation") == 2
    assert "/nonsense: no such command" in err
    # A path is a message, and so is every other line from a pipe.
    for text, terminal in (("/usr/lib is a path", True), ("/nonsense", False)):
        talking, _, _ = talk(llm, text, terminal=terminal)
        assert talking.messages[0]["content"] == text


def test_clear_begins_anew(llm):
    talking, _, _ = talk(llm, "Hello", "/clear", "Hi")
    assert [message["content"] for message in talking.messages][:1] == ["Hi"]
    assert len(talking.messages) == 2


def test_a_message_that_is_too_long_leaves_no_trace(llm):
    talking, _, err = talk(llm, "Hello", "x" * 500, "Hi")
    assert [one["content"] for one in talking.messages[::2]] == ["Hello", "Hi"]
    assert "but the target was made for 256 positions" in err
    assert err.count("error: ") == 1
    assert "/clear begins anew" in err


def test_ctrl_c_stops_an_answer_and_keeps_what_was_said(llm):
    class Pressing(io.StringIO):
        pressed = False

        def write(self, text):
            if not self.pressed:
                self.pressed = True
                signal.raise_signal(signal.SIGINT)
            return super().write(text)

    talking, out, err = talk(llm, "Hello", out=Pressing())
    assert "stopped" in err
    assert out == talking.messages[1]["content"] + "\n"
    whole = llm.chat(talking.messages[:1])
    assert whole.text.startswith(talking.messages[1]["content"])
    assert len(talking.messages[1]["content"]) < len(whole.text)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_ctrl_c_at_the_prompt_does_not_leave(llm):
    talking, _, err = talk(llm, KeyboardInterrupt(), "Hi")
    assert len(talking.messages) == 2
    assert "ctrl-D or /quit leaves" in err


def test_colors_are_for_terminals_that_want_them(llm, monkeypatch):
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    assert "\x1b[" not in talk(llm, "aaaaaaaa")[1]
    _, out, err = talk(llm, "aaaaaaaa", terminal=True)
    assert "\x1b[1m" in out
    assert "green: accepted drafts" in err
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b[32m" not in talk(llm, "aaaaaaaa", terminal=True)[1]


def test_what_an_answer_was_made_of():
    pieces = [
        dflash.Piece("a", (1,), drafted=False),
        dflash.Piece("bc", (2, 3), drafted=True),
        dflash.Piece("d", (4,), drafted=False),
        dflash.Piece("e", (5,), drafted=False),
    ]
    assert chat.count_line(pieces, None) == "5 tokens, 2 drafted · stopped"
    assert chat.count_line([], None) == "0 tokens, 0 drafted · stopped"
    done = dflash.Completion("p", (7,), "abcde", (1, 2, 3, 4, 5), "stop", (3, 1), 1.0, 1.0)
    assert chat.count_line(pieces, done) == "τ 2.00 · 5 tokens, 2 drafted · stop"
