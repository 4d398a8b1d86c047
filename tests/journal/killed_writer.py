"""A writer to be killed: begins or goes on with a study, and says on standard output how many steps are recorded.

Step n of the study proposes trials 4n to 4n + 3, starts their job, lets each report two epochs, and ends the job: three
transactions, each of which changes all four trials alike. A step that a kill cut short is done again.
"""

import os
import sys

from journal_samples import create, group, job, report

from shoal.errors import JournalError
from shoal.journal.writer import Journal
from shoal.trial import Decision, TrialState


def main(directory: str) -> None:
    try:
        journal = Journal.open(directory)
    except JournalError:
        journal = create(directory)
    journal.requeue_running()
    step = sum(row.state is TrialState.COMPLETE for row in journal.trials()) // 4
    print(step, flush=True)
    while True:
        numbers = range(4 * step, 4 * step + 4)
        name = f"{step} of process {os.getpid()}"
        with journal.transaction():
            journal.asked(4, [group(numbers, 2)])
            journal.job_started(job(name, numbers), "cpu:0")
        journal.reported(name, [report(number, 1) for number in numbers])
        with journal.transaction():
            journal.reported(name, [report(number, 2, state=TrialState.PAUSED) for number in numbers])
            journal.decided([Decision(number, TrialState.COMPLETE) for number in numbers])
            journal.job_ended(name, "finished", failed=False)
        step += 1
        print(step, flush=True)


main(sys.argv[1])
