"""Tasks in float64, small enough to be trained again by a plain loop."""

import os
import signal
import time
from collections import deque
from functools import cache
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import Dataset, TensorDataset, random_split

import shoal

Sets = tuple[Dataset[Any], Dataset[Any]]


@cache
def digits() -> tuple[TensorDataset, TensorDataset]:
    """Those of `sklearn.datasets.load_digits`, from its file: to import that takes two seconds."""
    found = find_spec("sklearn")
    assert found is not None
    assert found.origin is not None
    rows = np.loadtxt(Path(found.origin).parent / "datasets" / "data" / "digits.csv.gz", delimiter=",")
    x, y = torch.from_numpy(rows[:, :-1] / 16), torch.from_numpy(rows[:, -1]).long()
    return TensorDataset(x[:1437], y[:1437]), TensorDataset(x[1437:], y[1437:])


def blobs(samples: int, seed: int, noise: float = 0.5) -> TensorDataset:
    """Three clouds of points in six dimensions."""
    generator = torch.Generator().manual_seed(seed)
    y = torch.randint(0, 3, (samples,), generator=generator)
    centres = torch.randn(3, 6, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
    return TensorDataset(centres[y] + noise * torch.randn(samples, 6, generator=generator, dtype=torch.float64), y)


def mlp(*widths: int, between: type[nn.Module] = nn.ReLU) -> nn.Sequential:
    layers: list[nn.Module] = []
    for width, following in pairwise(widths):
        layers += [nn.Linear(width, following, dtype=torch.float64), between()]
    return nn.Sequential(*layers[:-1])


class Classify(shoal.Task):
    """Base class of the tasks here."""

    def __repr__(self) -> str:
        return type(self).__name__

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        x, y = batch
        return F.cross_entropy(model(x), y)

    def metrics(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        x, y = batch
        return {"accuracy": (model(x).argmax(1) == y).double().mean()}

    def optimizer(self, model: nn.Module, config: Any) -> Optimizer:
        return torch.optim.Adam(model.parameters(), lr=config["lr"])


class Digits(Classify):
    """The search of the benchmark."""

    def data(self, config: Any) -> Sets:
        return digits()

    def model(self, config: Any) -> nn.Module:
        return mlp(64, 128, 128, 10)


class FusedDigits(Digits):
    """The same with torch's other implementation of Adam, which rounds differently."""

    def optimizer(self, model: nn.Module, config: Any) -> Optimizer:
        return torch.optim.Adam(model.parameters(), lr=config["lr"], fused=True)


class Blobs(Classify):
    """100 samples in batches of 16, the last of 4; 40 to validate on, the last batch of 8."""

    def data(self, config: Any) -> Sets:
        return blobs(100, 0), blobs(40, 1)

    def model(self, config: Any) -> nn.Module:
        return mlp(6, config.get("width", 8), 3)

    def batch_size(self, config: Any) -> int:
        size: int = config.get("batch_size", 16)
        return size


class WithoutBiases(Blobs):
    """Its optimizer owns only some of the parameters."""

    def optimizer(self, model: nn.Module, config: Any) -> Optimizer:
        return torch.optim.SGD([each for each in model.parameters() if each.dim() > 1], lr=config["lr"])


class Momentum(Blobs):
    def optimizer(self, model: nn.Module, config: Any) -> Optimizer:
        return torch.optim.SGD(model.parameters(), lr=config["lr"], momentum=config["momentum"], nesterov=True)

    def scheduler(self, optimizer: Optimizer, config: Any) -> Any:
        return torch.optim.lr_scheduler.StepLR(optimizer, step_size=config["step_size"], gamma=0.5)


class Plateau(Blobs):
    def scheduler(self, optimizer: Optimizer, config: Any) -> Any:
        return torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=0.05)


class Scheduled(Blobs):
    """Any scheduler of torch by name."""

    def scheduler(self, optimizer: Optimizer, config: Any) -> Any:
        makers = {
            "multistep": lambda: torch.optim.lr_scheduler.MultiStepLR(optimizer, [1, 3]),
            "lambda": lambda: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.9**epoch),
            "onecycle": lambda: torch.optim.lr_scheduler.OneCycleLR(optimizer, config["lr"], total_steps=10),
            "cosine": lambda: torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 3),
            "sequential": lambda: torch.optim.lr_scheduler.SequentialLR(
                optimizer,
                [
                    torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=2),
                    torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9),
                ],
                milestones=[2],
            ),
        }
        return makers[config["scheduler"]]()


class Dropout(Blobs):
    def model(self, config: Any) -> nn.Module:
        return nn.Sequential(mlp(6, 16), nn.ReLU(), nn.Dropout(config["dropout"]), mlp(16, 3))

    def optimizer(self, model: nn.Module, config: Any) -> Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=config["lr"], weight_decay=config["decay"])


class Convolutional(Classify):
    def data(self, config: Any) -> Sets:
        return self._images(60, 0), self._images(25, 1)

    def _images(self, samples: int, seed: int) -> TensorDataset:
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(samples, 1, 6, 6, generator=generator, dtype=torch.float64)
        return TensorDataset(x, (x.mean((1, 2, 3)) > 0).long())

    def model(self, config: Any) -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
            nn.Linear(36, 2),
        ).double()  # fmt: skip

    def batch_size(self, config: Any) -> int:
        return 16


class Mixed(Blobs):
    """Structures, widths, batch sizes and data that differ between the trials of one study."""

    def data(self, config: Any) -> Sets:
        return blobs(100, 0, config["noise"]), blobs(40, 1, config["noise"])

    def model(self, config: Any) -> nn.Module:
        between = nn.Tanh if config["tanh"] else nn.ReLU
        return mlp(6, config["width"], 3, between=between)


class OwnStep(Blobs):
    """Two updates a batch, the second on the clipped gradient of a noisy copy of it."""

    def step(self, model: nn.Module, batch: Any, optimizer: Optimizer) -> Tensor:
        optimizer.zero_grad()
        loss = self.loss(model, batch)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        self.loss(model, [batch[0] * 1.01, batch[1]]).backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        return loss


class RmsProp(Blobs):
    def optimizer(self, model: nn.Module, config: Any) -> Optimizer:
        return torch.optim.RMSprop(model.parameters(), lr=config["lr"], momentum=0.5)


class Samples(Dataset[dict[str, Tensor]]):
    """A data set that is not a TensorDataset, whose samples are dicts."""

    def __init__(self, points: TensorDataset, jitter: float = 0.0) -> None:
        self._points = points
        self._jitter = jitter

    def __len__(self) -> int:
        return len(self._points)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        x, y = self._points[index]
        return {"x": x + self._jitter * torch.randn(6, dtype=torch.float64) if self._jitter else x, "y": y}


class Named(Blobs):
    def data(self, config: Any) -> Sets:
        return Samples(blobs(100, 0)), Samples(blobs(40, 1))

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        return F.cross_entropy(model(batch["x"]), batch["y"])

    def metrics(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        return {"accuracy": (model(batch["x"]).argmax(1) == batch["y"]).double().mean()}


class Augmented(Named):
    """Draws random numbers when a sample is fetched, in the model, and in validation."""

    def data(self, config: Any) -> Sets:
        return Samples(blobs(100, 0), jitter=0.1), Samples(blobs(40, 1), jitter=0.1)

    def model(self, config: Any) -> nn.Module:
        return nn.Sequential(mlp(6, 16), nn.Dropout(0.2), nn.ReLU(), mlp(16, 3))

    def metrics(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        noisy = batch["x"] + 0.3 * torch.randn_like(batch["x"])
        return {"noisy": F.cross_entropy(model(noisy), batch["y"])}


class AugmentedOwnStep(Augmented):
    """The same by a step of its own."""

    def step(self, model: nn.Module, batch: Any, optimizer: Optimizer) -> Tensor:
        return super().step(model, batch, optimizer)


class Disturbed(Blobs):
    """Trials with a `harm` do it to the job they are in; nothing of their models tells them apart."""

    def __init__(self, marker: str = "") -> None:
        self.marker = marker

    def optimizer(self, model: nn.Module, config: Any) -> Optimizer:
        return Harmful(model.parameters(), config["lr"], config["harm"], config.get("after", 0), self.marker)


class Broken(Blobs):
    """Has a fault in its loss, until a file says that it was mended; or for some values of `fault` only."""

    def __init__(self, mended: str = "") -> None:
        self.mended = mended

    def model(self, config: Any) -> nn.Module:
        model = super().model(config)
        model.fault = config.get("fault", "all")
        return model

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        fault: Any = model.fault
        if fault and not (self.mended and Path(self.mended).exists()):
            raise ValueError(f"planted in the loss: {fault}")
        return super().loss(model, batch)


RECENT: deque[int] = deque(maxlen=8)
"""Which optimizers of this process have made its last steps."""


LINGER_SECONDS = 0.02
"""Seconds that a loss of `Lingering` sleeps."""


class Lingering(Blobs):
    """Takes its time."""

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        time.sleep(LINGER_SECONDS)
        return super().loss(model, batch)


class Held(Blobs):
    """Takes its time until there is a file.

    Args:
        released: the file.
    """

    def __init__(self, released: Path) -> None:
        self.released = released

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        if torch.is_grad_enabled() and not self.released.exists():
            time.sleep(0.05)
        return super().loss(model, batch)


class Harmful(torch.optim.SGD):
    """SGD that does harm after some steps."""

    def __init__(self, params: Any, lr: float, harm: str, after: int, marker: str) -> None:
        super().__init__(params, lr=lr)
        self.harm, self.left, self.marker = harm, after, marker

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.left -= 1
        RECENT.append(id(self))
        if self.left == 0:
            self.do_harm()
        super().step()

    def do_harm(self) -> None:
        match self.harm:
            case "raise":
                raise ZeroDivisionError("planted in the step of one trial")
            case "exit":
                os._exit(3)
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "memory once":
                if not Path(self.marker).exists():
                    Path(self.marker).touch()
                    raise torch.OutOfMemoryError("planted: out of memory")
            case "memory in company":
                if len(set(RECENT)) > 2:
                    raise torch.OutOfMemoryError("planted: out of memory for more than two")
            case "hang once":
                if not Path(self.marker).exists():
                    Path(self.marker).touch()
                    time.sleep(1000)


class Fatal(Blobs):
    """One config ends the process as soon as its optimizer is made."""

    def optimizer(self, model: nn.Module, config: Any) -> Optimizer:
        if config["lr"] == 0.02:
            os._exit(4)
        return super().optimizer(model, config)


class Countdown:
    """Steps that are left after the first validation; it is no state of trials, as it has no attributes."""

    __slots__ = ("left", "validated")

    def __init__(self, left: int) -> None:
        self.left, self.validated = left, False


class InterruptedAfter(Momentum):
    """Presses Ctrl-C once, when it has computed some more training losses after its first validation."""

    def __init__(self, steps: int, marker: str) -> None:
        self.marker = Path(marker)
        self.seen = Countdown(steps)

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        if not torch.is_grad_enabled():
            self.seen.validated = True
        elif self.seen.validated and not self.marker.exists():
            self.seen.left -= 1
            if self.seen.left == 0:
                self.marker.touch()
                signal.raise_signal(signal.SIGINT)
        return super().loss(model, batch)


class Signals(Momentum):
    """Sends the engine that made it a signal, once, some training losses after its first validation.

    The process that has sent it takes its time from then on, so that the engine hears it before the training is over.
    """

    def __init__(self, number: int, marker: Path) -> None:
        self.number, self.marker, self.engine = number, marker, os.getpid()
        self.seen: dict[str, Any] = {"left": 3, "validated": False, "sent": False}

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        if not torch.is_grad_enabled():
            self.seen["validated"] = True
        elif self.seen["sent"]:
            time.sleep(0.05)
        elif self.seen["validated"] and not self.marker.exists():
            self.seen["left"] -= 1
            if self.seen["left"] == 0:
                self.marker.touch()
                self.seen["sent"] = True
                os.kill(self.engine, self.number)
        return super().loss(model, batch)


class RandomSplit(Blobs):
    """Splits its data at random, as many do, without a seed."""

    def data(self, config: Any) -> Sets:
        points = blobs(140, 0)
        order = torch.as_tensor(np.random.permutation(140))
        shuffled = TensorDataset(*(tensor[order] for tensor in points.tensors))
        train, valid = random_split(shuffled, [100, 40])
        return train, valid


class Adversarial(shoal.Task):
    """A GAN on points: two optimizers, whose step draws no random numbers, or does."""

    def __init__(self, noisy: bool = False) -> None:
        self.noisy = noisy

    def __repr__(self) -> str:
        return "Adversarial"

    def data(self, config: Any) -> Sets:
        return blobs(60, 0), blobs(20, 1)

    def model(self, config: Any) -> nn.Module:
        return nn.ModuleDict({"generator": mlp(6, 8, 6), "critic": mlp(6, 8, 1)})

    def optimizer(self, model: nn.Module, config: Any) -> dict[str, Optimizer]:
        return {
            name: torch.optim.Adam(model[name].parameters(), lr=config["lr"], betas=(0.5, 0.99), eps=1e-3)  # type: ignore[index]
            for name in ("generator", "critic")
        }

    def scheduler(self, optimizer: Any, config: Any) -> Any:
        return [torch.optim.lr_scheduler.ExponentialLR(one, 0.9) for one in optimizer.values()]

    def batch_size(self, config: Any) -> int:
        return 20

    def loss(self, model: Any, batch: Any) -> Tensor:
        return F.softplus(-model["critic"](model["generator"](batch[0].flip(1)))).mean()

    def metrics(self, model: Any, batch: Any) -> dict[str, Tensor]:
        return {"accuracy": model["critic"](batch[0]).sigmoid().mean()}

    def step(self, model: Any, batch: Any, optimizer: Any) -> Tensor:
        real = batch[0]
        noise = torch.randn_like(real) if self.noisy else real.flip(1)
        fake = model["generator"](noise)
        optimizer["critic"].zero_grad()
        critic = F.softplus(-model["critic"](real)).mean() + F.softplus(model["critic"](fake.detach())).mean()
        critic.backward()
        nn.utils.clip_grad_norm_(model["critic"].parameters(), 0.5)
        optimizer["critic"].step()
        optimizer["generator"].zero_grad()
        loss = F.softplus(-model["critic"](fake)).mean()
        loss.backward()
        optimizer["generator"].step()
        return loss


class AdversarialOneByOne(Adversarial):
    """At its end the step asks for a number, so that one trial after another has to take it, from where it began."""

    def step(self, model: Any, batch: Any, optimizer: Any) -> Tensor:
        loss = super().step(model, batch, optimizer)
        return loss * 1.0 if float(loss.detach()) > -1.0 else loss
