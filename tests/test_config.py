"""The strict reader, the schema's own checks, and the fingerprint work."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import yaml
from each import each

from mxstudy.config import Pretrain, fingerprint, read_run
from mxstudy.reader import ConfigError, default_of, flatten, plain, read, schema, suggest

VALUES: dict[str, Any] = {
    "study": "pretrain",
    "model": {
        "kind": "decoder",
        "hidden_size": 64,
        "ffn_size": 128,
        "num_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 2,
        "vocab_size": 320,
    },
    "norm": {"kind": "mxnorm", "p": 2},
    "precision": {"schedule": [{"from_step": 0, "plan": {"layers.*": "mxfp8"}}]},
    "data": {"kind": "files", "format": "text", "paths": ["a.txt"]},
    "tokenizer": {"kind": "bytes"},
    "optimizer": {"lr": 1e-3},
    "schedule": {"kind": "cosine"},
    "train": {"steps": 10, "batch_size": 4, "sequence_length": 32},
}


def changed(**dotted: Any) -> dict[str, Any]:
    """Return VALUES with `model__num_heads=3` set as model.num_heads."""
    values = copy.deepcopy(VALUES)
    for key, value in dotted.items():
        *parents, last = key.split("__")
        node = values
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = value
    return values


def digest(**dotted: Any) -> str:
    return fingerprint(read_run(changed(**dotted)), "cpu", {"sha256": "abc"})


def test_reads_nested_values_and_fills_in_defaults() -> None:
    config = read_run(VALUES)
    assert isinstance(config, Pretrain)
    assert config.norm.p == 2.0
    assert type(config.norm.p) is float
    assert config.optimizer.betas == (0.9, 0.95)
    assert config.data.paths == ("a.txt",)
    assert config.precision.schedule[0].plan == {"layers.*": "mxfp8"}


def test_a_config_written_as_yaml_reads_back_equal() -> None:
    config = read_run(changed(optimizer__eps=1e-9))
    again = read_run(yaml.safe_load(yaml.safe_dump(plain(config))))
    assert again == config
    assert fingerprint(again, "cpu", {}) == fingerprint(config, "cpu", {})


@each(
    ("dotted", "message"),
    [
        ({"trian": {}}, "trian: no such key; did you mean 'train'?"),
        ({"train__stepz": 3}, "train.stepz: no such key; did you mean 'steps'?"),
        ({"precision__schedule": [{"plam": {}}]}, "precision.schedule[0].plam: no such key; did you mean 'plan'?"),
        ({"train__steps": "???"}, "train.steps: missing; it has no default"),
        ({"train__steps": "ten"}, "train.steps: 'ten' is not an integer"),
        ({"train__steps": 10.0}, "train.steps: 10.0 is not an integer"),
        ({"train__steps": True}, "train.steps: True is not an integer"),
        ({"train__compile": 1}, "train.compile: 1 is not true or false"),
        ({"optimizer__lr": "1e-3"}, "optimizer.lr: '1e-3' is not a number"),
        ({"optimizer__betas": [0.9]}, "optimizer.betas: needs 2 values, not 1"),
        ({"data__paths": "a.txt"}, "data.paths: 'a.txt' is not a list; write 'data.paths=[a.txt]'"),
        ({"data__format": "txt"}, "data.format: 'txt' is not a choice; did you mean 'text'?"),
        ({"precision__skip_blocks": "head"}, "precision.skip_blocks: 'head' is not an integer or a list of 2 or tail"),
        (
            {"precision__skip_blocks": [1, 2, 3]},
            "precision.skip_blocks: [1, 2, 3] is not an integer or a list of 2 or tail",
        ),
        ({"norm__kind": "mxnrom"}, "norm.kind: 'mxnrom' is not a choice; did you mean 'mxnorm'?"),
        ({"norm": "rmsnorm"}, "norm: 'rmsnorm' is not a mapping"),
        (
            {"precision__schedule": [{"plan": {"layers.*": True}}]},
            "precision.schedule[0].plan[layers.*]: True is not a string",
        ),
        ({"precision__block_size": 48}, "precision.block_size: 48 is not a choice; choose from 16, 32, 64"),
        ({"study": "pretrian"}, "study: 'pretrian' is not a choice; did you mean 'pretrain'?"),
        ({"norm__p": 0}, "norm.p: the exponent of the p-mean must be positive and finite, not 0.0"),
        ({"norm__p": float("inf")}, "norm.p: must be a finite number, not inf"),
        ({"model__num_heads": 3}, "model.num_heads: hidden_size 64 does not divide into 3 heads of an even size"),
        ({"model__num_kv_heads": 3}, "model.num_kv_heads: 4 query heads do not divide into 3 groups"),
        ({"model__num_layers": 0}, "model.num_layers: must lie in 1 .. 4,096, not 0"),
        (
            {"train__micro_batch_size": 3},
            "train.micro_batch_size: batch_size 4 does not divide into micro-batches of 3",
        ),
        ({"train__recompute_mlp": -1}, "train.recompute_mlp: must not be negative, not -1"),
        (
            {"train__recompute_mlp": 3},
            "train.recompute_mlp: 3 is more than the model's 2 blocks (model.num_layers)",
        ),
        (
            {"train__recompute_mlp": 1, "train__activation_checkpointing": "full"},
            "train.recompute_mlp: activation_checkpointing=full computes whole blocks again; leave one of them out",
        ),
        (
            {"train__recompute_mlp": 1, "train__all_gather": "mx"},
            "train.recompute_mlp: the backward would need the weight's codes for the forward, but all_gather=mx "
            "gathers only those for dgrad then; set it to 0, or take all_gather=compute",
        ),
        ({"schedule__decay_fraction": 0.5}, "schedule.decay_fraction: only for wsd, not for cosine; leave it out"),
        ({"schedule__warmup_fraction": 2}, "schedule.warmup_fraction: must lie in 0..1, not 2.0"),
        ({"optimizer__lr": 0}, "optimizer.lr: must be positive and finite, not 0.0"),
        ({"optimizer__lr": float("inf")}, "optimizer.lr: must be a finite number, not inf"),
        ({"optimizer__eps": float("inf")}, "optimizer.eps: must be a finite number, not inf"),
        ({"optimizer__weight_decay": float("nan")}, "optimizer.weight_decay: must be a finite number, not nan"),
        ({"train__steps": 10**30}, f"train.steps: must be at most 1,000,000,000, not {10**30:,}"),
        (
            {"train__batch_size": 10**12, "train__sequence_length": 2},
            "train.batch_size: 1,000,000,000,000 sequences are 2,000,000,000,000 tokens a step; must be at most "
            "2,147,483,648",
        ),
        ({"runs_dir": ""}, "runs_dir: must name a folder, not ''"),
        ({"cache_dir": " "}, "cache_dir: must name a folder, not ' '"),
        ({"optimizer__betas": [0.9, 1.5]}, "optimizer.betas: must lie in 0 .. 1, below 1, not [0.9, 1.5]"),
        ({"optimizer__eps": -1}, "optimizer.eps: must be finite and not negative, not -1.0"),
        ({"optimizer__weight_decay": -1}, "optimizer.weight_decay: must be finite and not negative, not -1.0"),
        (
            {"schedule__warmup_fraction": 0, "schedule__initial_ratio": 0.1},
            "schedule.initial_ratio: there is no warm-up (warmup_fraction is 0); leave it out",
        ),
        (
            {"schedule__warmup_steps": 0},
            "schedule.warmup_steps: must be positive or null, not 0",
        ),
        (
            {"schedule__warmup_steps": 2, "schedule__warmup_fraction": 0.2},
            "schedule.warmup_fraction: 0.2 is set beside warmup_steps=2; give one",
        ),
        (
            {"schedule__warmup_steps": 10},
            "schedule.warmup_steps: 10 steps of warm-up and 0 of decay do not fit into 10 steps; lower it, or set it "
            "to null for schedule.warmup_fraction",
        ),
        (
            {"schedule": {"kind": "wsd", "warmup_steps": 8}},
            "schedule.warmup_steps: 8 steps of warm-up and 2 of decay do not fit into 10 steps; lower it, or set it "
            "to null for schedule.warmup_fraction",
        ),
        ({"validation__sequences": 0}, "validation.sequences: must be at least 1, not 0"),
        ({"validation__every_steps": -1}, "validation.every_steps: must not be negative, not -1"),
        ({"checkpoint__every_steps": -1}, "checkpoint.every_steps: must not be negative, not -1"),
        ({"checkpoint__keep_last": 0}, "checkpoint.keep_last: must be at least 1, not 0"),
    ],
)
def test_a_bad_value_is_refused_by_its_full_key(dotted: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_run(changed(**dotted))
    assert str(caught.value) == message


def test_what_belongs_to_a_class_is_no_key() -> None:
    with pytest.raises(ConfigError, match=r"^compares: no such key; choose from experiment"):
        read_run(changed(compares=False))


def test_a_baseline_that_nothing_would_be_compared_with_is_refused() -> None:
    with pytest.raises(ConfigError) as error:
        read_run({"study": "approximation", "baseline": {"norm": "rmsnorm"}})
    assert str(error.value) == "baseline: approximation does not compare arms; leave it out"


def test_no_study_says_where_to_start() -> None:
    with pytest.raises(ConfigError, match=r"\+experiment=NAME"):
        read_run({})


@each("starts", [[1], [0, 5, 5], [0, 9, 3], []])
def test_precision_rows_start_at_step_0_and_ascend(starts: list[int]) -> None:
    rows = [{"from_step": start, "plan": {"layers.*": "bf16"}} for start in starts]
    with pytest.raises(ConfigError, match=r"^precision\.schedule: rows must start at step 0 and ascend"):
        read_run(changed(precision__schedule=rows))


A = {"kind": "pysource"}
LOWER = A | {"validation_fraction": 0.1}


@each(
    ("phases", "corpora", "message"),
    [
        ([], {}, "data.phases: must begin at fraction 0 and ascend, not []"),
        ([(0.1, {"a": 1})], {"a": A}, "data.phases: must begin at fraction 0 and ascend, not [0.1]"),
        (
            [(0, {"a": 1}), (0.6, {"a": 1}), (0.6, {"a": 2})],
            {"a": A},
            "data.phases: must begin at fraction 0 and ascend, not [0.0, 0.6, 0.6]",
        ),
        ([(0, {"a": 1}), (1, {"a": 1})], {"a": A}, "data.phases[1].from_fraction: must lie in 0..1, below 1, not 1.0"),
        ([(0, {})], {}, "data.phases[0].weights: name at least one corpus"),
        ([(0, {"a": 0})], {"a": A}, "data.phases[0].weights.a: must be positive and finite, not 0.0"),
        ([(0, {"a": -1})], {"a": A}, "data.phases[0].weights.a: must be positive and finite, not -1.0"),
        ([(0, {"a": math.inf})], {"a": A}, "data.phases[0].weights.a: must be a finite number, not inf"),
        (
            [(0, {"web": 1}), (0.5, {"wbe": 1})],
            {"web": A},
            "data.phases[1].weights.wbe: no such corpus; did you mean 'web'?",
        ),
        ([(0, {"a": 1})], {"a": A, "b": A}, "data.corpora.b: no phase uses it; leave it out"),
        (
            [(0, {"a": 1, "b": 1})],
            {"a": A, "b": LOWER},
            "data.corpora.b.validation_fraction: 0.1 is not the 0.02 of a; set all alike, for corpora may share texts",
        ),
    ],
)
def test_a_blend_that_cannot_be_is_refused(phases: Any, corpora: Any, message: str) -> None:
    rows = [{"from_fraction": start, "weights": weights} for start, weights in phases]
    with pytest.raises(ConfigError) as caught:
        read_run(changed(data={"kind": "blend", "corpora": corpora, "phases": rows}))
    assert str(caught.value) == message


@each("uri", ["file:mlruns", "file:///tmp/mlruns", "mlruns"])
def test_a_file_store_is_refused(uri: str) -> None:
    with pytest.raises(ConfigError, match=r"^tracking\.uri: .* would be a file store"):
        read_run(changed(tracking__uri=uri))


def test_null_only_where_it_is_allowed() -> None:
    assert read_run(changed(tracking__uri=None)).tracking.uri is None
    with pytest.raises(ConfigError, match=r"^train\.steps: None is not an integer"):
        read_run(changed(train__steps=None))


def test_suggestions_name_what_is_near_or_list_all() -> None:
    assert suggest("mxnorm_p3", ["rmsnorm", "mxnorm_p2"]) == "did you mean 'mxnorm_p2'?"
    assert suggest("zzz", ["rmsnorm", "mxnorm_p2"]) == "choose from rmsnorm, mxnorm_p2"


def test_flatten_dots_mappings_and_numbers_lists() -> None:
    assert flatten({"a": {"b": 1}, "c": [{"d": 2}, 3]}) == {"a.b": 1, "c.0.d": 2, "c.1": 3}


# ------------------------------------------------------------------------------------------- the fingerprint


def test_the_fingerprint_is_the_same_in_every_process() -> None:
    """A change of this value orphans every run that exists. Raise SCHEMA_VERSION and announce it."""
    assert digest() == "332f2ba85db783253b5c8c1f2ea2836dd595cca715b4a495a7890ce5d67e01f3"


@each(
    "dotted",
    [
        {"seed": 1},
        {"data_seed": 1},
        {"norm__p": 1},
        {"norm": {"kind": "rmsnorm"}},
        {"norm__eps": 1e-6},
        {"precision__schedule": [{"plan": {"layers.*": "bf16"}}]},
        {"precision__scale_rule": "floor"},
        {"data__format": "jsonl"},
        {"tokenizer": {"kind": "bpe", "vocab_size": 300}},
        {"train__micro_batch_size": 2},
        {"train__compile": True},
        {"validation__sequences": 8},
    ],
)
def test_what_can_change_a_number_changes_the_fingerprint(dotted: dict[str, Any]) -> None:
    assert digest(**dotted) != digest()


@each(
    "dotted",
    [
        {"experiment": "other"},
        {"runs_dir": "elsewhere"},
        {"cache_dir": "elsewhere"},
        {"rerun": True},
        {"stale": "rerun"},
        {"wait": True},
        {"baseline": {"norm": "rmsnorm"}},
        {"tracking__uri": None},
        {"train__device": "cpu"},
        {"data__paths": ["b.txt"]},
        {"validation__every_steps": 5},
        {"checkpoint__every_steps": 5},
        {"probe__norm_output_rms__every_steps": 5},
        {"seed": 0},
        {"optimizer__betas": [0.9, 0.95]},
    ],
)
def test_what_cannot_change_a_number_does_not(dotted: dict[str, Any]) -> None:
    assert digest(**dotted) == digest()


def test_device_and_corpus_enter_the_fingerprint() -> None:
    config = read_run(VALUES)
    digests = {fingerprint(config, device, {"sha256": sha}) for device in ("cpu", "cuda") for sha in ("a", "b")}
    assert len(digests) == 4


def test_a_field_added_later_keeps_old_fingerprints() -> None:
    @schema
    class Before:
        kind: str = "x"
        size: int

    @schema
    class After:
        kind: str = "x"
        size: int
        added: int = 3

    assert fingerprint(read(Before, {"size": 1}), "cpu", {}) == fingerprint(read(After, {"size": 1}), "cpu", {})
    assert fingerprint(read(After, {"size": 1, "added": 4}), "cpu", {}) != fingerprint(
        read(After, {"size": 1}), "cpu", {}
    )


def test_every_default_of_the_schema_is_itself_valid() -> None:
    config = read_run(VALUES)
    for name in ("validation", "checkpoint", "probe", "tracking"):
        assert getattr(config, name) == default_of(Pretrain.__dataclass_fields__[name])
