"""Tokenizers make round trips, end documents with EOS, are trained once, and refuse what they cannot do."""

import os
import random

import pytest
import tokenizers

os.environ["HF_HUB_OFFLINE"] = "1"

from mxstudy import config
from mxstudy.data import tokenizer as tokenization
from mxstudy.data.tokenizer import EOS, ByteTokenizer, load_tokenizer
from mxstudy.reader import ConfigError

TEXTS = ["def f(x):\n    return x + 1\n", "na\u00efve \u65e5\u672c \U0001f600\t\r\n", f"not an end: {EOS}", " ", ""]
CORPUS = [f"def function_{i}(argument):\n    return argument + {i}\n" for i in range(200)]


def never():
    raise AssertionError("the corpus was read")


def decode(tokenizer, ids):
    return tokenizer.backend.decode(list(map(int, ids)), skip_special_tokens=False)


def bpe(tmp_path, vocab_size=300, **fields):
    trained = config.TrainedBPE(vocab_size=vocab_size, **fields)
    return load_tokenizer(trained, lambda: iter(CORPUS), tmp_path / "tokenizer.json")


def pretrained(tmp_path, special_tokens, name="given.json"):
    """Write a tokenizer.json with habits that must not reach a corpus: a BOS, truncation, padding."""
    backend = tokenization.byte_level(tokenizers.models.BPE())
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=special_tokens,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS, trainer)
    first = special_tokens[0]
    backend.post_processor = tokenizers.processors.TemplateProcessing(
        single=f"{first} $A", special_tokens=[(first, backend.token_to_id(first))]
    )
    backend.enable_truncation(4)
    backend.enable_padding(length=4)
    backend.save(str(tmp_path / name))
    return tmp_path / name


@pytest.mark.parametrize("kind", ["bytes", "bpe", "pretrained"])
def test_round_trip_and_no_special_tokens(tmp_path, kind):
    tokenizer = {
        "bytes": lambda: load_tokenizer(config.Bytes(), never, tmp_path / "unused.json"),
        "bpe": lambda: bpe(tmp_path),
        "pretrained": lambda: tokenization.load_pretrained(
            config.Pretrained(name=str(pretrained(tmp_path, ["<s>", "</s>"])))
        ),
    }[kind]()
    ids = tokenizer.encode_batch(TEXTS)
    assert [decode(tokenizer, i) for i in ids] == TEXTS
    assert all(tokenizer.eos_id not in i for i in ids)
    assert max(max(i, default=0) for i in ids) < tokenizer.vocab_size
    assert decode(tokenizer, [tokenizer.eos_id]) == tokenizer.eos_token


@pytest.mark.parametrize("make", [lambda path: ByteTokenizer(), bpe])
def test_a_saved_tokenizer_is_the_same_tokenizer(tmp_path, make):
    tokenizer = make(tmp_path)
    tokenizer.save(tmp_path / "saved.json")
    again = tokenization.open_tokenizer(tmp_path / "saved.json")
    assert (again.identity, again.eos_id, again.vocab_size) == (
        tokenizer.identity,
        tokenizer.eos_id,
        tokenizer.vocab_size,
    )
    for one, other in zip(tokenizer.encode_batch(TEXTS), again.encode_batch(TEXTS), strict=True):
        assert one.tolist() == other.tolist()
    plain = tokenizers.Tokenizer.from_file(str(tmp_path / "saved.json"))
    assert plain.encode(TEXTS[1]).ids == tokenizer.encode_batch(TEXTS)[1].tolist()


PIECES = [
    "ab",
    "I",
    "'s",
    "'",
    " ",
    "  ",
    "\n",
    "\t",
    "\u00a0",
    "\u3000",
    "\x1c",
    "7",
    "42",
    "?!",
    "\u65e5\u672c",
    EOS,
    "return",
]


@pytest.mark.parametrize("kind", ["bytes", "bpe"])
def test_what_begins_with_a_space_has_the_same_ids_alone_and_after_other_text(tmp_path, kind):
    tokenizer = ByteTokenizer() if kind == "bytes" else bpe(tmp_path)
    assert tokenizer.splits_at_spaces
    draw = random.Random(0)
    texts = ["".join(draw.choices(PIECES, k=draw.randint(1, 6))) for _ in range(4000)]
    befores, afters = [text.rstrip() for text in texts[:2000]], [f" {text}" for text in texts[2000:]]
    wholes = tokenizer.encode_batch([before + after for before, after in zip(befores, afters, strict=True)])
    parts = zip(tokenizer.encode_batch(befores), tokenizer.encode_batch(afters), strict=True)
    assert all(whole.tolist() == [*one, *other] for whole, (one, other) in zip(wholes, parts, strict=True))


@pytest.mark.parametrize(
    "change",
    [
        lambda backend: setattr(backend, "pre_tokenizer", tokenizers.pre_tokenizers.Metaspace()),
        lambda backend: setattr(backend, "pre_tokenizer", tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=True)),
        lambda backend: setattr(
            backend, "pre_tokenizer", tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        ),
        lambda backend: setattr(backend, "normalizer", tokenizers.normalizers.NFC()),
        lambda backend: backend.add_tokens(["b r"]),
    ],
    ids=["metaspace", "prefix", "no words", "normalizer", "added token"],
)
def test_a_tokenizer_that_may_look_across_words_says_so(tmp_path, change):
    backend = bpe(tmp_path).backend
    change(backend)
    assert not tokenization.Tokenizer(backend).splits_at_spaces


def test_bytes_are_the_bytes():
    tokenizer = ByteTokenizer()
    assert tokenizer.vocab_size == 257
    assert tokenizer.eos_id == 256
    assert bytes(tokenizer.encode_batch(["\u00e9\x00z"])[0].tolist()) == b"\xc3\xa9\x00z"
    every_byte = "".join(map(chr, range(128))) + "\u00a0\u07ff\u0800\uffff\U00010000\U0010ffff"
    assert decode(tokenizer, tokenizer.encode_batch([every_byte])[0]) == every_byte


def test_bpe_is_trained_once_and_always_the_same(tmp_path):
    first = bpe(tmp_path)
    again = load_tokenizer(config.TrainedBPE(vocab_size=300), never, tmp_path / "tokenizer.json")
    (tmp_path / "other").mkdir()
    assert first.identity == again.identity == bpe(tmp_path / "other").identity
    assert first.vocab_size == 300
    assert len(first.encode_batch([CORPUS[0]])[0]) < len(CORPUS[0]) / 2


def test_bpe_sees_the_first_bytes_only(tmp_path):
    size = len("".join(CORPUS[:3]).encode()) + 5
    short = bpe(tmp_path, train_bytes=size)
    texts = iter([*CORPUS[:3], CORPUS[3][:5]])
    assert short.identity == tokenization.train_bpe(config.TrainedBPE(vocab_size=300), texts).identity
    assert "".join(tokenization.first_bytes(iter(["ab", "\u00e9\u00e9"]), 5)) == "ab\u00e9"


def test_bpe_without_room_for_the_bytes_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"vocab_size: .* 257 ids at least, .* not 256"):
        bpe(tmp_path, vocab_size=256)
    assert bpe(tmp_path, vocab_size=257).vocab_size == 257


def test_pretrained_by_file_and_by_folder(tmp_path):
    by_file = tokenization.load_pretrained(config.Pretrained(name=str(pretrained(tmp_path, ["<s>", "</s>"]))))
    pretrained(tmp_path, ["<s>", "</s>"], "tokenizer.json")
    by_folder = tokenization.load_pretrained(config.Pretrained(name=str(tmp_path)))
    assert by_file.identity == by_folder.identity
    assert by_file.eos_token == "</s>"
    assert by_file.eos_id == 1


def test_pretrained_eos_can_be_named(tmp_path):
    path = pretrained(tmp_path, ["<bos>", "<stop>"])
    assert tokenization.load_pretrained(config.Pretrained(name=str(path), eos_token="<stop>")).eos_id == 1
    with pytest.raises(ConfigError, match=r"tokenizer\.eos_token: .* has none of .*; set it .*: <bos>, <stop>"):
        tokenization.load_pretrained(config.Pretrained(name=str(path)))
    with pytest.raises(ConfigError, match=r"has none of '<end>'; set it"):
        tokenization.load_pretrained(config.Pretrained(name=str(path), eos_token="<end>"))


def test_identity_is_contents_not_place(tmp_path):
    here = config.Pretrained(name=str(pretrained(tmp_path, ["</s>"])))
    moved = config.Pretrained(name=str(pretrained(tmp_path, ["</s>"], "moved.json")))
    other = config.Pretrained(name=str(pretrained(tmp_path, ["<s>", "</s>"], "other.json")))
    assert tokenization.identity(here) == tokenization.identity(moved) != tokenization.identity(other)
    small, large = (tokenization.identity(config.TrainedBPE(vocab_size=size)) for size in (300, 400))
    assert small != large


def test_pretrained_that_is_not_there_is_refused(tmp_path):
    broken = tmp_path / "broken.json"
    broken.write_text("{}")
    (tmp_path / "empty").mkdir()
    for name, message in {
        "org/absent": "'org/absent' is neither a local path nor found on the Hugging Face hub",
        str(broken): "broken.json' is not a tokenizer.json",
        str(tmp_path / "empty"): "empty/tokenizer.json is no file",
    }.items():
        with pytest.raises(ConfigError, match=f"tokenizer.name: .*{message}"):
            tokenization.load_pretrained(config.Pretrained(name=name))
