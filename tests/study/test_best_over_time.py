"""The best value over time is that of the trial that tables call the best, after every report."""

from hypothesis import given
from hypothesis import strategies as st

from shoal.core.ranking import ranked
from shoal.core.rows import values
from shoal.core.trial import Report, Trial, TrialState
from shoal.spec import StudySpec
from shoal.study.improvement import BestTracker
from shoal.study.trials import TrialRecord, TrialTable

TRIALS = 4
SPECS = [
    {},
    {"mode": "min"},
    {"rank_by": "last"},
    {"best_by": {"loss": "min"}},
    {"constraints": {"loss": "<= 2"}},
    {"repeats": 2},
    {"metric": ["accuracy", "loss"], "mode": ["max", "min"]},
]
NUMBERS = st.sampled_from([-1.0, 0.0, 1.0, 2.0, 3.0, float("nan"), float("inf")])
REPORTS = st.lists(st.tuples(st.integers(0, TRIALS - 1), NUMBERS, NUMBERS, st.booleans()), max_size=12)


@given(st.sampled_from(SPECS), REPORTS, st.integers(0, 12))
def test_the_recorded_value_is_that_of_the_best_trial(changes, reports, resumed):
    spec = StudySpec(**({"metric": "accuracy", "mode": "max"} | changes))
    table = TrialTable(spec.objectives, spec.bounds, spec.of_best)
    for number in range(TRIALS):
        table.move(TrialRecord(Trial(number, {}, 0, 0), 20), TrialState.PENDING)
    tracker, recorded, epochs = BestTracker(spec, table), [], [0] * TRIALS
    for place, (number, accuracy, loss, fails) in enumerate(reports):
        if place == resumed:
            tracker = BestTracker(spec, table)
            tracker.restore(recorded)
        epochs[number] += 1
        state = TrialState.FAILED if fails else TrialState.RUNNING
        if not table.reported(Report(number, epochs[number], {"accuracy": accuracy, "loss": loss}, state=state)):
            continue
        if (changed := tracker.after(number)) is not None:
            recorded.append(changed)
        rows = [row for row in spec.configurations([record.row for record in table]) if not row.violation]
        best = ranked(rows, spec.objectives)[:1]
        if best and (shown := values(best[0], spec.objectives)) is not None:
            assert recorded[-1] == shown[0]
