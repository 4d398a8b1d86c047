"""Further habits: modules that come and go, modes that change, seeds set by hand, optimizers of the user's own."""

import copy
from typing import Any

import torch
import torch.nn.functional as F
from corpus_base import FEATURES, Program
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn


class Counted(Program):
    """Its models count their training steps."""

    def model(self, config: Any) -> nn.Module:
        model = super().model(config)
        model.steps = 0
        return model

    def begins(self, model: nn.Module, step: int) -> None:
        """What happens to a model before a step."""

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        if model.training:
            model.steps += 1
            self.begins(model, model.steps)
        return super().loss(model, batch)


class Averaged(Program):
    """torch's own averaged model, updated after each step."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.now = nn.Linear(FEATURES, 1)
            self.mean = AveragedModel(self.now, multi_avg_fn=get_ema_multi_avg_fn(0.9))

        def forward(self, x: Tensor) -> Tensor:
            return self.now(x) if self.training else self.mean(x)

    def net(self, config: Any) -> nn.Module:
        return self.Net()

    def optimizer(self, model: nn.Module, config: Any) -> Any:
        return torch.optim.SGD(model.now.parameters(), lr=config["lr"])

    def step(self, model: nn.Module, batch: Any, optimizer: Any) -> Tensor:
        loss = super().step(model, batch, optimizer)
        model.mean.update_parameters(model.now)
        return loss


class DropoutSchedule(Counted):
    """All dropout rates of a model fall, set in a walk over its modules."""

    def net(self, config: Any) -> nn.Module:
        return nn.Sequential(nn.Linear(FEATURES, 5), nn.Dropout(0.5), nn.Tanh(), nn.Linear(5, 1))

    def begins(self, model: nn.Module, step: int) -> None:
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.5 / step


class LayerReplaced(Counted):
    """The last layer is replaced by a new one, which no optimizer trains, in the fifth step."""

    def begins(self, model: nn.Module, step: int) -> None:
        if step == 5:
            model[2] = nn.Linear(5, 1).double()


class HeadDropped(Counted):
    """An auxiliary head is deleted in the fifth step."""

    def net(self, config: Any) -> nn.Module:
        model = super().net(config)
        model[0].extra = nn.Linear(FEATURES, 1)
        return model

    def begins(self, model: nn.Module, step: int) -> None:
        if step == 5:
            del model[0].extra

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        loss = super().loss(model, batch)
        if hasattr(model[0], "extra"):
            loss = loss + F.mse_loss(model[0].extra(batch[0]), batch[1])
        return loss


class Unfreezes(Counted):
    """The first layer is frozen at the start and trained from the fifth step on."""

    def net(self, config: Any) -> nn.Module:
        model = super().net(config)
        model[0].requires_grad_(False)
        return model

    def begins(self, model: nn.Module, step: int) -> None:
        if step == 5:
            model[0].requires_grad_(True)


class LateBuffer(Program):
    """Registers a buffer in its first forward pass."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(FEATURES, 1)

        def forward(self, x: Tensor) -> Tensor:
            if not hasattr(self, "mean"):
                self.register_buffer("mean", x.mean(0))
            return self.head(x - self.mean)

    def net(self, config: Any) -> nn.Module:
        return self.Net()


class StatisticsFrozen(Program):
    """Batch norm is set to evaluation within the loss from the first step on, as in fine-tuning."""

    def net(self, config: Any) -> nn.Module:
        return nn.Sequential(nn.Linear(FEATURES, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 1))

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        for module in model.modules():
            if isinstance(module, nn.BatchNorm1d):
                module.eval()
        return super().loss(model, batch)


class TeacherEvaluates(Program):
    """The model is set to evaluation for its own targets and back, within the loss."""

    def net(self, config: Any) -> nn.Module:
        return nn.Sequential(nn.Linear(FEATURES, 5), nn.BatchNorm1d(5), nn.Dropout(0.3), nn.Linear(5, 1))

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        if not model.training:
            return super().loss(model, batch)
        model.eval()
        with torch.no_grad():
            target = model(batch[0])
        model.train()
        y = model(batch[0])
        return F.mse_loss(y, batch[1]) + 0.1 * F.mse_loss(y, target)


class SeedByHand(Program):
    """torch.manual_seed in the forward pass, so that its noise is always the same."""

    class Net(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            if self.training:
                torch.manual_seed(5)
                x = x + 0.1 * torch.randn(x.shape, dtype=x.dtype)
            return super().forward(x)

    def net(self, config: Any) -> nn.Module:
        return self.Net(nn.Linear(FEATURES, 1))


class ForkedNoise(Program):
    """The same within torch.random.fork_rng."""

    class Net(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            if self.training:
                with torch.random.fork_rng(devices=[]):
                    torch.manual_seed(5)
                    x = x + 0.1 * torch.randn(x.shape, dtype=x.dtype)
            return super().forward(x)

    def net(self, config: Any) -> nn.Module:
        return self.Net(nn.Linear(FEATURES, 1))


class SignOptimizer(torch.optim.Optimizer):
    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    mean = self.state[p].setdefault("mean", torch.zeros_like(p))
                    p.add_(mean.lerp_(p.grad, 0.3).sign(), alpha=-0.1 * group["lr"])


class OwnOptimizer(Program):
    """An optimizer of the user's own (Lion)."""

    def optimizer(self, model: nn.Module, config: Any) -> Any:
        return SignOptimizer(model.parameters(), lr=config["lr"])


class GradientSurgery(Program):
    """Two losses' gradients by autograd.grad; one is projected where they conflict."""

    def step(self, model: nn.Module, batch: Any, optimizer: Any) -> Tensor:
        loss = self.loss(model, batch)
        size = model(batch[0]).square().mean()
        params = list(model.parameters())
        first = torch.autograd.grad(loss, params, retain_graph=True)
        second = torch.autograd.grad(size, params)
        dot = sum((a * b).sum() for a, b in zip(first, second, strict=True))
        norm = sum((a * a).sum() for a in first)
        for p, a, b in zip(params, first, second, strict=True):
            p.grad = a + 0.1 * torch.where(dot < 0, b - dot / norm * a, b)
        optimizer.step()
        return loss


class GradientNoise(Program):
    """Noise is added to the gradients before the update."""

    def step(self, model: nn.Module, batch: Any, optimizer: Any) -> Tensor:
        optimizer.zero_grad()
        loss = self.loss(model, batch)
        loss.backward()
        for p in model.parameters():
            p.grad += 0.01 * torch.randn_like(p.grad)
        optimizer.step()
        return loss


class SkipsBadSteps(Program):
    """Updates only where the loss is finite and below a bound."""

    def step(self, model: nn.Module, batch: Any, optimizer: Any) -> Tensor:
        optimizer.zero_grad()
        loss = self.loss(model, batch)
        loss.backward()
        if torch.isfinite(loss) and loss < 2:
            optimizer.step()
        return loss


class Rollback(Program):
    """Keeps a copy of its weights, and goes back to it where the loss has grown."""

    def model(self, config: Any) -> nn.Module:
        model = super().model(config)
        model.kept = None
        return model

    def step(self, model: nn.Module, batch: Any, optimizer: Any) -> Tensor:
        kept = copy.deepcopy(model.state_dict())
        loss = super().step(model, batch, optimizer)
        with torch.no_grad():
            if self.loss(model, batch) > loss:
                model.load_state_dict(kept)
        return loss


class MovingWeights(Program):
    """Weights are perturbed in place within the forward pass and brought back after it."""

    class Net(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            if not self.training:
                return super().forward(x)
            noise = [0.01 * torch.randn_like(p) for p in self.parameters()]
            with torch.no_grad():
                for p, n in zip(self.parameters(), noise, strict=True):
                    p.data.add_(n)
            y = super().forward(x)
            with torch.no_grad():
                for p, n in zip(self.parameters(), noise, strict=True):
                    p.data.sub_(n)
            return y

    def net(self, config: Any) -> nn.Module:
        return self.Net(nn.Linear(FEATURES, 1))


class HaltsWhenSure(Program):
    """Iterates until the state of its batch changes little: a loop on data."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell, self.outer = nn.Linear(FEATURES, FEATURES), nn.Linear(FEATURES, 1)

        def forward(self, x: Tensor) -> Tensor:
            h, change, rounds = x, torch.ones(()), 0
            while change > 0.3 and rounds < 6:
                new = (self.cell(h) + x).tanh()
                change, h, rounds = (new - h).abs().max(), new, rounds + 1
            return self.outer(h)

    def net(self, config: Any) -> nn.Module:
        return self.Net()


class Plateau(Program):
    """ReduceLROnPlateau without patience follows the validation loss."""

    def net(self, config: Any) -> nn.Module:
        return nn.Linear(FEATURES, 1)

    def optimizer(self, model: nn.Module, config: Any) -> Any:
        return torch.optim.RMSprop(model.parameters(), lr=config["lr"])

    def scheduler(self, optimizer: Any, config: Any) -> Any:
        return torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=0.5)
