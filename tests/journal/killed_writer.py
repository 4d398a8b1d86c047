"""Writers to be killed, in processes that have all imported: one begins a study, one says how many steps it recorded.

Step n of the study proposes trials 4n to 4n + 3, starts their job, lets each report two epochs, and ends the job: three
transactions, each of which changes all four trials alike. A step that a kill cut short is done again.
"""

import multiprocessing
import os
import time
from contextlib import suppress

from journal_samples import create, group, job, report
from support.recorded import RecordedJournal

from shoal.core.errors import JournalError
from shoal.core.trial import Decision, TrialState


def begin(directory, said):
    said.send(0)
    create(directory).close()


def go_on(directory, said):
    try:
        journal = RecordedJournal.open(directory)
    except JournalError:
        journal = create(directory)
    journal.requeue_running()
    step = sum(row.state is TrialState.COMPLETE for row in journal.trials()) // 4
    said.send(step)
    while True:
        numbers = range(4 * step, 4 * step + 4)
        name = f"{step} of process {os.getpid()}"
        with journal.transaction():
            journal.record_proposal(4, [group(numbers, 2)])
            journal.record_job_start(job(name, numbers), "cpu:0")
        journal.record_reports(name, [report(number, 1) for number in numbers])
        with journal.transaction():
            journal.record_reports(name, [report(number, 2, state=TrialState.PAUSED) for number in numbers])
            journal.record_decisions([Decision(number, TrialState.COMPLETE) for number in numbers])
            journal.record_job_end(name, "finished", failed=False)
        step += 1
        said.send(step)


def run_and_kill(writer, directory, seconds):
    """Let a writer run for a while after its first word; returns the last."""
    context = multiprocessing.get_context("fork")
    receiver, said = context.Pipe(duplex=False)
    with receiver:
        process = context.Process(target=writer, args=(directory, said))
        process.start()
        said.close()
        word = receiver.recv()
        time.sleep(seconds)
        process.kill()
        process.join()
        with suppress(EOFError):
            while True:
                word = receiver.recv()
    return word
