"""Callbacks of a study, called by a process that follows the study's journal."""

from shoal.callbacks.base import Callback, EpochReport, StudyInfo, TrialResult

__all__ = ["Callback", "EpochReport", "StudyInfo", "TrialResult"]
