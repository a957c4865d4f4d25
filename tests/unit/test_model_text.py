"""Tokenizer wrapper and incremental detokenising."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from pilotfish_workers.model.errors import TextError
from pilotfish_workers.model.text import Text
from pilotfish_workers.model.vocabulary import describe_difference, first_difference
from tests.tiny_models import build_tokenizer

REPLACEMENT = "\ufffd"


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Text:
    folder = tmp_path_factory.mktemp("tokenizer")
    tokenizer = build_tokenizer()
    tokenizer.add_tokens(["<tool>", "añadido"])  # added, but not special
    tokenizer.save_pretrained(folder)
    return Text(str(folder))


@pytest.fixture(scope="module")
def fallback_text(tmp_path_factory: pytest.TempPathFactory) -> Text:
    """Like SentencePiece: words with a space sign, byte tokens for the rest, first space cut."""
    words = ["<unk>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "▁the", "a", "b"]
    vocab = {word: number for number, word in enumerate(words)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True))
    tokenizer.add_special_tokens(["</s>"])
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    folder = tmp_path_factory.mktemp("fallback")
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>").save_pretrained(folder)
    return Text(str(folder))


def pushed(text: Text, ids: list[int], cuts: list[int]) -> list[str]:
    detokenizer = text.detokenizer()
    pieces = []
    begin = 0
    for cut in [*cuts, len(ids)]:
        end = min(len(ids), begin + cut)
        pieces.append(detokenizer.push(ids[begin:end]))
        begin = end
    return [*pieces, detokenizer.flush()]


def test_every_byte_and_every_character_round_trips(text: Text) -> None:
    for sample in ("the inner man", "naïve 中文 テスト 👩‍👩‍👧‍👦", "\x00\x7f\n\t", ""):
        assert text.decode(text.encode(sample)) == sample


@given(
    ids=st.lists(st.integers(0, 300), max_size=60), cuts=st.lists(st.integers(0, 5), max_size=60)
)
@settings(deadline=None, max_examples=300)
def test_random_byte_level_ids_detokenize_like_decoding_at_once(
    text: Text, ids: list[int], cuts: list[int]
) -> None:
    assert "".join(pushed(text, ids, cuts)) == text.decode(ids)


@given(sample=st.text(st.characters(codec="utf-8"), max_size=40))
@settings(deadline=None, max_examples=300)
def test_no_push_ends_in_half_a_character(text: Text, sample: str) -> None:
    sample = sample.replace(REPLACEMENT, "?")
    ids = text.encode(sample)
    detokenizer = text.detokenizer()
    shown = ""
    for token in ids:
        shown += detokenizer.push([token])
        assert REPLACEMENT not in shown
        assert text.decode(ids).startswith(shown)
    assert shown + detokenizer.flush() == text.decode(ids)


@given(
    ids=st.lists(st.one_of(st.integers(0, 262), st.integers(256, 262), st.just(1)), max_size=40),
    cuts=st.lists(st.integers(0, 5), max_size=40),
)
@settings(deadline=None, max_examples=300)
def test_random_byte_fallback_ids_detokenize_like_decoding_at_once(
    fallback_text: Text, ids: list[int], cuts: list[int]
) -> None:
    assert "".join(pushed(fallback_text, ids, cuts)) == fallback_text.decode(ids)


def test_a_text_of_invalid_bytes_is_shown_as_it_goes(text: Text) -> None:
    """Held text must not grow without bound, else decoding takes quadratic time."""
    continuation = text.vocabulary().index("Ģ")  # the byte 0x80
    detokenizer = text.detokenizer()
    assert detokenizer.push([continuation] * 1000) == REPLACEMENT * 1000


def test_a_conversation_takes_the_models_own_template(text: Text) -> None:
    ids = text.chat([{"role": "user", "content": "hi"}])
    words = text.vocabulary()
    assert [words[i] for i in ids] == ["<user>", "h", "i", "<eos>", "<assistant>"]


def test_a_model_without_template_refuses_messages(tmp_path: Path) -> None:
    build_tokenizer(chat_template=None).save_pretrained(tmp_path)
    with pytest.raises(TextError, match="no chat template"):
        Text(str(tmp_path)).chat([{"role": "user", "content": "hi"}])


def test_a_template_that_refuses_the_messages_is_a_text_error(tmp_path: Path) -> None:
    build_tokenizer(chat_template="{{ raise_exception('roles must alternate') }}").save_pretrained(
        tmp_path
    )
    with pytest.raises(TextError, match="roles must alternate"):
        Text(str(tmp_path)).chat([{"role": "user", "content": "hi"}])


def test_a_folder_without_tokenizer_is_a_text_error(tmp_path: Path) -> None:
    with pytest.raises(TextError, match="cannot load the tokenizer"):
        Text(str(tmp_path))


def test_equal_vocabularies_have_equal_fingerprints(tmp_path: Path, text: Text) -> None:
    build_tokenizer().save_pretrained(tmp_path / "same")
    build_tokenizer(vocab_size=300).save_pretrained(tmp_path / "larger")
    same, larger = Text(str(tmp_path / "same")), Text(str(tmp_path / "larger"))
    assert same.fingerprint() == Text(str(tmp_path / "same")).fingerprint()
    assert len({text.fingerprint(), same.fingerprint(), larger.fingerprint()}) == 3
    assert (same.vocab_size, larger.vocab_size) == (288, 300)


def test_the_first_difference_of_two_vocabularies_is_found() -> None:
    assert first_difference(["a", "b"], ["a", "b"]) is None
    assert first_difference(["a", "b"], ["a", "c"]) == (1, "b", "c")
    assert first_difference(["a"], ["a", "b"]) == (1, None, "b")
    assert describe_difference(["a", "b"], ["a", "b"]) == ""
    sentence = describe_difference(["a", "b"], ["a", "c", "d"])
    assert "the draft has 2 tokens, the target 3" in sentence
    assert "id 1: 'b' in the draft, 'c' in the target" in sentence
