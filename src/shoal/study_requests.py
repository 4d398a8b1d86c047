"""The requests of people to a study, as methods of `Study`."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from shoal.core.trial import Config
from shoal.journal import client

__all__ = ["StudyRequests"]


class StudyRequests:
    """Requests to the study in a directory: the process that runs it carries them out, or else the next one that does,
    once the study is resumed.

    Arguments `numbers` are the number of a trial or several; the numbers are returned in order.

    Raises:
        ShoalError: a trial does not exist or is not in a state for the request, no trial is named, or another argument
            is invalid.
        JournalError: the directory of the study cannot be written.
    """

    directory: Path

    def retry(self, numbers: int | Iterable[int] | None = None) -> list[int]:
        """Retry failed trials.

        Such a trial continues from its newest checkpoint, or begins anew, up to the budget at which it failed.
        Its failures are counted from zero. Its reports count in tables and for the best trial. The algorithm does not
        observe them: it has decided without the trial, and a replay must give the same study.

        Args:
            numbers: As in the other methods; None: all failed trials.
        """
        return client.retry(self.directory, numbers)

    def pause(self, numbers: int | Iterable[int]) -> list[int]:
        """Pause trials.

        A running trial leaves its job at the next step, with a checkpoint. Trials that must be compared with it wait.
        It stays paused after a stop or kill of the study.
        """
        return client.pause(self.directory, numbers)

    def resume(self, numbers: int | Iterable[int]) -> list[int]:
        """Resume paused trials at the step at which they were paused."""
        return client.resume(self.directory, numbers)

    def stop(self, numbers: int | Iterable[int]) -> list[int]:
        """Stop trials for good.

        They become STOPPED, and their reports count. The algorithm observes a failure of each, so that no rung waits.
        """
        return client.stop(self.directory, numbers)

    def policy(self, name: str) -> None:
        """Change the policy: in the process that runs the study, and whenever it is resumed.

        Args:
            name: One of `shoal.plan.schedule.POLICIES`.

        Raises:
            PolicyError: the policy does not exist.
        """
        client.policy(self.directory, name)

    def keep(self, keep: int | Literal["best", "all"]) -> None:
        """Change which ended trials keep their weights, now and later, also if the study has ended. Deleted weights do
        not come back.

        Args:
            keep: As in `tune`.
        """
        client.keep(self.directory, keep)

    def pin(self, numbers: int | Iterable[int]) -> list[int]:
        """Keep the checkpoints of trials whatever `keep` says, of an open trial also its optimizer's state."""
        return client.pin(self.directory, numbers)

    def add(self, config: Config, epochs: int, *, outside: bool = False) -> int:
        """Add a trial of your own.

        Its reports count in tables and for the best trial. The algorithm does not
        observe it or decide about it: the trial is COMPLETE after its epochs.

        Args:
            config: Config of the trial; missing constants and computed values of the space are filled in.
            epochs: Number of epochs to train.
            outside: Whether the config may lie outside the space; `shoal status` and the journal name what does.

        Returns:
            The number of the trial, 1000000 or above.

        Raises:
            ShoalError: the config lies outside the space though `outside` is false, or cannot be stored in the journal;
                or `epochs` is not a positive integer.
        """
        return client.add(self.directory, config, epochs, outside=outside)[0]

    def clone(
        self,
        numbers: int | Iterable[int],
        changes: Mapping[str, Any] | None = None,
        *,
        epochs: int | None = None,
        anew: bool = False,
        outside: bool = False,
    ) -> list[int]:
        """Add clones of trials with some values changed, as in `add`.

        A clone begins with the original's newest checkpoint of the end of an epoch, with the optimizer's state as far
        as it fits. Of an ended trial that was not pinned before only the weights are left, and the clone begins with a
        new optimizer.

        Args:
            changes: Name of a parameter, with dots where it is nested -> its value.
            epochs: Budget of each clone, epochs of the original included; None: the budget of the original.
            anew: Whether clones begin with new weights instead.
            outside: As in `add`.

        Returns:
            The number of each clone, 1000000 or above, in the order of the originals' numbers.

        Raises:
            ShoalError: a trial does not exist or has no checkpoint of the end of an epoch; no epochs are left to train;
                or as in `add`.
        """
        clones = client.clone(self.directory, numbers, changes or {}, epochs=epochs, anew=anew, outside=outside)
        return [number for number, _ in clones]

    def add_devices(self, names: str | Sequence[str], patience: float = 60.0) -> list[str]:
        """Add devices to the study, new or removed ones: at once, or once it is resumed.

        Args:
            names: Names of the devices, or one name: "cuda:1", ["cuda:0", "cuda:1"].
            patience: Longest wait in seconds for the process that runs the study; 0: no wait, for code that runs in
                that process, such as a back end, and would wait for itself.

        Returns:
            Names of the study's devices afterwards; without a running process or a wait, those that it will have.

        Raises:
            DeviceError: a device is named twice, in use already, or not there; or the request is not carried out in
                time, and stays pending.
        """
        wanted = [names] if isinstance(names, str) else list(names)
        return client.change_devices(self.directory, "add devices", wanted, patience=patience)

    def remove_devices(self, names: str | Sequence[str], patience: float = 60.0) -> list[str]:
        """Remove devices from the study: at once, or once it is resumed.

        Jobs on them stop after a checkpoint; their trials continue elsewhere.

        Args:
            names: Names of the devices, or one name.
            patience: As in `add_devices`.

        Returns:
            As in `add_devices`.

        Raises:
            DeviceError: a device is named twice, or the study does not have it; or as in `add_devices`.
        """
        wanted = [names] if isinstance(names, str) else list(names)
        return client.change_devices(self.directory, "remove devices", wanted, patience=patience)

    def pause_study(self) -> None:
        """Stop all jobs after a checkpoint, and start none until `resume_study`; the study's process continues.

        The study stays paused after a stop or kill.
        """
        client.pause_study(self.directory)

    def resume_study(self) -> None:
        """Resume the study after `pause_study`."""
        client.resume_study(self.directory)

    def end_study(self) -> None:
        """End the study: all jobs stop after a checkpoint, and open trials become STOPPED.

        The algorithm is asked for no further trials.
        """
        client.end_study(self.directory)
