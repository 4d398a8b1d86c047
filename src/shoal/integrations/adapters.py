"""Adapters that `peft` puts on a base model, as the config of a trial has them."""

import copy
from dataclasses import fields, is_dataclass, replace
from typing import Any, cast

from torch import nn

from shoal.core.errors import TaskError
from shoal.core.trial import Config
from shoal.integrations.optional import check_installed

__all__ = ["adapter_fields", "with_adapter"]


def adapter_fields(peft_config: Any) -> frozenset[str]:
    """Return the names of the fields of a configuration of an adapter; none for None.

    Raises:
        TaskError: It is no configuration of `peft`, or one that does not describe adapters of a frozen model.
    """
    if peft_config is None:
        return frozenset()
    check_installed("peft", "`peft_config`")
    from peft import PeftConfig

    if not isinstance(peft_config, PeftConfig) or not is_dataclass(peft_config):
        raise TaskError(
            f"`peft_config` must be a configuration of peft, such as peft.LoraConfig(r=8), got {peft_config!r}"
        )
    return frozenset(each.name for each in fields(peft_config) if each.init)


def with_adapter(base: nn.Module, peft_config: Any, config: Config) -> nn.Module:
    """Put a new adapter on a model; names of the config that are fields of `peft_config` replace its values."""
    from peft import get_peft_model

    own = {name: config[name] for name in filter(config.__contains__, sorted(adapter_fields(peft_config)))}
    try:
        return cast("nn.Module", get_peft_model(cast("Any", base), replace(copy.deepcopy(peft_config), **own)))
    except TaskError:
        raise
    except (TypeError, ValueError, NotImplementedError) as error:
        given = ", ".join(f"{name}={value!r}" for name, value in own.items()) or "as it is given"
        raise TaskError(f"peft refuses the `peft_config` of the trial ({given}): {error}") from error
