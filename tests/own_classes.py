"""A program of a user's, as a script or as the cells of a notebook: its task and its model are classes of `__main__`,
and read globals that it changes between two searches.
"""

CLASSES = """
import sys
import torch
import shoal
from torch.utils.data import TensorDataset

torch.set_num_threads(1)
N, SCALE = 640, 1.0


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))

    def forward(self, x):
        return SCALE * x + 0 * self.weight


class Sized(shoal.Task):
    def data(self, config):
        rows = TensorDataset(torch.full((4, 1), float(N)))
        return rows, rows

    def model(self, config):
        return Net()

    def optimizer(self, model, config):
        return torch.optim.SGD(model.parameters(), lr=config["lr"])

    def loss(self, model, batch):
        return model(batch[0]).mean()


class Own(shoal.Grid):
    def next_groups(self, free):
        seen.append(N)
        return super().next_groups(free)


seen = []
"""

SEARCH = """
def search(name, backend, task=None):
    return shoal.tune(
        task or Sized(), {"lr": shoal.grid([0.1])}, metric="valid_loss", mode="min", algorithm=Own(epochs=1),
        backend=backend, devices="cpu:1", directory=f"{folder}/{name}-{backend}", show_progress=False,
    )


def found(study):
    return study.best_trial.metrics["valid_loss"]


def check(backend):
    global N, SCALE
    N, SCALE = 640, 1.0
    one = torch.ones(1)
    own = sys.modules[Net.__module__]
    task = Sized()
    first = search("first", backend, task)
    model = first.best_model()
    assert found(first) == 640, found(first)
    assert type(model) is Net, "the caller's own class"
    assert isinstance(shoal.Study(first.directory).best_model(), Net), "whoever opens the study"
    N, SCALE = 6400, 10.0
    assert own.Sized.data.__globals__ is vars(own), "the class is as its user wrote it"
    assert own.Own.next_groups.__globals__ is vars(own), "and the algorithm's"
    assert set(seen) == {640}, "what the algorithm writes is the caller's"
    second = search("second", backend, task)
    assert set(seen) == {640, 6400}
    seen.clear()
    assert found(second) == 64000, found(second)
    assert second.best_model()(one).item() == 10
    assert first.best_model()(one).item() == 1, "what was recorded counts"
    assert model(one).item() == 10, "a model in hand is the caller's"
    assert second.best_model()(one).item() == 10
"""
