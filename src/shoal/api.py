"""The main functions of the library: `tune` starts a study, `resume` continues one."""

import logging
import pickle
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from itertools import chain, count
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

from shoal.algorithms.base import Algorithm, call_text
from shoal.algorithms.default import SearchBudget, choose
from shoal.algorithms.random import Random
from shoal.algorithms.rules import NoImprovement, StopRule
from shoal.arguments import (
    batch_size_override,
    check_arguments,
    check_kind,
    check_memory_limit,
    initial_points,
    is_pickled_by_value,
    load_algorithm,
    load_strategy,
    longest_budget,
    metric_arguments,
    pickled_algorithm,
    pickled_task,
    script_of,
    searched_space,
    strategy_text,
    study_warnings,
    with_best_epoch,
    with_stop_rules,
)
from shoal.callbacks.base import Callback
from shoal.callbacks.follower import callbacks_text
from shoal.core.duration import parse_duration
from shoal.core.epoch_order import LAST_EPOCHS
from shoal.core.errors import PackError, PolicyError, ShoalError, TaskChangedError
from shoal.core.job import HANG_SECONDS
from shoal.core.plain import plain
from shoal.core.space import Space
from shoal.core.trial import Config
from shoal.host.paths import absolute, check_path, extend_module_path
from shoal.host.process_settings import current
from shoal.host.processes import open_standard_streams
from shoal.host.remedy import command
from shoal.host.sources import Edit, edits, project_files, sources
from shoal.host.tracebacks import ends_at_call
from shoal.journal.check import check_not_paused, check_study
from shoal.journal.earlier import earlier_trials, no_effect
from shoal.journal.requests import pending_requests, write_request
from shoal.journal.schema import FILE_NAME
from shoal.journal.writer import Journal
from shoal.look.page.beside import check_page
from shoal.look.snapshot import how_ended, time_left
from shoal.look.text import batch_text
from shoal.plan.packing.base import Packing
from shoal.plan.packing.registry import make_packing
from shoal.plan.schedule.base import Policy
from shoal.plan.schedule.registry import check_losses, check_objective_of_study, make_policy
from shoal.programs.opaque import TIME_LIMIT, Command, Function, Opaque, opaque, source_files, structure
from shoal.run.nodes.slurm_commands import restarted
from shoal.run.registry import backend_class
from shoal.run_study import engine_config, overrides, run_study
from shoal.spec import StudySpec
from shoal.study.config import EngineConfig

if TYPE_CHECKING:
    from shoal.results import Study
    from shoal.task import Task

__all__ = ["resume", "tune"]

_log = logging.getLogger("shoal.study")


@ends_at_call
def tune(
    task: "Task | Callable[[Config], object] | Command",
    space: Mapping[str, Any] | Space,
    *,
    metric: str | Sequence[str],
    mode: Literal["min", "max"] | Sequence[Literal["min", "max"]],
    algorithm: Algorithm | None = None,
    trials: int | None = None,
    epochs: int | None = None,
    policy: str | Policy = "auto",
    objective: str | None = None,
    target: float | None = None,
    stop: Sequence[StopRule] = (),
    stop_after: NoImprovement | None = None,
    constraints: Mapping[str, str] | None = None,
    rank_by: Literal["best", "last"] = "best",
    best_by: str | Mapping[str, Literal["min", "max"]] | None = None,
    keep: int | Literal["best", "all"] = "all",
    packing: str | Packing = "cost",
    fuse: bool = True,
    devices: str | Sequence[str] = "auto",
    backend: str = "local",
    ray_address: str | None = None,
    sbatch: str | None = None,
    sharing: str = "auto",
    oversubscription: float = 1.0,
    directory: Path | str | None = None,
    seed: int = 0,
    data_seed: int | Literal["trial"] | None = None,
    initial: Sequence[Config] = (),
    warm_start: Sequence[Path | str] = (),
    repeats: int = 1,
    folds: int = 1,
    aggregate: Literal["mean", "median", "worst"] = "mean",
    retries: int = 2,
    memory_limit: int | str | None = "auto",
    checkpoint_seconds: float = 30.0,
    hang_seconds: float = HANG_SECONDS,
    time_limit: float = TIME_LIMIT,
    timeout: str | float | None = None,
    trial_timeout: str | float | None = None,
    max_concurrent: int | None = None,
    loss: str | None = None,
    callbacks: Sequence[Callback] = (),
    show_progress: bool = True,
    page: bool = False,
) -> "Study":
    """Search a space for the configuration with which a task does best.

    Args:
        task: Task to train; or a function of a config that trains by itself in any framework and calls `shoal.report`:
            it has a process of its own, and budgets count its reports.
        space: Names -> domains (`shoal.loguniform` ...), lists (each a choice), distributions of Optuna or Ray Tune,
            constants, values computed with `shoal.ref`, or nested mappings of these; a `shoal.Space` of them, which
            may have conditions; or a sweep of W&B, whose goal for the metric must be `mode`.
        metric: Reported value to compare trials by; `valid_loss` is always there. Or several, of which no single trial
            is the best: `study.pareto`; all algorithms but `BOHB`, `SyncBOHB` and `Median` take them.
        mode: "min" or "max": which end of the metric is good; for several metrics a list with one for each.
        algorithm: Search algorithm: which configurations are tried and for how long. By default Shoal chooses one by
            the space, `trials`, `epochs` and the devices, and says why; docs/algorithms.md has the rule.
        trials: Number of configurations to try, instead of an `algorithm`.
        epochs: Epochs of the longest trials, beside `trials`; by default 27. Of a function, its reports: not optional.
        policy: Scheduling policy: a name in `shoal.plan.schedule.POLICIES` or a `Policy`.
        objective: What the policy "auto" makes short: "makespan" (the whole search; the default), "mean_completion"
            (the mean time until a job ends), "time_to_target" (the time until a trial reaches `target`), or
            "time_to_good" (the mean time until the good trials are nearly as good as they get).
        target: Value of the metric that is good enough: the study ends as soon as a trial reports it, or a better one,
            and keeps the constraints. Not with several metrics.
        constraints: Bounds of further reported values, {"latency_ms": "<= 10", "fairness": ">= 0.8"}. Trials are
            compared by their violation first, at the epoch at which they are compared: the sum of how far each value is
            beyond its bound, in units of `max(|bound|, 1)`, infinite for NaN and for a value not reported then.
        stop: Rules that end trials, each of which suffices: `shoal.Patience(epochs=10)`, `shoal.Threshold(above=5.0)`,
            `shoal.Percentile(25)`, `shoal.LossTrend()`. They see each report before the algorithm does.
        stop_after: `shoal.NoImprovement(trials=30)`: the study ends when its best value has not improved for that many
            trials, in the order of their numbers.
        rank_by: What a trial ranks by: "best", the epoch with the best value of the metric, whose weights are kept
            beside the newest, or "last", the newest epoch. Algorithms compare trials at their budgets either way;
            samplers of `OptunaSearch` get the value that ranks. The best of more epochs is more optimistic: compare
            trials of equal budgets, or by data that chose no epoch.
        best_by: The metric that decides which epoch of a trial is its best, by default the first of `metric`; another
            reported value with its mode: {"valid_loss": "min"}. A trial then ranks by its values at that epoch. The
            first report must have it; later, an epoch without it cannot be the best.
        keep: Which ended trials keep their weights: "all", "best" (the best one, of several metrics the front) or the
            number of best configurations. Trials that may continue, that failed or that are pinned (`Study.pin`) keep
            theirs. The state of the optimizer of an ended trial is always deleted.
        packing: Rule for arrays that share a process: a name in `shoal.plan.packing.PACKINGS` or a `Packing`.
        fuse: Whether trials of one structure are trained as one model.
        devices: "auto" (all GPUs, else all cores), "cpu:2", "cuda", "mig", ["cuda:0", "mig:1"]; see `discover`. On
            several nodes, what each of them has, or ["ash/cuda:0", "beech/cuda:1"].
        backend: "local" (a process per job), "inline" (in this one), "ray" (on all nodes of a Ray cluster), or "slurm";
            several nodes must share the directory.
        ray_address: Address of the Ray cluster, "10.0.0.1:6379"; by default `$RAY_ADDRESS`, else the one that runs on
            this machine, else a new one of this machine alone.
        sbatch: Options of Slurm's `sbatch` for nodes that the study asks for one by one, "--nodes=4 --time=4:00:00";
            by default it runs on the nodes of the Slurm job that it is in.
        sharing: How jobs share a GPU: with NVIDIA's MPS ("mps"), without it ("plain"), or with MPS if possible
            ("auto").
        oversubscription: Factor by which jobs may reserve more compute than a device has, at least 1.
        directory: Directory of the study; by default a new one below `runs`. In a job that Slurm has started again, a
            study that is there is resumed.
        seed: Seed of everything that is random.
        data_seed: Seed of the order of samples, shared by all trials so that they can share batches; "trial" gives each
            trial its own, and so an array of its own.
        initial: Whole or partial configurations to try first, as trials 0, 1, 2 ...; the values that they leave out are
            those that these trials have without them.
        warm_start: Directories of earlier studies with the same metrics and modes. The values of their finished trials
            whose configurations are in the space enter the model of `OptunaSearch`, of `ASHA` with a sampler ("tpe",
            "gp" or your own) or of `BOHB`, where they were measured at one of its budgets. The study keeps a copy. They
            are no trials of the study: they have no number and no rank. Other algorithms ignore them, which is said.
        repeats: Number of seeds with which each configuration is trained, as trials that are members of one array.
            The algorithm, the ranking and `target` take the aggregate of their values; numbers of trials in the
            algorithm's settings count configurations.
        folds: Number of folds of the data on which each configuration is trained; `config["fold"]` tells `data` which
            one. With `repeats`, each seed is trained on each fold.
        aggregate: Value of a configuration: "mean", "median" or "worst" of its trials.
        retries: Number of retries of a trial whose job failed.
        memory_limit: Limit of the memory of a trial. "auto": on a GPU that jobs share, 1.25 times what the job has
            reserved, and 512 MiB; None: no limit. A number of bytes or a text, "8GiB": besides, the main memory that
            each process of a function or command may allocate (Linux). Each process counts for itself, with the stacks
            of its threads: eight forked workers of a loader may use eight times as much. A trial beyond it has failed,
            and is not retried.
        checkpoint_seconds: Longest wall time between two checkpoints of a running trial.
        hang_seconds: Time without progress after which a job is killed and its trials are retried; a job with longer
            steps is given ten times its longest step, and loading data or compiling ten times as long.
        time_limit: Seconds between two reports of a function, after which its trial has failed; not the time that a
            trial may take, which is `trial_timeout`.
        timeout: Time that the study may run, "90s", "20m", "2h", "1d", "1h30m" or seconds. It is summed over all runs;
            while the study is paused or not run, no time passes. Then all open trials are saved, and `tune` returns:
            `Study.ended` is "timeout". `resume` continues to what the study would have found without it.
        trial_timeout: Time that each trial may train; of an array, each member counts an equal part of its seconds. A
            trial that reports after more, and not at its budget, is STOPPED. Its values count; the algorithm observes
            what it does when a user stops a trial. Not `time_limit`, which ends a function that reports nothing.
        max_concurrent: Most trials that train at a time, in all arrays of all devices; None: as many as the devices
            take. An algorithm that is given does not know of it: what it decides from all results of a rung stays.
        loss: Reported value of a function that policies take as its loss; by default the metric, if it is minimised.
        callbacks: Callbacks that another process calls with what is recorded, such as trackers; `resume` continues with
            them. See `shoal.Callback`.
        show_progress: Whether to show a table on a terminal, or a few lines elsewhere, on standard error.
        page: Whether to serve the page of the study while it runs, in a process of its own; its address is printed on
            standard error. `shoal page DIRECTORY` does so at any other time.

    Raises:
        StudyExistsError: the directory holds a study; the message names the choices.
        StudyInterrupted: stopped by Ctrl-C or SIGTERM, a KeyboardInterrupt; `resume` continues the study.
        StudyFailedError: all trials failed; or five did, each by itself, of one cause, before any trial reported
            anything: then the others stay open, and `resume` tries them first.
        ShoalError: an argument or the task is invalid; the message names it.
    """
    return _tune(time.time(), **(locals() | overrides))


def _tune(
    called: float,
    *,
    task: object,
    space: Mapping[str, Any] | Space,
    metric: Any,
    mode: Any,
    algorithm: Algorithm | None,
    trials: int | None,
    epochs: int | None,
    stop: Sequence[StopRule],
    policy: str | Policy,
    objective: str | None,
    constraints: Any,
    packing: str | Packing,
    directory: Path | str | None,
    time_limit: float,
    initial: Sequence[Config],
    warm_start: Any,
    timeout: str | float | None,
    trial_timeout: str | float | None,
    callbacks: Sequence[Callback],
    show_progress: bool,
    page: bool,
    trackers: Sequence[Callback] = (),
    measure: int = 0,
    **described: Any,
) -> "Study":
    """Do what `tune` does, at the time `called`.

    Args:
        trackers: Callbacks of the command line, which are added.
        measure: Number of trials to measure instead of the search; see `measured`.
        described: The other arguments of `tune`, of which the specification of the study has each as it is.
    """
    open_standard_streams()
    metric, mode = metric_arguments(metric, mode)
    trials, epochs = plain(trials), plain(epochs)
    space = searched_space(space, metric, mode, algorithm, trials, described["target"])
    if measure:
        algorithm, trials, epochs, callbacks, stop, warm_start = Random(measure, epochs=1), None, None, (), (), ()
        metric, mode = (x if isinstance(x, str) else x[0] for x in (metric, mode))
        described["best_by"] = None
    check_arguments(directory, show_progress, page)
    longest = longest_budget(algorithm, trials, epochs)
    training = opaque(task, space, time_limit, longest)
    check_kind(training, described, measure)
    if training is not None and algorithm is None and epochs is None:
        raise ShoalError(f"give `epochs`, the number of reports of the longest trials of {training.name}")
    spec = StudySpec(
        metric=metric,
        mode=mode,
        space=space.to_json(),
        policy=strategy_text(policy),
        objective=objective or "makespan",
        constraints={} if constraints is None else constraints,
        packing=strategy_text(packing),
        callbacks=callbacks_text(callbacks, trackers),
        task=type(task).__name__ if training is None else training.name,
        opaque="" if training is None else structure(training),
        paths=[str(absolute(path)) for path in sys.path],
        settings=current() if training is None else {},
        initial=initial_points(initial),
        timeout=parse_duration("timeout", timeout),
        trial_timeout=parse_duration("trial_timeout", trial_timeout),
        **described,
    )
    spec = spec if measure else with_best_epoch(spec, task)
    check_memory_limit(training, spec.memory_limit)
    check_objective_of_study(policy, objective, spec.target, len(spec.objectives))
    place = absolute(directory or _new_directory(spec.task))
    if restarted():
        if directory is None:
            raise ShoalError("Slurm has started this job again, and its study has no name; set `directory`")
        if (place / FILE_NAME).exists():
            return resume(place, show_progress=show_progress, page=page)
    config = engine_config(spec, make_policy(policy, spec.objective), make_packing(packing), measure=bool(measure))
    if algorithm is None:
        devices = sum(device.healthy for _, device in config.fleet.cluster)
        fuses, repeats = spec.fuse and training is None, spec.repetition.size
        counts = cast("int", trials), cast("int", longest), devices
        budget = SearchBudget(*counts, fuses, repeats, spec.max_concurrent)
        chosen = choose(space, budget, len(spec.objectives))
        algorithm, spec = chosen.algorithm, replace(spec, chosen_because=chosen.why)
    algorithm = with_stop_rules(algorithm, stop, None if measure else task, spec.objectives)
    spec = replace(spec, algorithm=call_text(algorithm))
    of_best = spec.of_best if algorithm.models_best_epochs else LAST_EPOCHS
    earlier, lines = earlier_trials(warm_start, spec, algorithm.modelled_budgets, of_best)
    spec = replace(spec, earlier=earlier, earlier_from=lines)
    if warm_start and not earlier:
        _log.warning("%s", no_effect(spec.algorithm, warm_start))
    return _begin(place, spec, config, task, training, algorithm, called, show_progress=show_progress, page=page)


def _begin(
    place: Path,
    spec: StudySpec,
    config: EngineConfig,
    task: object,
    training: Opaque | None,
    algorithm: Algorithm,
    called: float,
    *,
    show_progress: bool,
    page: bool,
) -> "Study":
    """Check the rest, make the journal of the study, and run it."""
    if page:
        check_page()
    if training is not None:
        check_losses(config.policy, spec.loss_metric)
    plan = pickled_algorithm(algorithm)
    search = load_algorithm(plan, spec, algorithm)
    for warning in study_warnings(task, search, is_function=isinstance(training, Function)):
        _log.warning("%s", warning)
    content = pickled_task(task) if training is None else pickle.dumps(training)
    project, files = project_files(content, type(task).__module__) if training is None else source_files(training)
    spec = replace(
        spec,
        kept=is_pickled_by_value(task),
        project=None if project is None else str(project),
        batches=batch_text(Space.from_json(spec.space), batch_size_override(task)) if training is None else "",
        totals=search.totals,
    )
    values = {"sources": sources(files), "script": script_of(task)}
    with closing(Journal.create(place, spec, values, task=content, algorithm=plan, called=called)) as journal:
        return run_study(journal, spec, search, config, show_progress=show_progress, page=page)


@ends_at_call
def resume(
    directory: Path | str,
    *,
    policy: str | Policy | None = None,
    packing: str | Packing | None = None,
    devices: str | Sequence[str] | None = None,
    backend: str | None = None,
    ray_address: str | None = None,
    sbatch: str | None = None,
    sharing: str | None = None,
    oversubscription: float | None = None,
    timeout: str | float | None = None,
    trials: int | None = None,
    show_progress: bool = True,
    page: bool = False,
    accept_changes: bool = False,
) -> "Study":
    """Continue a study that was stopped or killed; one that has ended is just returned.

    An ended study continues if failed trials are to be retried (`Study.retry`). Resuming runs code from the study's
    directory: the pickled task, algorithm and callbacks. docs/resume.md gives the consequences.

    Args:
        directory: Directory of the study.
        policy: Policy instead of the study's own.
        packing: Packing instead of the study's own.
        devices: Devices instead of the study's own, as they were last changed by `shoal devices`.
        backend: Back end instead of the study's own.
        ray_address: Address of a Ray cluster instead of the study's own.
        sbatch: Options of `sbatch` instead of the study's own.
        sharing: Sharing instead of the study's own.
        oversubscription: Oversubscription instead of the study's own.
        timeout: Time that the study may run from now on, in this run and later ones, as for `tune`; None: what is left
            of its timeout. A study that its timeout has ended continues without one.
        trials: Number of trials in all to which the algorithm extends the search, also one that has ended; with
            `repeats`, of configurations. See `Algorithm.extend`.
        show_progress: As for `tune`.
        page: As for `tune`.
        accept_changes: Whether to continue if files of the task were edited since the study last ran; the journal notes
            it.

    Raises:
        TaskChangedError: files of the task were edited, and that is not accepted; nothing is changed.
        AlgorithmError: the algorithm cannot try so many trials; nothing is changed.
        JournalError: there is no study, another process is running it, or its journal cannot be resumed; nothing is
            changed.
        StudyInterrupted: stopped again.
        StudyFailedError: as for `tune`.
    """
    called = time.time()
    open_standard_streams()
    seconds = parse_duration("timeout", timeout)
    given: dict[str, Any] = {"devices": devices, "backend": backend, "ray_address": ray_address, "sbatch": sbatch}
    given |= {"sharing": sharing, "oversubscription": oversubscription}
    check_path(directory)
    directory = absolute(directory)
    check_not_paused(directory)
    with closing(Journal.open(directory)) as journal:
        check_study(journal)
        own, fleet = journal.spec, journal.study.get("fleet", {})
        ended = journal.study.get("finished") and trials is None and not pending_requests(journal.directory)
        changed = [] if ended else _edits(journal, accept_changes)
        extend_module_path(own.paths)
        search = load_algorithm(journal.blob("algorithm"), own)
        trials = plain(trials)
        extends = trials is not None and _check_extension(journal, trials)
        with _another_named(directory):
            followed = make_policy(policy or load_strategy(journal.policy), own.objective)
            packed = make_packing(packing or load_strategy(own.packing))
        if backend_class(own.backend if backend is None else backend) is not backend_class(own.backend):
            own = replace(own, ray_address=None, sbatch=None)  # those of another back end
        spec = replace(own, **{name: value for name, value in given.items() if value is not None})
        config = engine_config(spec, followed, packed, fleet=fleet if devices is None else {})
        if spec.opaque and not ended:
            check_losses(config.policy, spec.loss_metric, begun=True)
        with journal.transaction():
            journal.begin_run(called)
            if seconds is not None or time_left(journal) == 0:
                journal.put("time_left", seconds)
            if changed:
                journal.record_edits(changed)
        if extends:
            write_request(journal.directory, "extend", arguments={"trials": trials})
        return run_study(journal, spec, search, config, show_progress=show_progress, page=page)


def _check_extension(journal: Journal, trials: int) -> bool:
    """Check that the algorithm can try so many trials; return whether that is still to be requested.

    Raises:
        AlgorithmError: it cannot.
        ShoalError: the study is over.
    """
    known = [each["trials"] for each in journal.study.get("extensions", ())]
    known += [each.arguments["trials"] for each in pending_requests(journal.directory) if each.verb == "extend"]
    if known and known[-1] == trials:  # the same call before, which a kill may have ended
        return False
    if journal.study.get("end_requested"):
        raise ShoalError(f"the study in {journal.directory} is over: {how_ended(journal)}; begin a new study")
    algorithm = load_algorithm(journal.blob("algorithm"), journal.spec)
    for number in [*known, trials]:
        algorithm.extend(number)
    return True


@contextmanager
def _another_named(directory: Path) -> Iterator[None]:
    """Within this context, the refusal of a policy or packing says how to resume the study with another one."""
    try:
        yield
    except (PolicyError, PackError) as error:
        option = "--policy auto" if isinstance(error, PolicyError) else "--packing cost"
        raise type(error)(
            f"{error}; resume the study with another one: {command('resume', directory, option)}"
        ) from error


def _edits(journal: Journal, accepted: bool) -> list[Edit]:
    """Edits of the task since the study last ran; refused, unless accepted, before any code of the task is run."""
    found = edits(journal.study.get("sources", {}))
    if found and not accepted:
        what = "\n".join(f"{edit.path}:\n{edit.text}" for edit in found)
        raise TaskChangedError(
            f"files of the task were edited since the study in {journal.directory} last ran:\n\n{what}\n\n"
            "Further reports would come from another task than earlier ones. Undo the edits, or accept them (Python: "
            f"accept_changes=True), which the journal notes: {command('resume', journal.directory, '--accept-changes')}"
        )
    return found


def _new_directory(name: str) -> Path:
    base = Path("runs") / f"{name.lower()}-{time.strftime('%Y%m%d-%H%M%S')}"
    others = (base.with_name(f"{base.name}-{number}") for number in count(2))
    return next(path for path in chain([base], others) if not path.exists())
