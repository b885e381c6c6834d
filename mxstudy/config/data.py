"""The schema of a corpus and its tokenizer."""

from __future__ import annotations

import math
from dataclasses import field
from typing import Literal

from mxstudy.reader import cosmetic, key_in, named, require, schema, suggest

SMALLEST_BPE, LARGEST_BPE = 257, 2**24  # one id per byte, and the one that ends a document


@schema
class Corpus:
    """`validation_fraction`: the fraction of documents kept for validation, chosen by the hash of their text.

    Of a single text file it is the fraction of the characters, and the last ones are kept.
    """

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
    include_site_packages: bool = False  # the installed packages' source too


@schema
class Files(Corpus):
    """Local files, as paths or globs: one document per file (text) or per row, in `text_field` (jsonl, parquet).

    `validation_paths`: more files, all for validation; nothing of `paths` is then kept for it.
    """

    kind: Literal["files"] = "files"
    format: Literal["text", "jsonl", "parquet"]  # text: one document per file; jsonl, parquet: per row
    paths: tuple[str, ...] = named()  # files or globs; the identity of the corpus is their contents
    validation_paths: tuple[str, ...] = named(())  # their contents are in the identity too
    text_field: str = "text"

    def __post_init__(self) -> None:
        super().__post_init__()
        require(bool(self.paths), "paths: must name one file at least, not []")
        require(
            not self.validation_paths or self.validation_fraction == Corpus.validation_fraction,
            f"validation_paths: all validation is on them, and no fraction of paths ({self.validation_fraction}) is "
            f"kept; leave them out, or validation_fraction at {Corpus.validation_fraction}",
        )
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
    name: str = named()  # on the hub, or a local folder, whose contents are in the identity of the corpus
    subset: str | None = None  # the configuration to read, by its name on the hub
    folder: str | None = None
    split: str = "train"  # the split to read, by its name on the hub
    revision: str = named("main")  # a branch, tag or commit of the data set
    mirror: str | None = cosmetic(None)  # the same text in another place
    text_field: str = "text"  # the column with a document's text
    max_documents: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        require(bool(self.name.strip()), f"name: must name a data set or a folder, not {self.name!r}")
        require(self.max_documents is None or self.max_documents > 0, "max_documents: must be positive; null: all")


Data = PySource | Files | HuggingFace


@schema
class Phase:
    """The part of a training that begins at the fraction `from_fraction` of its steps, and its mix of corpora.

    `weights`: each corpus's share of the samples, relative to the other weights.
    """

    from_fraction: float = 0.0
    weights: dict[str, float]

    def __post_init__(self) -> None:
        require(0 <= self.from_fraction < 1, f"from_fraction: must lie in 0..1, below 1, not {self.from_fraction}")
        require(bool(self.weights), "weights: name at least one corpus")
        for name, weight in self.weights.items():
            require(0 < weight < math.inf, f"{key_in('weights', name)}: must be positive and finite, not {weight}")


@schema
class Blend:
    """Several corpora, mixed by weights that may change from phase to phase.

    `corpora`: the corpora by the names that the phases use; for a choice of conf/data, its name in a phase is enough.
    Their splits must agree, so that no corpus trains on a document that another keeps for validation.
    """

    kind: Literal["blend"] = "blend"
    corpora: dict[str, Data] = field(default_factory=dict)
    phases: tuple[Phase, ...]

    def __post_init__(self) -> None:
        starts = [phase.from_fraction for phase in self.phases]
        require(
            starts[:1] == [0.0] and starts == sorted(set(starts)),
            f"phases: must begin at fraction 0 and ascend, not {starts}",
        )
        for number, phase in enumerate(self.phases):
            for name in phase.weights:
                known = f"{key_in(f'phases[{number}].weights', name)}: no such corpus; {suggest(name, self.corpora)}"
                require(name in self.corpora, known)
        used = {name for phase in self.phases for name in phase.weights}
        for name, corpus in self.corpora.items():
            key = key_in("corpora", name)
            require(name in used, f"{key}: no phase uses it; leave it out")
            require(
                len(self.corpora) == 1 or not isinstance(corpus, Files) or not corpus.validation_paths,
                f"{key}.validation_paths: a blend keeps the same validation_fraction of all its corpora; leave it out",
            )
            require(
                corpus.validation_fraction == self.validation_fraction,
                f"{key}.validation_fraction: {corpus.validation_fraction} is not the "
                f"{self.validation_fraction} of {min(self.corpora)}; set all alike, for corpora may share texts",
            )

    @property
    def validation_fraction(self) -> float:
        """Return the validation fraction that all corpora have."""
        return self.corpora[min(self.corpora)].validation_fraction


TrainingData = Data | Blend


def blend_of(data: TrainingData) -> Blend:
    """Return a blend itself, or a corpus as a blend with one phase and this corpus alone, named by its kind."""
    if isinstance(data, Blend):
        return data
    return Blend(corpora={data.kind: data}, phases=(Phase(weights={data.kind: 1.0}),))


@schema
class Bytes:
    """UTF-8 bytes and one end-of-sequence token: 257 ids."""

    kind: Literal["bytes"] = "bytes"


@schema
class TrainedBPE:
    """Byte-level BPE, trained on the first `train_bytes` bytes of the training split in document order, and cached."""

    kind: Literal["bpe"] = "bpe"
    vocab_size: int  # ids of the tokenizer, including 257 for bytes and the end of a document
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
    name: str = named()  # a file, a folder or a name on the hub; its contents are in the corpus's identity
    eos_token: str | None = None  # what ends a document; null: as the tokenizer says


Tokenizer = Bytes | TrainedBPE | Pretrained
