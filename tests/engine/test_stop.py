"""Where a response ends by a text: asked of the last token first, and the same as by decoding every time."""

import random

import chats
import pytest
import tiny
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from rft_fn.engine.requests import Stop

PIECES = [
    "ab",
    "b",
    "a",
    "\n",
    "\n\n",
    "</a",
    ">",
    " >",
    "é",
    "名前",
    "🙂",
    "a🙂",
    "e\u0301",
    " a",
    "ba",
    ". ",
]


def byte_level():
    """Tokens of bytes, of text, and of bytes that begin or end within a character."""
    to_text = {}
    for piece in PIECES:
        shown = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(piece)
        to_text[piece] = "".join(x for x, _ in shown)
    parts = [x[i:j] for x in to_text.values() for i in range(len(x)) for j in range(i + 1, len(x) + 1)]
    vocab = {
        x: i for i, x in enumerate(dict.fromkeys([*sorted(pre_tokenizers.ByteLevel.alphabet()), *parts]))
    }
    core = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([AddedToken("<é>", special=True), AddedToken("<b>", special=True)])
    return PreTrainedTokenizerFast(tokenizer_object=core)


def sentencepiece():
    """Tokens as Llama 2's: words with their space, and bytes for the rest."""
    words = [
        "▁a",
        "▁",
        "a",
        "b",
        "ab",
        "▁>",
        ">",
        "</a",
        "é",
        "▁名",
        "前",
        "\n",
        *(f"<0x{x:02X}>" for x in range(256)),
    ]
    core = Tokenizer(models.BPE(vocab={x: i for i, x in enumerate(words)}, merges=[], byte_fallback=True))
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    core.decoder = decoders.Sequence(parts)
    return PreTrainedTokenizerFast(tokenizer_object=core)


def with_decoder(decoder):
    words = ["a</w>", "b</w>", "a", "b", "ab", "▁a", "▁b", "##a", "##b", ">", "é", ".", "'"]
    core = Tokenizer(models.WordLevel(vocab={x: i for i, x in enumerate(words)}, unk_token="a"))
    if decoder is not None:
        core.decoder = decoder
    return PreTrainedTokenizerFast(tokenizer_object=core)


TOKENIZERS = {
    "byte level": (byte_level, True),
    "bytes alone": (lambda: chats.tokenizer(None), True),
    "sentencepiece": (sentencepiece, True),
    "characters": (tiny.tokenizer, True),
    "metaspace": (lambda: with_decoder(decoders.Metaspace()), True),
    "ends of words": (lambda: with_decoder(decoders.BPEDecoder("</w>")), True),
    "no decoder": (lambda: with_decoder(None), True),
    "word pieces": (lambda: with_decoder(decoders.WordPiece()), False),
}


@pytest.mark.parametrize("name", TOKENIZERS)
def test_the_last_token_tells_what_decoding_every_time_would(name):
    made, known = TOKENIZERS[name]
    tokenizer = made()
    draw = random.Random(name)
    ended = skipped = 0
    for _ in range(150):
        tokens = [draw.randrange(len(tokenizer)) for _ in range(draw.randint(2, 25))]
        whole = tokenizer.decode(tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        texts = []
        while len(texts) < draw.randint(1, 3):  # most of them cross borders of tokens
            start = draw.randrange(len(whole) + 1)
            text = whole[start : start + draw.randint(1, 5)] if draw.random() < 0.8 else "ab>"
            texts.append(text or "ba")
        stop = Stop(tokenizer, frozenset(), texts)
        every = Stop(tokenizer, frozenset(), texts)
        every._told_by_token = False
        for size in range(1, len(tokens) + 1):
            found = stop.ends(tokens[:size])
            assert found == every.ends(tokens[:size]), (texts, whole)
            ended += found
            skipped += not stop._may_complete(tokens[size - 1])
            if found:
                break
        cut = draw.randrange(size)
        response = tokens[:cut]
        assert stop.extend(response, tokens[cut:]) == found and response == tokens[:size]
    assert ended > 50 and (skipped > 100) == known


def test_a_token_that_cannot_end_a_response_is_not_decoded_again(monkeypatch):
    tokenizer = byte_level()
    stop = Stop(tokenizer, frozenset([3]), ["</a>", "名前"])
    ids = [x for x in range(len(tokenizer)) if x != 3]
    asked = []
    decode = tokenizer.decode
    monkeypatch.setattr(stop, "_text", lambda tokens: asked.append(len(tokens)) or decode(list(tokens)))
    for token in ids:
        stop.ends([ids[0], token])
    assert asked.count(1) >= len(ids)  # each alone, once
    asked.clear()
    plain = [x for x in ids if not stop._may[x]]
    assert len(plain) > 0.3 * len(ids) and not any(stop.ends([ids[0], x]) for x in plain) and not asked
