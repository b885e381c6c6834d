"""Every field of the schema is a probe, and any subset, on any schedule, leaves its rows in a training's journal."""

from __future__ import annotations

import json
import math
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from each import each, slow_but

from mxstudy import config
from mxstudy.config import observation
from mxstudy.probes.base import Probe
from mxstudy.probes.build import PROBES, build_probes, build_spikes
from mxstudy.probes.outliers import FeatureRing
from mxstudy.probes.ring_file import read_ring
from mxstudy.reader import ConfigError
from mxstudy.train.loop import CORPORA, TrainingRun, train
from mxstudy.train.signals import Leave

SCHEMAS = {f.name: type(f.default) for f in fields(config.Probes)}
ALL = config.Probes(**{name: schema(every_steps=1) for name, schema in SCHEMAS.items()})
RING = config.Probes(
    outlier_features=observation.OutlierFeatures(every_steps=3, ring_steps=6),
    spikes=observation.Spikes(every_steps=1, window_steps=4),
)


def only(name: str, every_steps: int = 2) -> config.Probes:
    return config.Probes(**{name: SCHEMAS[name](every_steps=every_steps)})


def names(probes: list[Probe]) -> list[str]:
    return [probe.name for probe in probes]


def trained(
    probes: config.Probes, folder: Path, backend: str = "auto", model: config.Decoder = tiny.MODEL, **changes: Any
) -> tuple[TrainingRun, tiny.Memory]:
    precision = replace(tiny.precision((0, "mxfp8"), (4, "mxfp8_e5m2_grad")), backend=backend)
    model = replace(model, num_layers=1) if changes.get("compile") else model  # Dynamo takes seconds for each block
    settings = replace(tiny.CONFIG, probe=probes, precision=precision, model=model)
    run, memory = tiny.build(settings, **{"steps": 7} | changes)
    run.spikes = build_spikes(probes, run.probes, folder, lambda: "step_00000000", [])
    return run, memory


def test_the_table_has_every_field_but_that_of_the_spikes():
    assert [*PROBES, "spikes"] == list(SCHEMAS)
    assert {name: PROBES[name](schema()).name for name, schema in SCHEMAS.items() if name in PROBES} == {
        name: name for name in PROBES
    }


def test_nothing_is_on_unless_asked_for():
    assert build_probes(config.Probes()) == []
    assert build_spikes(config.Probes(), [], Path(), lambda: None, []) is None


@each("name", PROBES)
def test_each_can_be_had_alone_on_its_own_schedule(name):
    (probe,) = build_probes(only(name, every_steps=3))
    assert (probe.name, probe.every_steps) == (name, 3)


def test_a_ring_is_kept_where_a_spike_would_call_for_it():
    assert names(build_probes(RING)) == ["outlier_features", "feature_ring"]
    without = replace(RING.outlier_features, ring_steps=0)
    assert names(build_probes(replace(RING, outlier_features=without))) == ["outlier_features"]
    usual = observation.OutlierFeatures(every_steps=3)
    assert names(build_probes(config.Probes(outlier_features=usual))) == ["outlier_features"]
    assert names(build_probes(only("spikes", 1))) == []


@each(
    ("schema", "values", "says"),
    [
        (observation.Timing, {"every_steps": -1}, "must not be negative, not -1"),
        (observation.Spikes, {"every_steps": 2}, r"every_steps: must be 1 \(every loss\) or 0 \(off\), not 2"),
        (observation.Spikes, {"every_steps": 1, "window_steps": 1}, "at least 2 for a spread, not 1"),
        (observation.Spikes, {"every_steps": 1, "threshold": 0.0}, "must be positive, not 0.0"),
        (observation.OutlierFeatures, {"every_steps": 1, "ring_steps": -8}, r"0 \(keep none\) or at least 4, not -8"),
        (observation.OutlierFeatures, {"every_steps": 1, "ring_steps": 3}, r"0 \(keep none\) or at least 4, not 3"),
    ],
)
def test_what_makes_no_sense_is_refused(schema, values, says):
    with pytest.raises(ConfigError, match=says):
        schema(**values)


EACH = [only(name, 1) for name in SCHEMAS] + [ALL, RING]


@pytest.fixture(scope="module")
def unwatched(tmp_path_factory):
    run, memory = trained(config.Probes(), tmp_path_factory.mktemp("unwatched"))
    assert train(run, 0, Leave()) == "finished"
    return memory.losses


@pytest.mark.integration
@pytest.mark.parametrize("probes", slow_but([ALL, RING], EACH), ids=[*SCHEMAS, "all", "ring"])
def test_losses_keep_their_bits(probes, unwatched, tmp_path):
    run, memory = trained(probes, tmp_path)
    assert train(run, 0, Leave()) == "finished"
    assert memory.losses == unwatched


@pytest.mark.slow
def test_compiled_losses_keep_their_bits_and_no_block_is_compiled_anew(tmp_path, traced):
    from torch._dynamo.utils import counters

    def losses_and_graphs(probes: config.Probes) -> tuple[list[float], int]:
        counters.clear()
        run, memory = trained(probes, tmp_path, compile=True, steps=5)
        assert train(run, 0, Leave()) == "finished"
        return memory.losses, counters["stats"]["unique_graphs"]

    plain = losses_and_graphs(config.Probes())
    assert plain[1] > 0
    assert losses_and_graphs(ALL) == plain


@pytest.mark.integration
def test_every_probe_leaves_rows_that_are_numbers_of_json_on_its_steps(tmp_path):
    probes = replace(ALL, timing=observation.Timing(every_steps=3))
    run, memory = trained(probes, tmp_path, model=replace(tiny.MODEL, mlp="moe"))
    train(run, 0, Leave())
    rows = [row for row in memory.rows if "probe" in row]
    assert {row["probe"] for row in rows} == {*PROBES, CORPORA}
    assert [row["step"] for row in rows if row["probe"] == "timing"] == [0, 3, 6]
    assert all(row["values"] and json.loads(json.dumps(row)) for row in rows)


@pytest.mark.integration
def test_a_divergence_leaves_its_ring_and_names_the_checkpoint(tmp_path):
    run, memory = trained(RING, tmp_path, backend="reference")
    train(run, 0, Leave())
    run.model.layers[0].attention.wo.register_forward_hook(lambda module, inputs, h: h * float("nan"))
    assert train(run, 6, Leave()) == "diverged"
    (row,) = [row for row in memory.rows if "spike" in row]
    assert row["step"] == 6
    assert math.isnan(row["spike"]["loss"])
    assert row["spike"]["checkpoint"] == "step_00000000"
    steps, norms = read_ring(tmp_path / row["spike"]["ring"])
    assert steps == [2, 3, 4, 5, 6, 6]
    assert {name: absmax.shape for name, absmax in norms.items()}["layers.1.ffn_norm"] == (6, 64)
    finite = {name: [bool(x) for x in torch.tensor(absmax).isfinite().all(1)] for name, absmax in norms.items()}
    assert finite["layers.0.attention_norm"] == 6 * [True]
    assert finite["layers.0.ffn_norm"] == 5 * [True] + [False]


def test_the_ring_has_what_went_into_the_norms_over_all_micro_batches(tmp_path):
    seen: list[torch.Tensor] = []
    run, _ = trained(RING, tmp_path, micro_batch_size=1, steps=1)
    run.model.norm.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0].detach()))
    train(run, 0, Leave())
    (ring,) = [probe for probe in run.probes if isinstance(probe, FeatureRing)]
    parts = torch.cat(seen[:4]).flatten(0, 1)  # the validation follows
    assert torch.equal(ring.tensors()["norm"], parts.abs().amax(0)[None])
