"""A chat template that does not end is one line, wherever the talk comes that it loops on."""

import signal
import threading
import time

import chats
import pytest

from rft_fn import data
from rft_fn.data import rendering, template_probe
from rft_fn.data.chat import Chat

LINE = r"^{}chat template: expected a rendering within 0.2 s, got no end$"
LOOPS = {
    "loops in loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "loops that print": "{% for a in range(99999) %}{% for b in range(999) %}x{% endfor %}{% endfor %}",
    "macros": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "filters": "{% for a in range(99999) %}{% set b = range(9999) | map('string') | list %}{% endfor %}",
}


@pytest.fixture(autouse=True)
def short(monkeypatch):
    monkeypatch.setattr(rendering, "SECONDS", 0.2)


def looping(text, when="messages[0]['content'] == '3?'"):
    """A tokenizer whose template runs `text` on some talks."""
    tokenizer = chats.tokenizer(chats.CHATML)
    tokenizer.chat_template = f"{{% if {when} %}}{text}{{% endif %}}{tokenizer.chat_template}"
    return tokenizer


@pytest.mark.parametrize("name", LOOPS)
def test_a_template_that_loops_on_a_later_row_is_one_line(name):
    """The place of the row is in it, and no other row is tried: each would take as long."""
    rows = [{"prompt": [{"role": "user", "content": f"{i}?"}]} for i in range(5)] + [{"prompt": 3}] * 2
    began = time.process_time()
    with pytest.raises(TimeoutError, match=LINE.format(r"rows, row 4: ")):
        data.from_rows(rows, looping(LOOPS[name]), messages=("prompt",))
    assert time.process_time() - began < 5
    assert signal.getitimer(signal.ITIMER_VIRTUAL) == (0, 0)


def test_a_template_that_loops_when_it_is_asked_what_it_reads_is_one_line():
    """A probe takes a failure for an answer, but none that takes so long."""
    tokenizer = looping(LOOPS["macros"], "'rftfn' in messages[0]['content']")
    with pytest.raises(TimeoutError, match=LINE.format("")):
        template_probe.content_form(tokenizer, "user")
    with pytest.raises(TimeoutError, match=LINE.format("")):
        Chat(tokenizer, {}).turn_end()


def test_the_time_of_other_threads_does_not_count():
    """They may compute beside it; and where no signal arrives a rendering is as it was."""
    turns = [{"role": "user", "content": "1?"}]
    tokenizer, done, found = looping(LOOPS["macros"]), threading.Event(), []

    class Waiting:
        def apply_chat_template(self, turns, **options):
            end = time.process_time() + 0.5
            while time.process_time() < end:
                time.sleep(0.01)
            return tokenizer.apply_chat_template(turns, **options)

    def work():
        found.append(rendering.render(tokenizer, turns, tokenize=False))
        while not done.is_set():
            sum(range(1000))

    thread = threading.Thread(target=work)
    thread.start()
    try:
        text = rendering.render(Waiting(), turns, tokenize=False)
    finally:
        done.set()
        thread.join()
    assert found == [text] and "1?" in text
