"""A leader on one node and its helper on another, each with an address of its own."""

import json
import time
from contextlib import closing
from pathlib import Path

import cloudpickle
import pytest
import team_runner
import torch
from support.pipes import PipeNodes

from shoal.core.array import Array, Member
from shoal.core.device import Device
from shoal.core.event import TeamMeasured
from shoal.core.job import Job, JobUpdate, Purpose
from shoal.core.trial import Trial
from shoal.host.machine import own_addresses
from shoal.run.base import Ended, Outcome, WorkerContext
from shoal.testing.backends import events_until_ended
from shoal.train.data.datasets import DataSets
from shoal.train.signature_builder import SignatureBuilder
from shoal.train.team.channel import address_path


@pytest.mark.thorough
def test_jobs_on_two_nodes_form_a_team(tmp_path: Path) -> None:
    task = team_runner.Linear()
    trial = Trial(0, {}, seed=1, data_seed=2)
    key = SignatureBuilder(task, DataSets(task, torch.device("cpu"))).key(trial)
    arrays = (Array(key, (Member(trial, 0, 10**6),)),)
    context = WorkerContext(tmp_path, cloudpickle.dumps(task), runner="team_runner:run")
    with closing(PipeNodes(context)) as backend:
        backend.start(Job("leader", arrays), Device("ash/cpu:0", "cpu/1", 2**30))
        backend.start(Job("helper", arrays, Purpose.ASSIST, assists="leader"), Device("beech/cpu:0", "cpu/1", 2**30))
        backend.change("leader", JobUpdate(team=frozenset({"helper"})))
        deadline = time.monotonic() + 600.0
        sizes: set[int] = set()
        while 2 not in sizes:
            assert time.monotonic() < deadline, f"the leader has measured teams of {sizes} processes"
            for event in backend.poll(1.0):
                assert not isinstance(event, Ended), event
                if isinstance(event, TeamMeasured):
                    assert not event.note
                    sizes |= event.seconds.keys()
        assert json.loads(address_path(tmp_path, "leader").read_text())[0] == own_addresses()[0]
        backend.stop("leader")
        ends = events_until_ended(backend, ["leader", "helper"])
        for job, outcome in (("leader", Outcome.STOPPED), ("helper", Outcome.FINISHED)):
            assert isinstance(end := ends[job][-1], Ended)
            assert end.outcome is outcome, end.message
