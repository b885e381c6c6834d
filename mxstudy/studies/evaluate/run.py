"""Run an evaluation of a checkpoint: a table of answers for every task in every form, and the scores.

Tables that exist are not computed again, so a killed evaluation continues with the next one.
"""

from __future__ import annotations

import functools
import json
import time
from pathlib import Path

import pandas as pd
from rich.console import Console
from rich.progress import Progress

from mxstudy import results
from mxstudy.config import Evaluate, Evaluation
from mxstudy.data.tokenizer import Tokenizer
from mxstudy.evaluation import checkpoints, questions
from mxstudy.evaluation.checkpoints import Trained
from mxstudy.evaluation.scorer import Scorer
from mxstudy.studies.evaluate.tables import show_scores
from mxstudy.studies.trained_model import described, finish, scoring, write_journal
from mxstudy.tracking.folder import RunFolder
from mxstudy.whole_files import replace_file

PROBE = "evaluation"  # the name of its rows in a journal


def run(config: Evaluate, folder: RunFolder, label: str) -> str:
    """Evaluate the checkpoint, continuing where an earlier process stopped, and return the run's state."""
    from mxstudy.evaluation.suite import scores_of  # imported here because lm-eval takes a second

    with folder.lock(), folder.heartbeat():
        path, trained = described(config)
        tasks = questions.at_hand(config.evaluation, print)
        asked = [(task, form) for task in tasks for form in config.evaluation.forms_of(task)]
        left = [pair for pair in asked if not results.table_path(folder, samples_name(*pair)).exists()]
        folder.update(state="running", steps=len(asked), step=len(asked) - len(left), reason=None)
        if left:
            with scoring(config, path, trained, config.evaluation.tokens_per_batch) as scorer:
                for number, (task, form) in enumerate(left, len(asked) - len(left)):
                    ask(task, form, scorer, trained.tokenizer, config.evaluation, folder)
                    folder.update(step=number + 1)
        about = {"checkpoint": trained.name, "asked_in": checkpoints.title(trained)}
        record(config, folder, scores_of(results.load_samples([folder])).assign(**about), path, trained)
        show_scores(folder)
        finish(config, folder, label)
    return "finished"


def samples_name(task: str, form: str) -> str:
    return f"{results.SAMPLES}{task}_{form}"


def ask(task: str, form: str, scorer: Scorer, tokenizer: Tokenizer, settings: Evaluation, folder: RunFolder) -> None:
    """Ask every question of a task in one form, show a progress bar, save the answers as a table, and print a line."""
    from mxstudy.evaluation.lm import NativeLM
    from mxstudy.evaluation.suite import count_requests, samples_of

    began_s = time.perf_counter()
    groups = questions.build_questions(task, form, settings)
    requests = count_requests(task, form, groups)
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        done = functools.partial(bar.advance, bar.add_task(f"{task} {form}", total=requests))
        samples = samples_of(NativeLM(scorer, tokenizer, done), task, form, groups)
    results.save_table(folder, samples_name(task, form), samples)
    cut = samples["truncated_requests"].iloc[0]
    note = f"; {cut:,} longer than the model's {scorer.max_length:,} tokens lost their beginning" if cut else ""
    seconds = time.perf_counter() - began_s
    print(f"{task} {form}: {len(samples):,} questions, {requests:,} requests in {seconds:.1f} s{note}", flush=True)


def record(config: Evaluate, folder: RunFolder, scores: pd.DataFrame, path: Path, trained: Trained) -> None:
    """Write table, JSON and a journal row of the scores (task.form/score, ...) at the step of the checkpoint `path`."""
    from mxstudy.evaluation.suite import values_of

    results.save_table(folder, "scores", scores)
    nullable = scores.astype(object).where(scores.notna(), None)  # JSON has no NaN
    replace_file(folder.path / "scores.json", json.dumps(nullable.to_dict("records"), indent=2))
    write_journal(config, folder, path, trained, PROBE, values_of(scores))
