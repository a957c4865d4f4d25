"""Tokenizer wrapper and incremental detokenising."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
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


@pytest.fixture(scope="module")
def llama_like_text(tmp_path_factory: pytest.TempPathFactory) -> Text:
    """Merges, a space sign put before every text, and a first token that is added by itself."""
    letters = ["▁", *"blue", "bl", "blu", "blue", "▁blue", "▁▁"]
    vocab = {word: number for number, word in enumerate(["<unk>", "<s>", "<0x0A>", *letters])}
    merges = [("b", "l"), ("bl", "u"), ("blu", "e"), ("▁", "blue"), ("▁", "▁")]
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.add_special_tokens(["<s>"])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    folder = tmp_path_factory.mktemp("llama")
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>").save_pretrained(folder)
    return Text(str(folder))


@pytest.fixture(scope="module")
def wordpiece_text(tmp_path_factory: pytest.TempPathFactory) -> Text:
    words = ["[UNK]", "sea", "##side", "blue"]
    tokenizer = Tokenizer(
        models.WordPiece(vocab={w: n for n, w in enumerate(words)}, unk_token="[UNK]")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.WordPiece("##", cleanup=False)
    folder = tmp_path_factory.mktemp("wordpiece")
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
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


@given(sample=st.text(st.characters(codec="utf-8"), max_size=20))
@settings(deadline=None, max_examples=200)
def test_the_bytes_of_byte_level_tokens_are_the_texts_bytes(text: Text, sample: str) -> None:
    assert b"".join(map(text.token_bytes, text.encode(sample))) == sample.encode()


def test_every_kind_of_token_has_its_bytes(
    text: Text, fallback_text: Text, llama_like_text: Text, wordpiece_text: Text
) -> None:
    def by_name(words: Text, *tokens: str) -> list[bytes]:
        return [words.token_bytes(words.vocabulary().index(token)) for token in tokens]

    assert by_name(text, "<eos>", "Ġthe", "Ã", "<tool>") == [b"<eos>", b" the", b"\xc3", b"<tool>"]
    assert by_name(fallback_text, "▁", "▁the", "a", "<0x0A>", "<0xE4>", "</s>") == [
        *(b" ", b" the", b"a", b"\n", b"\xe4", b"</s>")
    ]
    assert by_name(llama_like_text, "▁blue", "bl", "▁▁", "<s>") == [b" blue", b"bl", b"  ", b"<s>"]
    assert by_name(wordpiece_text, "sea", "##side") == [b" sea", b"side"]


def test_a_tokens_bytes_are_worked_out_once(
    fallback_text: Text, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The verify engine asks for up to 21 of them a token, between two passes."""
    known = [fallback_text.token_bytes(token) for token in range(fallback_text.vocab_size)]

    def fail(ids: list[int]) -> str:
        raise AssertionError("the decoder is called again")

    monkeypatch.setattr(fallback_text, "decode", fail)
    assert [fallback_text.token_bytes(token) for token in range(fallback_text.vocab_size)] == known


def test_an_id_that_stands_for_nothing_has_no_bytes(tmp_path: Path, fallback_text: Text) -> None:
    tokenizer = Tokenizer(models.WordLevel(vocab={"a": 0, "c": 2}, unk_token="a"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(tmp_path)
    holed = Text(str(tmp_path))
    assert [holed.token_bytes(number) for number in (1, 3, -1)] == [b"", b"", b""]
    assert [fallback_text.token_bytes(number) for number in (-1, 10**6)] == [b"", b""]


def test_a_word_is_found_at_the_beginning_and_after_a_space(text: Text) -> None:
    words = text.vocabulary()
    ids = text.word_ids("the")
    assert [[words[token] for token in word] for word in ids] == [["the"], ["Ġthe"]]
    assert text.word_ids("  the") == ids, "as vLLM takes it"
    assert [[words[token] for token in word] for word in text.word_ids("\n")] == [
        ["Ċ"],
        ["Ġ", "Ċ"],
    ]
    assert [[words[token] for token in word] for word in text.word_ids(" ")] == [["Ġ"]]


def test_the_tokens_of_a_word_hold_none_that_the_tokenizer_adds(llama_like_text: Text) -> None:
    words = llama_like_text.vocabulary()
    assert words[llama_like_text.encode("blue")[0]] == "<s>"
    assert [[words[token] for token in word] for word in llama_like_text.word_ids("blue")] == [
        ["▁blue"],
        ["▁", "▁blue"],
    ]


def test_forms_of_a_word_that_are_the_same_count_once(wordpiece_text: Text) -> None:
    assert wordpiece_text.word_ids("seaside") == [(1, 2)]


def test_a_word_without_tokens_is_refused(text: Text, wordpiece_text: Text) -> None:
    for words, word in ((text, ""), (wordpiece_text, "  ")):
        with pytest.raises(TextError, match="has no tokens"):
            words.word_ids(word)
