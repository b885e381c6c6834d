"""The schema of a corpus and its tokenizer."""

from __future__ import annotations

from typing import Literal

from mxstudy.reader import cosmetic, named, require, schema

SMALLEST_BPE, LARGEST_BPE = 257, 2**24  # one id per byte, and the one that ends a document


@schema
class Corpus:
    """`validation_fraction`: the fraction of documents kept for validation, chosen by the hash of their text."""

    validation_fraction: float = 0.02

    def __post_init__(self) -> None:
        require(
            0 <= self.validation_fraction < 1,
            f"validation_fraction: must lie in 0..1 and leave something to train on, not {self.validation_fraction}",
        )


@schema
class PySource(Corpus):
    """Python source text of the interpreter that runs the job, optionally with the packages installed for it."""

    kind: Literal["pysource"] = "pysource"
    include_site_packages: bool = False


@schema
class Files(Corpus):
    """Local files, as paths or globs: one document per file (text) or per row, in `text_field` (jsonl, parquet)."""

    kind: Literal["files"] = "files"
    format: Literal["text", "jsonl", "parquet"]
    paths: tuple[str, ...] = named()  # the identity of the corpus is the files' contents, not their paths
    text_field: str = "text"

    def __post_init__(self) -> None:
        super().__post_init__()
        require(bool(self.paths), "paths: must name one file at least, not []")
        require(
            self.format != "text" or self.text_field == "text",
            "text_field: a file of format text is one document without fields; leave it out",
        )


@schema
class HuggingFace(Corpus):
    """A data set of the Hugging Face hub, or a local folder of data files, streamed.

    `folder`: read only this folder of the data set. `mirror`: a local copy of the data set, in the hub's layout, to
    read instead. `max_documents`: read at most this many documents.
    """

    kind: Literal["hugging_face"] = "hugging_face"
    name: str = named()  # in the identity of the corpus; a local folder by its contents
    subset: str | None = None
    folder: str | None = None
    split: str = "train"
    revision: str = named("main")
    mirror: str | None = cosmetic(None)  # the same text in another place
    text_field: str = "text"
    max_documents: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        require(bool(self.name.strip()), f"name: must name a data set or a folder, not {self.name!r}")
        require(self.max_documents is None or self.max_documents > 0, "max_documents: must be positive; null: all")


Data = PySource | Files | HuggingFace


@schema
class Bytes:
    """UTF-8 bytes and one end-of-sequence token: 257 ids."""

    kind: Literal["bytes"] = "bytes"


@schema
class TrainedBPE:
    """Byte-level BPE, trained on the first `train_bytes` bytes of the training split in document order, and cached."""

    kind: Literal["bpe"] = "bpe"
    vocab_size: int
    train_bytes: int = 100_000_000

    def __post_init__(self) -> None:
        require(
            SMALLEST_BPE <= self.vocab_size <= LARGEST_BPE,
            f"vocab_size: a byte-level BPE has {SMALLEST_BPE} ids at least, and {LARGEST_BPE:,} at most, not "
            f"{self.vocab_size}",
        )
        require(self.train_bytes > 0, f"train_bytes: must be positive, not {self.train_bytes}")


@schema
class Pretrained:
    """A tokenizer given as a `tokenizer.json`, a folder that holds one, or a name on the Hugging Face hub."""

    kind: Literal["pretrained"] = "pretrained"
    name: str = named()  # its contents are in the identity of the corpus
    eos_token: str | None = None


Tokenizer = Bytes | TrainedBPE | Pretrained
