"""The command line: Hydra composes the configs, and mxstudy.launch plans and runs them.

A single run is a sweep of one job, so there is one path: main -> Hydra -> hydra_plugins/mxstudy_launcher.py ->
launch_jobs -> mxstudy.launch. No module below this one uses Hydra.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import io
import operator
import os
import signal
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import hydra
from hydra.core.config_loader import ConfigLoader
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from omegaconf import MISSING, DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from mxstudy import config as schemas
from mxstudy.compat.hydra import (
    Family,
    Override,
    compose_once,
    map_choices_if_asked,
    parse,
    read_files_once,
    reading,
    stands_alone,
)
from mxstudy.config.conf_folders import CONF, SWEEPS
from mxstudy.explain import AS_TRAINED, WHOLE, as_a_whole, explain, nothing_to_run
from mxstudy.help.answers import answer, commented
from mxstudy.help.group_choices import groups, visible
from mxstudy.launch.composed import Composed
from mxstudy.launch.process_pool import begin_in_processes
from mxstudy.launch.undoing import undoing
from mxstudy.reader import ConfigError, defaults, key_in, kinds_of, suggest
from mxstudy.rehearsal import rehearse_data, stand_ins, without_foreign
from mxstudy.words import HELP, HYDRA_ONLY, MULTIRUN, as_text, check_shape, check_words, unquoted

# The bases of each config group: every YAML file of the group starts from one of them.
BASES: dict[str, dict[str, Any]] = {
    "model": {"decoder": schemas.Decoder, "residual_mlp": schemas.ResidualMLP},
    "norm": kinds_of(get_args(schemas.Norm)),
    "precision": {"precision": schemas.Precision},
    "data": kinds_of(get_args(schemas.TrainingData)),
    "tokenizer": kinds_of(get_args(schemas.Tokenizer)),
    "optimizer": {"adamw": schemas.AdamW, "adam": schemas.Adam, "sgd": schemas.SGD},
    "schedule": {"schedule": schemas.Schedule},
    "train": {"train": schemas.Train, "stack": schemas.StackTrain},
    "teacher": {"teacher": schemas.Teacher},
    "intervention": {"intervention": schemas.Intervention},
    "probe": {"probe": schemas.Probes, "student_probe": schemas.StudentProbes},
    "tracking": {"tracking": schemas.Tracking},
}
ADDED = "+data.corpora."  # how an override of a blend's corpus begins
LAUNCHED = {"launch", "+launch"}
Take = Callable[[Callable[[], list[Composed]], schemas.Launcher], int]  # from the composer of the jobs to an exit code
_take: ContextVar[Take | None] = ContextVar("take", default=None)  # Hydra passes on no argument of its caller

USAGE = """\
usage: python -m mxstudy +experiment=NAME [GROUP=CHOICE ...] [KEY=VALUE ...]
       python -m mxstudy +sweep=NAME [GROUP=CHOICE ...] [KEY=VALUE ...]

Several values make a sweep: norm=rmsnorm,mxnorm_p2 optimizer.lr=1e-3,2e-3
+debug=tiny rehearses any experiment on a laptop; --cfg job prints the composed config and runs nothing.
--help NAME explains a key, a group, GROUP=CHOICE or a probe: --help optimizer.lr
hydra/launcher=local or slurm submits the jobs and returns (wait=true waits); dry_run=true prints their cost.

       python -m mxstudy +launch=status|cancel|retry [run=FINGERPRINT] [+experiment=NAME] [GROUP=CHOICE ...]
       python -m mxstudy figure [NAME] | report | export --runs FOLDER ...
       source <(mxstudy completion bash)   or zsh: tab completion in this shell

"""


def main() -> None:
    """Run `python -m mxstudy`."""
    arguments = sys.argv[1:]
    words = {argument.partition("=")[0] for argument in arguments}
    if not words or words & HELP:
        explain_names([argument for argument in arguments if argument not in HELP])
        return
    if words & LAUNCHED:
        sys.exit(after_launch(arguments))
    try:
        with beside_keys() if words & {"-c", "--cfg"} else contextlib.nullcontext():
            hand_over(arguments)
    except ConfigError as error:
        sys.exit(str(error))
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)


def hand_over(arguments: Sequence[str], take: Take | None = None) -> None:
    """Have Hydra read a command and hand its jobs to `take`, which returns an exit code; by default they are launched.

    Raises ConfigError, which says what is wrong with the command.
    """
    arguments = list(map(as_text, arguments))
    check_words(arguments, groups())
    words = {argument.partition("=")[0] for argument in arguments}
    own, token = sys.argv, _take.set(take)
    sys.argv = [own[0], *in_hydras_order(arguments), *([] if words & HYDRA_ONLY else ["--multirun"])]
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra raises instead of printing, and explain() writes the message
    compose_once()
    map_choices_if_asked()
    read_files_once()
    try:
        register(SWEEPS, arguments)
        with callers_hydra_aside():
            hydra.main(version_base="1.3", config_path=str(CONF), config_name="config")(_never_called)()
    except (HydraException, OmegaConfBaseException, ConfigError, OSError) as error:
        raise ConfigError(explain(error)) from None  # a notebook would show a hundred lines of Hydra
    finally:
        sys.argv = own
        _take.reset(token)


@contextlib.contextmanager
def callers_hydra_aside() -> Iterator[None]:
    """Set the Hydra of the library's caller aside within the block, because a process can have only one at a time."""
    state, config = GlobalHydra.instance(), HydraConfig.instance()
    before, state.hydra = (state.hydra, config.cfg), None
    try:
        yield
    finally:
        state.hydra, config.cfg = before


def explain_names(names: Sequence[str]) -> None:
    """Print the help for each name, or all groups if there is none; exit with a message for an unknown name."""
    try:
        print("\n\n".join(map(answer, names)) or usage())
    except ConfigError as error:
        sys.exit(str(error))


def after_launch(arguments: list[str]) -> int | str:
    """Run +launch=status, cancel or retry, which need no Hydra because the run folders hold everything.

    Return an exit code, or an error message.
    """
    from mxstudy.launch.commands import run  # imports torch

    try:
        check_shape(arguments, groups())
        (command,) = (value for key, _, value in (a.partition("=") for a in arguments) if key in LAUNCHED)
        return run(command, [unquoted(a) for a in arguments if a.partition("=")[0] not in LAUNCHED])
    except (ConfigError, OSError) as error:
        return explain(error)
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


@contextlib.contextmanager
def beside_keys() -> Iterator[None]:
    """Print the config that Hydra prints in this block, with the meaning of each key as a comment."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        yield
    print(commented(printed.getvalue()))


def in_hydras_order(arguments: Sequence[str]) -> list[str]:
    """Return the overrides before the options, because Hydra's parser refuses `+experiment=NAME -m norm=rmsnorm`."""
    overrides = [a for a in arguments if not a.startswith("-") and ("=" in a or a.startswith("~"))]
    return overrides + [a for a in arguments if a not in overrides and a not in MULTIRUN]


def _never_called(config: DictConfig) -> None:
    """Stand in for the task function that Hydra requires; our launcher does not call it."""


def register(sweeps: Path, arguments: Iterable[str]) -> None:
    """Register the bases with Hydra, and only the sweeps that a command line names, because reading all takes 0.3 s."""
    register_bases()
    asked = ",".join(word.partition("=")[2] for word in arguments if word.lstrip("+").startswith("sweep="))
    for path in sweeps.glob("*.yaml") if asked else ():
        if path.stem in asked.split(",") or path.stem.startswith("base_"):
            register_sweep(path)


@functools.cache
def register_sweep(path: Path) -> None:
    with reading(path):
        ConfigStore.instance().store(group="sweep", name=path.stem, node=OmegaConf.load(path), package="_global_")


@functools.cache  # Hydra's store lives as long as the process
def register_bases() -> None:
    """Register with Hydra the base of every group (the schema's defaults), and two resolvers.

    ${times:A,B} multiplies sizes. ${of:STUDY,A,B} is A in that kind of run (`study`) and B in all others.
    """
    OmegaConf.register_new_resolver("times", operator.mul, replace=True)
    OmegaConf.register_new_resolver("of", in_kind_of_run, replace=True)
    store = ConfigStore.instance().store
    for name, cls in schemas.STUDIES.items():
        store(group="study", name=f"base_{name}", node=defaults(cls), package="_global_")
    for group, bases in BASES.items():
        for name, cls in bases.items():
            store(group=group, name=f"base_{name}", node=defaults(cls))
    ours = {"_target_": "hydra_plugins.mxstudy_launcher.StudyLauncher", "_convert_": "all"}
    for name, settings in schemas.LAUNCHERS.items():
        store(group="hydra/launcher", name=f"base_{name}", node=ours | defaults(settings))


def in_kind_of_run(study: str, value: Any, other: Any, *, _root_: DictConfig) -> Any:
    """Return `value` if the config is of the kind of run `study`, else `other`."""
    return value if _root_.get("study") == study else other


# ------------------------------------------------------------------------------------------------ composing


def launch_jobs(
    loader: ConfigLoader, master: DictConfig, jobs: Sequence[Sequence[str]], launcher: schemas.Launcher
) -> None:
    """Pass the jobs to the caller of `hand_over`; our Hydra launcher calls this. Exit with the code if it is not 0."""
    take = _take.get() or plan_and_launch  # which imports torch while the jobs of a large sweep are composed
    if code := take(begin_in_processes(functools.partial(compose, loader, master), jobs), launcher):
        sys.exit(code)


def plan_and_launch(composed: Callable[[], list[Composed]], launcher: schemas.Launcher) -> int:
    gc.disable()  # imports leave no garbage, and each collection goes through all imported objects
    from mxstudy.launch.start import launch  # imports torch

    gc.freeze()  # imported objects stay; a garbage collection of them takes a tenth of a launch
    gc.enable()
    return launch(composed, launcher).code


def compose(loader: ConfigLoader, master: DictConfig, jobs: Sequence[Sequence[str]]) -> Iterator[Composed]:
    """Yield each job with its config as plain data, or with the ConfigError that says why it has none.

    A full composition takes 0.1 s. Hydra applies group choices first and values last, so jobs that differ only in
    values share one composition, and their values are set on it. So do jobs that differ in independent choices: each of
    these is composed once, and its section is reused. Only sections that can change are resolved again.
    """
    parsed = functools.cache(functools.partial(parse, loader))
    is_group = functools.cache(lambda key: bool(loader.get_group_options(key, results_filter=None)))
    choices_of = functools.cache(lambda group: visible(loader.get_group_options(group)))

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
            check_baseline(config.get("baseline"), choices_of)
            undoes = undoing(overrides, values, config, swept, composed)
            yield replace(finish(config, choices, job, same), undoes=undoes)
        except (HydraException, OmegaConfBaseException, ConfigError) as error:
            yield Composed(tuple(job), {}, ConfigError(explain(error)))


def check_baseline(baseline: Any, choices_of: Callable[[str], list[str]]) -> None:
    """Raise ConfigError unless the baseline names choices of groups; a value of another kind is refused later."""
    chosen: Any = OmegaConf.to_container(baseline) if isinstance(baseline, DictConfig) else {}
    for group, choice in chosen.items():
        there = choices_of(str(group))
        if not there:
            raise ConfigError(f"baseline.{group}: no such group; {suggest(str(group), groups())}")
        if choice not in there:
            raise ConfigError(f"baseline.{group}: no such choice; {suggest(str(choice), there)}")


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


def corpora_by_name(loader: ConfigLoader, master: DictConfig, config: DictConfig) -> list[str]:
    """Return the overrides that add to a blend those of its corpora that are choices of the group data.

    A corpus that `data.corpora` describes, with its kind, needs none. Raises ConfigError for an unknown name.
    """
    data: Any = OmegaConf.to_container(config).get("data")  # type: ignore[union-attr]
    phases, corpora = (data.get(key) for key in ("phases", "corpora")) if isinstance(data, dict) else (None, None)
    if not isinstance(phases, list) or not isinstance(corpora, dict):
        return []
    described = {name for name, one in corpora.items() if isinstance(one, dict) and "kind" in one}
    choices = visible(loader.get_group_options("data", results_filter=None))
    found: dict[str, None] = {}
    for number, phase in enumerate(phases):
        weights = phase.get("weights") if isinstance(phase, dict) else None
        for name in weights if isinstance(weights, dict) else ():
            if name not in described and name not in choices:
                known = suggest(name, [*sorted(described), *without_blends(loader, master, choices)])
                raise ConfigError(f"{key_in(f'data.phases[{number}].weights', name)}: no such corpus; {known}")
            found |= {} if name in described else {f"+data@data.corpora.{name}={name}": None}
    return list(found)


def without_blends(loader: ConfigLoader, master: DictConfig, choices: Sequence[str]) -> list[str]:
    """Return the choices of the group data that are a corpus; a blend can have only these."""
    found = loader.load_sweep_config(master, [f"+data@choices.{name}={name}" for name in choices]).choices
    return [name for name in choices if found[name].kind != "blend"]


def resolved(config: DictConfig, key: str) -> Any:
    """Return a section or value of a config as plain data, with its references resolved."""
    value = MISSING if OmegaConf.is_missing(config, key) else config[key]
    return OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value


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


def partly_as_trained(values: Mapping[str, Any], choices: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Yield group and key of each value that is set in a group whose choice is as_trained.

    Such a group comes from the checkpoint as a whole. A group that also has its key of WHOLE was replaced in full, and
    is allowed.
    """
    for group, whole in WHOLE.items():
        added = values.get(group)
        if choices.get(group) == AS_TRAINED and isinstance(added, dict) and whole not in added:
            yield from ((group, f"{group}.{key}") for key in added)


@functools.cache
def debug_values(choice: str | None, study: str | None) -> dict[str, Any]:
    """Return the values that a debug choice sets for runs of all kinds; `without_foreign` drops the others' keys."""
    chosen = [OmegaConf.load(CONF / "debug" / f"{choice}.yaml")] if choice else []
    values: Any = OmegaConf.to_container(OmegaConf.merge({"study": study}, *chosen), resolve=True)
    return values


# --------------------------------------------------------------------------------------------------- messages


def usage() -> str:
    wrap = functools.partial(textwrap.fill, width=100, subsequent_indent=" " * 18)
    lines = [wrap(f"  {group:<16}{', '.join(choices)}") for group, choices in groups().items()]
    return USAGE + "\n".join(["groups and their choices:", *lines])
