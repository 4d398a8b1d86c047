"""Programs with training steps, gradients and optimizers of their own, and such that fail now and then."""

import math
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from corpus_base import FEATURES, Labels, Program
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


class Clipping(Program):
    """Clips the norm of the gradients."""

    def step(self, model: nn.Module, batch: Any, optimizer: Any) -> Tensor:
        optimizer.zero_grad()
        loss = self.loss(model, batch)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        return loss


class SharpnessAware(Program):
    """SAM: up along the gradient, a second gradient there, back, and a step."""

    def step(self, model: nn.Module, batch: Any, optimizer: Any) -> Tensor:
        optimizer.zero_grad()
        loss = self.loss(model, batch)
        loss.backward()
        norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
        with torch.no_grad():
            moves = [p.grad * 0.05 / (norm + 1e-12) for p in model.parameters()]
            for p, move in zip(model.parameters(), moves, strict=True):
                p.add_(move)
        optimizer.zero_grad()
        self.loss(model, batch).backward()
        with torch.no_grad():
            for p, move in zip(model.parameters(), moves, strict=True):
                p.sub_(move)
        optimizer.step()
        return loss


class Accumulation(Program):
    """Gradients of two batches for each update, counted on the model."""

    def model(self, config: Any) -> nn.Module:
        model = super().model(config)
        model.batches = 0
        return model

    def step(self, model: nn.Module, batch: Any, optimizer: Any) -> Tensor:
        loss = self.loss(model, batch) / 2
        loss.backward()
        model.batches += 1
        if model.batches % 2 == 0:
            optimizer.step()
            optimizer.zero_grad()
        return loss


class UpdateByHand(Program):
    """Stochastic gradient descent written out under no_grad; the optimizer is not used."""

    def step(self, model: nn.Module, batch: Any, optimizer: Any, config: Any) -> Tensor:
        model.zero_grad()
        loss = self.loss(model, batch)
        loss.backward()
        with torch.no_grad():
            for p in model.parameters():
                p -= config["lr"] * p.grad
        return loss


class WeightClamp(Program):
    """Clamps the weights after each update, as a Wasserstein critic."""

    def step(self, model: nn.Module, batch: Any, optimizer: Any) -> Tensor:
        loss = super().step(model, batch, optimizer)
        for p in model.parameters():
            p.data.clamp_(-0.3, 0.3)
        return loss


class GradientPenalty(Program):
    """autograd.grad within the loss, and backward through it."""

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        with torch.enable_grad():
            x = batch[0].clone().requires_grad_()
            y = model(x)
            (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
            return F.mse_loss(y, batch[1]) + 0.1 * (slope.norm(dim=1) - 1).square().mean()


class Straight(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.sign()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return gradient * (x.abs() < 1)


class Binarised(Program):
    """A custom autograd function that saves tensors: sign with a straight-through gradient."""

    class Net(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            return self[1](Straight.apply(self[0](x)))

    def net(self, config: Any) -> nn.Module:
        return self.Net(nn.Linear(FEATURES, 5), nn.Linear(5, 1))


class Checkpointed(Program):
    """A block under torch.utils.checkpoint."""

    class Net(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            return self[2](checkpoint(lambda x: self[1](self[0](x)), x, use_reentrant=False))

    def net(self, config: Any) -> nn.Module:
        return self.Net(nn.Linear(FEATURES, 5), nn.Tanh(), nn.Linear(5, 1))


class CheckpointedDropout(Checkpointed):
    """The same with dropout in the block."""

    def net(self, config: Any) -> nn.Module:
        return self.Net(nn.Linear(FEATURES, 5), nn.Dropout(0.3), nn.Linear(5, 1))


class ReentrantCheckpoint(Program):
    """The older, re-entrant kind of checkpoint."""

    class Net(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            h = self[0](x)
            return self[2](checkpoint(self[1], h, use_reentrant=True) if self.training else self[1](h))

    def net(self, config: Any) -> nn.Module:
        return self.Net(nn.Linear(FEATURES, 5), nn.Sequential(nn.Tanh(), nn.Linear(5, 5)), nn.Linear(5, 1))


class GradientHook(Program):
    """A hook on a parameter halves its gradient."""

    def model(self, config: Any) -> nn.Module:
        model = super().model(config)
        model[0].weight.register_hook(lambda gradient: gradient * 0.5)
        return model


class BackwardHook(Program):
    """A full backward hook clips what flows into a block."""

    def model(self, config: Any) -> nn.Module:
        model = super().model(config)
        model[1].register_full_backward_hook(lambda module, into, out: tuple(g.clamp(-0.05, 0.05) for g in into))
        return model


class BranchOnLoss(Program):
    """What is above a threshold is scaled down."""

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        loss = super().loss(model, batch)
        if loss > 1.2:
            return loss.sqrt()
        return loss


class NumpyInLoss(Program):
    """Weights of the samples by numpy, of what the model says."""

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        errors = (model(batch[0]) - batch[1]).square()
        ranks = np.argsort(np.argsort(errors.detach().numpy()[:, 0]))
        return (errors[:, 0] * torch.from_numpy(1 / (1.0 + ranks))).mean()


class HardExamples(Program):
    """Boolean masks: only what is above the median counts."""

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        errors = (model(batch[0]) - batch[1]).square().flatten()
        return errors[errors >= errors.median()].mean()


class NumbersInMetrics(Labels):
    """Metrics by NumPy and as plain numbers, for which no trials can validate at once."""

    def metrics(self, model: nn.Module, batch: Any) -> Any:
        found = model(batch[0]).argmax(1).numpy()
        return {"accuracy": float(np.mean(found == batch[1].numpy())), "chosen": len(set(found.tolist()))}


class ScatterInPlace(Labels):
    """Targets made by scatter_, index_put_ and index_add_ on zeros."""

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        x, y = batch
        logits = model(x)
        target = torch.zeros_like(logits).scatter_(1, y[:, None], 1.0)
        target[torch.arange(len(y)), (y + 1) % 3] += 0.1
        sums = logits.new_zeros(3).index_add_(0, y, logits.max(1).values)
        return F.binary_cross_entropy_with_logits(logits, target.clamp(max=1)) + 0.01 * sums.square().mean()


class WritesToInput(Program):
    """Normalises its input in place, which is the batch."""

    class Net(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            x -= x.mean(0)
            x.div_(x.std(0) + 0.1)
            return super().forward(x)

    def net(self, config: Any) -> nn.Module:
        return self.Net(nn.Linear(FEATURES, 5), nn.Tanh(), nn.Linear(5, 1))


class FreezesMidway(Program):
    """From its sixth step on the first layer is frozen."""

    def model(self, config: Any) -> nn.Module:
        model = super().model(config)
        model.steps = 0
        return model

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        if model.training:
            model.steps += 1
            if model.steps == 6:
                model[0].requires_grad_(False)
        return super().loss(model, batch)


class Reinitialised(Program):
    """The last layer begins anew at the second epoch."""

    def model(self, config: Any) -> nn.Module:
        model = super().model(config)
        model.steps = 0
        return model

    def step(self, model: nn.Module, batch: Any, optimizer: Any) -> Tensor:
        model.steps += 1
        if model.steps == 5:
            model[2].reset_parameters()
        return super().step(model, batch, optimizer)


class Groups(Program):
    """Two groups of parameters and a cosine as a LambdaLR, stepped by step."""

    scheduler_interval = "step"

    def optimizer(self, model: nn.Module, config: Any) -> Any:
        biases = [p for name, p in model.named_parameters() if name.endswith("bias")]
        weights = [p for name, p in model.named_parameters() if name.endswith("weight")]
        groups = [{"params": weights, "weight_decay": 0.1}, {"params": biases, "lr": 2 * config["lr"]}]
        return torch.optim.AdamW(groups, lr=config["lr"], weight_decay=0)

    def scheduler(self, optimizer: Any, config: Any) -> Any:
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5 * (1 + math.cos(math.pi * step / 12)))


class RateInStep(Program):
    """Sets the learning rate by hand in the step, as older scripts do."""

    def model(self, config: Any) -> nn.Module:
        model = super().model(config)
        model.steps = 0
        return model

    def step(self, model: nn.Module, batch: Any, optimizer: Any, config: Any) -> Tensor:
        model.steps += 1
        for group in optimizer.param_groups:
            group["lr"] = config["lr"] * min(1.0, model.steps / 4)
        return super().step(model, batch, optimizer)


class QuasiNewton(Program):
    """LBFGS with a closure."""

    def optimizer(self, model: nn.Module, config: Any) -> Any:
        return torch.optim.LBFGS(model.parameters(), lr=config["lr"], max_iter=2)

    def step(self, model: nn.Module, batch: Any, optimizer: Any) -> Tensor:
        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = self.loss(model, batch)
            loss.backward()
            return loss

        return optimizer.step(closure)


class TeacherStudent(Program):
    """Two networks in one module, two optimizers; the teacher's answers are the student's targets, too."""

    def net(self, config: Any) -> nn.Module:
        return nn.ModuleDict({"teacher": nn.Linear(FEATURES, 1), "student": nn.Linear(FEATURES, 1)})

    def optimizer(self, model: nn.Module, config: Any) -> Any:
        rates = {"teacher": config["lr"], "student": 2 * config["lr"]}
        return {part: torch.optim.SGD(model[part].parameters(), lr=rate) for part, rate in rates.items()}

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        return F.mse_loss(model["student"](batch[0]), batch[1])

    def step(self, model: nn.Module, batch: Any, optimizer: Any) -> Tensor:
        x, y = batch
        optimizer["teacher"].zero_grad()
        F.mse_loss(model["teacher"](x), y).backward()
        optimizer["teacher"].step()
        optimizer["student"].zero_grad()
        loss = self.loss(model, batch) + F.mse_loss(model["student"](x), model["teacher"](x).detach())
        loss.backward()
        optimizer["student"].step()
        return loss

    def metrics(self, model: nn.Module, batch: Any) -> Any:
        return {}


class DividesByZero(Program):
    """Raises where the rate is the largest, in its seventh step."""

    def model(self, config: Any) -> nn.Module:
        model = super().model(config)
        model.left = 7 if config["lr"] > 0.07 else 1000
        return model

    def step(self, model: nn.Module, batch: Any, optimizer: Any) -> Tensor:
        model.left -= 1
        if not model.left:
            raise ValueError("nothing left")
        return super().step(model, batch, optimizer)


class RaisesOnLargeLoss(Program):
    """Looks at the loss, and raises where it is above what it was at the start."""

    def model(self, config: Any) -> nn.Module:
        model = super().model(config)
        model.first = None
        return model

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        loss = super().loss(model, batch)
        if model.training:
            model.first = model.first or loss.item()
            if loss.item() > 1.5 * model.first:
                raise FloatingPointError("the loss has grown")
        return loss


class NotANumber(Program):
    """The loss of the trial with the largest rate is not a number from its sixth step on."""

    def model(self, config: Any) -> nn.Module:
        model = super().model(config)
        model.register_buffer("left", torch.tensor(5.0 if config["lr"] > 0.07 else 1e3, dtype=torch.float64))
        return model

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        if model.training:
            model.left -= 1
        return super().loss(model, batch) + 0 * model.left.sqrt().detach()
