"""Compose the jobs of a command: from its overrides to the config of each job, as plain data."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from hydra.core.config_loader import ConfigLoader
from hydra.errors import HydraException
from omegaconf import MISSING, DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from mxstudy import config as schemas
from mxstudy.cli.chosen import check_baseline, check_kind_of_run, partly_as_trained
from mxstudy.cli.corpora import ADDED, corpora_by_name
from mxstudy.compat.hydra import Family, Override, parse, stands_alone
from mxstudy.config.conf_folders import CONF
from mxstudy.explain import as_a_whole, explain, nothing_to_run
from mxstudy.help.group_choices import visible
from mxstudy.launch.composed import Composed
from mxstudy.launch.undoing import undoing
from mxstudy.reader import ConfigError
from mxstudy.rehearsal import rehearse_data, stand_ins, without_foreign


def compose(loader: ConfigLoader, master: DictConfig, jobs: Sequence[Sequence[str]]) -> Iterator[Composed]:
    """Yield each job with its config as plain data, or with the ConfigError that says why it has none.

    A full composition takes 0.1 s. Hydra applies group choices first and values last, so jobs that differ only in
    values share one composition, and their values are set on it. So do jobs that differ in independent choices: each of
    these is composed once, and its section is reused. Only sections that can change are resolved again.
    """
    parsed = functools.cache(functools.partial(parse, loader))
    is_group = functools.cache(lambda key: bool(loader.get_group_options(key, results_filter=None)))
    choices_of = functools.cache(lambda group: visible(loader.get_group_options(group)))
    check_kind = functools.cache(functools.partial(check_kind_of_run, loader))
    alone = functools.cache(functools.partial(stands_alone, loader))
    composed = functools.cache(lambda lines: loader.load_sweep_config(master, list(lines)))
    swept = {key for part in (master.hydra.sweeper.params, *master.hydra.sweeper.cases) for key in part}

    def sets_a_value(override: Override) -> bool:
        return override.changes and not isinstance(override.value, dict | list) and not is_group(override.key)

    def chooses_alone(override: Override) -> bool:
        is_choice = override.changes and isinstance(override.value, str) and is_group(override.key)
        return is_choice and alone(override.key, override.value)

    shared: dict[Any, Family] = {}
    for job in jobs:
        overrides = [parsed(line) for line in job]
        values = [o for o in overrides if sets_a_value(o)]
        own = {o.key: o for o in overrides if chooses_alone(o)}
        rest = tuple(o.line for o in overrides if o not in values and o.key not in own)
        key = (rest, tuple(own), tuple(o.key for o in values))
        try:
            if key not in shared:
                moved = {o.key.partition(".")[0] for o in values}
                shared[key] = Family(functools.partial(compose_fully, loader, master), job, moved)
            config, choices, same = shared[key].composed(job, {group: str(o.value) for group, o in own.items()})
            for override in values:
                OmegaConf.update(config, override.key, override.value)
            if (study := str(config.get("study"))) in schemas.STUDIES:
                check_kind(study, tuple(choices.items()))
            check_baseline(config.get("baseline"), choices_of)
            undoes = undoing(overrides, values, config, swept, composed)
            yield replace(finish(config, choices, job, same), undoes=undoes)
        except (HydraException, OmegaConfBaseException, ConfigError) as error:
            yield Composed(tuple(job), {}, ConfigError(explain(error)))


def compose_fully(loader: ConfigLoader, master: DictConfig, job: Sequence[str]) -> tuple[DictConfig, dict[str, str]]:
    """Return the job's config, without Hydra's own part, and its choice of each group."""
    config = loader.load_sweep_config(master, list(job))
    if corpora := corpora_by_name(loader, master, config):
        again = [line.replace(ADDED, f"+{ADDED}", 1) if line.startswith(ADDED) else line for line in job]
        config = loader.load_sweep_config(master, [*again, *corpora])  # ++, because a key to add may exist by now
    chosen = config.hydra.runtime.choices.items()
    choices = {group: str(c) for group, c in chosen if not group.startswith("hydra/") and "@" not in group}
    with open_dict(config):
        del config["hydra"]
    return config, choices


def finish(config: DictConfig, choices: dict[str, str], overrides: Sequence[str], same: Mapping[str, Any]) -> Composed:
    """Return the job with its resolved config as plain data, in which `experiment` is the name of the chosen file.

    `same`: sections that are resolved already, which jobs share.
    """
    values = {key: same[key] if key in same else resolved(config, key) for key in map(str, config)}
    study = values.get("study")
    rehearsal = debug_values(choices.get("debug"), study)
    if study is None:
        raise ConfigError(nothing_to_run(values.keys() - rehearsal.keys(), choices))
    for group, key in partly_as_trained(values, choices):
        raise ConfigError(as_a_whole(group, key))
    notes: tuple[str, ...] = ()
    if "debug" in choices:
        notes = rehearse_data(values, overrides)
        choices = choices | stand_ins(values)
        values = without_foreign(values, schemas.STUDIES.get(study, schemas.Run), rehearsal)
    values |= {"experiment": choices["experiment"]} if "experiment" in choices else {}
    return Composed(tuple(overrides), choices, values, notes)


def resolved(config: DictConfig, key: str) -> Any:
    """Return a section or value of a config as plain data, with its references resolved."""
    value = MISSING if OmegaConf.is_missing(config, key) else config[key]
    return OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value


@functools.cache
def debug_values(choice: str | None, study: str | None) -> dict[str, Any]:
    """Return the values that a debug choice sets for runs of all kinds; `without_foreign` drops the others' keys."""
    chosen = [OmegaConf.load(CONF / "debug" / f"{choice}.yaml")] if choice else []
    values: Any = OmegaConf.to_container(OmegaConf.merge({"study": study}, *chosen), resolve=True)
    return values
