"""What a text must not do to the terminal or the file that it is written to."""

from rft_fn.text import printable


def test_what_is_printed_steers_no_terminal():
    """Colours, titles, links, a rewritten line, 8-bit controls, reversed text and lone surrogates."""
    assert printable("a\x1b[2J\x1b]0;t\x07\rb\x9b1m\x7f") == r"a\x1b[2J\x1b]0;t\x07\rb\x9b1m\x7f"
    assert printable("\u202eb\u2066\ud800") == r"\u202eb\u2066\ud800"
    assert printable(ValueError("\0")) == r"\x00"
    plain = "\ta\n\\x1b é 你好 🙂 עברית"
    assert printable(plain) == plain
    for code in [*range(32), *range(127, 160)]:
        assert (printable(chr(code)) == chr(code)) == (chr(code) in "\t\n")
