"""Unmodified models of `transformers`, created from configurations without a download."""

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from looped_functions import in_loops
from optim_twins import same
from torch import Tensor, nn
from torch.utils.data import TensorDataset
from twins import build, check, close, compare, compare_state

import shoal
from shoal.core.demand import Profile
from shoal.fuse.api import fuse, stack
from shoal.fuse.array import ModelArray
from shoal.fuse.capture import CapturedStep
from shoal.fuse.optim.fused import FusedOptimizer, fuse_optimizers
from shoal.fuse.structure import structure_digest
from shoal.train import run

hf = pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("default")  # of the models, about themselves

GENERATOR = torch.Generator().manual_seed(0)
TOKENS = torch.randint(3, 50, (3, 7), generator=GENERATOR)
MASK = torch.ones(3, 7, dtype=torch.int64)
MASK[1, 4:] = 0
IMAGES = torch.randn(3, 3, 16, 16, dtype=torch.float64, generator=GENERATOR)
SOUND = torch.randn(3, 8, 20, dtype=torch.float64, generator=GENERATOR)
LABELS = torch.tensor([0, 1, 0])

BLOCKS = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
TEXT = {**BLOCKS, "vocab_size": 50, "max_position_embeddings": 32}
CAUSAL = {**TEXT, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
GROUPED = {**CAUSAL, "num_key_value_heads": 1}
VISION = {**BLOCKS, "image_size": 16, "patch_size": 8}


def classify(model: Any) -> tuple[Tensor, Tensor]:
    out = model(input_ids=TOKENS, attention_mask=MASK, labels=LABELS)
    return out.loss, out.logits


def fill_masks(model: Any) -> Tensor:
    return F.cross_entropy(model(input_ids=TOKENS, attention_mask=MASK).logits.flatten(0, 1), TOKENS.flatten())


def predict(model: Any) -> Tensor:
    """Next tokens; the models' own losses are computed in float32."""
    logits = model(input_ids=TOKENS, attention_mask=MASK, use_cache=False).logits
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), TOKENS[:, 1:].flatten())


def translate(model: Any) -> Tensor:
    target = TOKENS[:, :5]
    out = model(input_ids=TOKENS, attention_mask=MASK, decoder_input_ids=target, use_cache=False)
    return F.cross_entropy(out.logits.flatten(0, 1), target.flatten())


def recognise(model: Any) -> tuple[Tensor, Tensor]:
    out = model(pixel_values=IMAGES, labels=LABELS)
    return out.loss, out.logits


def embed(model: Any) -> Tensor:
    return model(input_ids=TOKENS, attention_mask=MASK).last_hidden_state


def match(model: Any) -> Tensor:
    return model(input_ids=TOKENS, attention_mask=MASK, pixel_values=IMAGES, return_loss=True).loss


def listen(model: Any) -> Tensor:
    return model(SOUND).last_hidden_state


@dataclass(frozen=True)
class Model:
    """How to make and run a model.

    Args:
        kind: class of the model.
        config: class of its configuration.
        fn: takes a model.
        settings: of the configuration; `rate` stands for that of dropout.
        rates: names of the rates of dropout among the settings.
    """

    kind: str
    config: str
    fn: Callable[[Any], Any]
    settings: dict[str, Any]
    rates: tuple[str, ...] = ()

    def make(self, rate: float = 0.0) -> nn.Module:
        config = getattr(hf, self.config)(**self.settings, **dict.fromkeys(self.rates, rate))
        kind = getattr(hf, self.kind, None) or hf.models.whisper.modeling_whisper.WhisperEncoder
        return kind(config)


ENCODER = ("hidden_dropout_prob", "attention_probs_dropout_prob")
GPT2 = {"vocab_size": 50, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 32}
DISTIL = {"vocab_size": 50, "dim": 16, "n_layers": 2, "n_heads": 2, "hidden_dim": 32, "max_position_embeddings": 32}
T5 = {"vocab_size": 50, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2}
OPT = {"ffn_dim": 32, "word_embed_proj_dim": 16}
BART = {"vocab_size": 50, "d_model": 16, "max_position_embeddings": 32}
LAYERS = {
    f"{side}_{name}": value
    for side in ("encoder", "decoder")
    for name, value in (("layers", 2), ("attention_heads", 2), ("ffn_dim", 32))
}
WHISPER = {"d_model": 16, "num_mel_bins": 8, "max_source_positions": 10}
RESNET = {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 2], "layer_type": "basic"}
CONVNEXT = {"hidden_sizes": [8, 16], "depths": [1, 1], "num_stages": 2}
SWIN = {"image_size": 16, "patch_size": 2, "embed_dim": 8, "depths": [2, 1], "num_heads": [2, 2], "window_size": 4}
CLIP = {"text_config": CAUSAL, "vision_config": VISION, "projection_dim": 8}
BEIT = {**VISION, "vocab_size": 50, "use_relative_position_bias": True, "drop_path_rate": 0.0}
REGNET = {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "groups_width": 4}

MODELS = {
    "BERT": Model("BertForSequenceClassification", "BertConfig", classify, TEXT, ENCODER),
    "BERT, masked": Model("BertForMaskedLM", "BertConfig", fill_masks, TEXT, ENCODER),
    "RoBERTa": Model("RobertaForSequenceClassification", "RobertaConfig", classify, CAUSAL, ENCODER),
    "DistilBERT": Model(
        *("DistilBertForSequenceClassification", "DistilBertConfig", classify, DISTIL),
        ("dropout", "attention_dropout", "seq_classif_dropout"),
    ),
    "ALBERT": Model(
        *("AlbertForSequenceClassification", "AlbertConfig", classify, {**TEXT, "embedding_size": 8}),
        (*ENCODER, "classifier_dropout_prob"),
    ),
    "GPT-NeoX": Model("GPTNeoXForCausalLM", "GPTNeoXConfig", predict, CAUSAL, ("attention_dropout", "hidden_dropout")),
    "GPT-2": Model("GPT2LMHeadModel", "GPT2Config", predict, GPT2, ("resid_pdrop", "embd_pdrop", "attn_pdrop")),
    "OPT": Model("OPTForCausalLM", "OPTConfig", predict, {**CAUSAL, **OPT}, ("dropout",)),
    "Llama": Model("LlamaForCausalLM", "LlamaConfig", predict, GROUPED, ("attention_dropout",)),
    "Mistral": Model("MistralForCausalLM", "MistralConfig", predict, {**GROUPED, "sliding_window": 4}),
    "Qwen2": Model("Qwen2ForCausalLM", "Qwen2Config", predict, GROUPED),
    "Qwen3": Model("Qwen3ForCausalLM", "Qwen3Config", predict, {**GROUPED, "head_dim": 8}),
    "Gemma2": Model("Gemma2ForCausalLM", "Gemma2Config", predict, {**GROUPED, "head_dim": 8}),
    "Phi3": Model("Phi3ForCausalLM", "Phi3Config", predict, GROUPED),
    "T5": Model("T5ForConditionalGeneration", "T5Config", translate, T5, ("dropout_rate",)),
    "BART": Model("BartForConditionalGeneration", "BartConfig", translate, {**BART, **LAYERS}, ("dropout",)),
    "Whisper encoder": Model("WhisperEncoder", "WhisperConfig", listen, {**WHISPER, **LAYERS}, ("dropout",)),
    "CLIP text": Model("CLIPTextModel", "CLIPTextConfig", embed, {**CAUSAL, "projection_dim": 8}),
    "CLIP": Model("CLIPModel", "CLIPConfig", match, CLIP),
    "ViT": Model("ViTForImageClassification", "ViTConfig", recognise, VISION, ENCODER),
    "DeiT": Model("DeiTForImageClassification", "DeiTConfig", recognise, VISION, ENCODER),
    "BEiT": Model("BeitForImageClassification", "BeitConfig", recognise, BEIT, ENCODER),
    "DINOv2": Model("Dinov2ForImageClassification", "Dinov2Config", recognise, VISION, ENCODER),
    "Swin": Model(
        *("SwinForImageClassification", "SwinConfig", recognise, {**SWIN, "drop_path_rate": 0.0}, ENCODER),
    ),
    "ConvNeXt": Model("ConvNextForImageClassification", "ConvNextConfig", recognise, CONVNEXT),
    "ResNet": Model("ResNetForImageClassification", "ResNetConfig", recognise, RESNET),
    "RegNet": Model("RegNetForImageClassification", "RegNetConfig", recognise, REGNET),
    "MobileNetV2": Model(
        *("MobileNetV2ForImageClassification", "MobileNetV2Config", recognise),
        *({"image_size": 16, "depth_multiplier": 0.1}, ("classifier_dropout_prob",)),
    ),
}
"""Each runs for all members at once, every function of it by a rule."""


@pytest.mark.in_turns(7)
@pytest.mark.parametrize("name", MODELS)
def test_three_steps(name: str) -> None:
    """Of AdamW, whose ε keeps it from making a full step of a gradient that is zero but for rounding."""
    model = MODELS[name]
    models, twins = build(model.make, 2), build(model.make, 2)
    own, alone = (
        [
            torch.optim.AdamW(m.parameters(), lr=0.01 * (b + 1), eps=1e-3, weight_decay=0.1 * b)
            for b, m in enumerate(side)
        ]
        for side in (models, twins)
    )
    array = fuse(models)
    optimizer = fuse_optimizers(own, array)
    for _ in range(3):
        optimizer.zero_grad()
        with in_loops() as found:
            losses = array.map(partial(_loss, model.fn))
            losses.sum().backward()
        assert not found
        optimizer.step()
        for b, twin in enumerate(twins):
            alone[b].zero_grad()
            loss = _loss(model.fn, twin)
            close(losses[b], loss, f"loss of {b}")
            loss.backward()
            alone[b].step()
    compare_state(array, twins)
    for member, twin in zip(array.unfuse(), twins, strict=True):
        for (path, mine), other in zip(member.named_parameters(), twin.parameters(), strict=True):
            close(mine, other, path)


def _loss(fn: Callable[[Any], Any], model: nn.Module) -> Tensor:
    result = fn(model)
    result = result[0] if isinstance(result, tuple) else result
    return result if result.dim() == 0 else result.square().mean()


@pytest.mark.in_turns
@pytest.mark.parametrize("name", [name for name, model in MODELS.items() if model.rates])
def test_dropout_is_that_of_the_same_member_fused_alone(name: str) -> None:
    model = MODELS[name]
    make = partial(model.make, 0.3)
    array = fuse(build(make, 3), seeds=[5, 6, 7])
    singles = [fuse([member], seeds=[5 + b]) for b, member in enumerate(build(make, 3))]
    for _ in range(2):
        losses = array.map(partial(_loss, model.fn))
        losses.sum().backward()
        for b, single in enumerate(singles):
            loss = single.map(partial(_loss, model.fn))
            close(losses[b], loss[0], f"loss of {b}")
            loss.sum().backward()
    without = fuse(build(model.make, 3)).map(partial(_loss, model.fn))
    assert not torch.isclose(losses, without, rtol=1e-6, atol=0).any(), "nothing was dropped"
    for b, single in enumerate(singles):
        for (path, mine), other in zip(array.stacked.named_parameters(), single.stacked.parameters(), strict=True):
            if other.grad is not None:
                close(mine.grad[b], other.grad[0], f"gradient of {path} of {b}")


def test_whole_outputs_are_refused_at_first() -> None:
    model = MODELS["BERT"]
    check(
        *(model.make, TOKENS),
        fn=lambda m, tokens: dict(m(tokens, output_hidden_states=True, output_attentions=True)),
        members=2,
        refused=True,  # the first call registers hooks that capture these outputs
    )


@pytest.mark.parametrize(("name", "scale"), [("BERT", 1.0), ("ResNet", 1e-4)])
def test_evaluation(name: str, scale: float) -> None:
    """Untrained statistics let what a ResNet gives grow to thousands, and rounding with it."""
    model = MODELS[name]
    check(lambda: model.make(0.5).eval(), fn=lambda m: _loss(model.fn, m) * scale, members=2, steps=1)


def test_one_batch_each() -> None:
    """Tokens, masks and labels of the members' own."""
    model = MODELS["BERT"]
    models, twins = build(model.make, 3), build(model.make, 3)
    tokens = torch.randint(3, 50, (3, 4, 6), generator=torch.Generator().manual_seed(1))
    masks = torch.ones_like(tokens)
    masks[0, 2, 2:] = masks[1, 0, 3:] = masks[2, 3, 1:] = 0  # the model asks whether anything is masked
    labels = torch.randint(0, 2, (3, 4), generator=torch.Generator().manual_seed(2))

    def run(model: Any, tokens: Tensor, mask: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        out = model(input_ids=tokens, attention_mask=mask, labels=labels)
        return out.loss, out.logits

    array = fuse(models)
    with in_loops() as found:
        result = array.map(run, *map(stack, (tokens, masks, labels)))
    compare(result, [run(twin, *own) for twin, *own in zip(twins, tokens, masks, labels, strict=True)])
    assert not found


IN_FLOAT32 = {
    "GPT-NeoX, its own loss": (
        MODELS["GPT-NeoX"].make,
        lambda model: model(input_ids=TOKENS, labels=TOKENS).loss,
    ),
    "DeBERTa v2": (
        Model(
            *("DebertaV2ForSequenceClassification", "DebertaV2Config", classify),
            {**TEXT, "relative_attention": True, "pos_att_type": ["c2p", "p2c"]},
            (*ENCODER, "pooler_dropout"),
        ).make,
        classify,
    ),
    "Mamba": (
        Model(
            *("MambaForCausalLM", "MambaConfig", predict),
            {"vocab_size": 50, "hidden_size": 16, "num_hidden_layers": 2, "state_size": 4, "time_step_rank": 4},
        ).make,
        predict,
    ),
}


@pytest.mark.in_turns(3)
@pytest.mark.parametrize("name", IN_FLOAT32)
def test_what_is_computed_in_float32_agrees_to_its_accuracy(name: str) -> None:
    make, fn = IN_FLOAT32[name]
    with in_loops() as found:
        check(make, fn=fn, members=2, steps=1, tolerance=1e-5)
    assert not found


REFUSED = {
    "custom autograd function": Model(
        *("BloomForCausalLM", "BloomConfig", predict),
        {"vocab_size": 50, "hidden_size": 16, "n_layer": 2, "n_head": 2},
        ("hidden_dropout", "attention_dropout"),
    ),
    "experts chosen by data": Model(
        *("MixtralForCausalLM", "MixtralConfig", predict),
        {**GROUPED, "num_local_experts": 4, "num_experts_per_tok": 1, "experts_implementation": "eager"},
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    model = REFUSED[name]
    check(model.make, fn=model.fn, members=5, refused=True)


@pytest.mark.thorough
def test_digests_are_the_same_in_every_process() -> None:
    """`hash` of a string is seeded anew in each, and some models keep one of their configuration."""
    script = """
import sys, warnings
warnings.simplefilter("ignore")
sys.path[:0] = sys.argv[1:]
from test_transformers_models import digests
print(hash("seed"), *digests().items(), sep="\\n")
"""
    command = [sys.executable, "-c", script, str(Path(__file__).parent), *sys.path]
    environment = os.environ | {"PYTHONHASHSEED": "1" if os.environ.get("PYTHONHASHSEED") != "1" else "2"}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    seed, *lines = done.stdout.splitlines()
    own = digests()
    assert seed != str(hash("seed"))
    assert lines == list(map(str, own.items()))
    assert len(set(own.values())) == len(MODELS) + len(REFUSED)


def digests() -> dict[str, str]:
    """Of all models."""
    with torch.device("meta"):
        return {name: structure_digest(model.make()) for name, model in {**MODELS, **REFUSED}.items()}


def of_text(model: Any, batch: Any) -> Tensor:
    tokens, labels = batch
    return F.cross_entropy(model(input_ids=tokens).logits, labels)


def of_image(model: Any, batch: Any) -> Tensor:
    images, labels = batch
    return F.cross_entropy(model(pixel_values=images).logits, labels)


CAPTURED: dict[str, tuple[Any, Any, Any]] = {
    "BERT": (replace(MODELS["BERT"], settings={**TEXT, "num_hidden_layers": 1}), of_text, (TOKENS, LABELS)),
    "ViT": (replace(MODELS["ViT"], settings={**VISION, "num_hidden_layers": 1}), of_image, (IMAGES, LABELS)),
    "ResNet": (MODELS["ResNet"], of_image, (IMAGES, LABELS)),
}
"""Of one layer, as tracing a second takes as long as the first."""


def trained_by_adamw(make: Any) -> tuple[ModelArray, FusedOptimizer]:
    """AdamW's ε keeps it from making a full step of a gradient that is zero but for rounding."""
    models = build(make, 2)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.01 * (b + 1), eps=1e-3) for b, m in enumerate(models)]
    array = fuse(models, [1, 2])
    return array, fuse_optimizers(optimizers, array)


def eager_step(array: ModelArray, optimizer: FusedOptimizer, loss: Any, batch: Any) -> Tensor:
    optimizer.zero_grad()
    losses = array.map(loss, batch)
    losses.sum().backward()
    optimizer.step()
    return losses.detach()


def steps_agree(name: str, compiling: bool) -> None:
    model, loss, batch = CAPTURED[name]
    make = partial(model.make, 0.2)
    array, optimizer = trained_by_adamw(make)
    twin, optimizer_of_twin = trained_by_adamw(make)
    for side in ((array, optimizer), (twin, optimizer_of_twin)):
        eager_step(*side, loss, batch)
    step = CapturedStep(array, optimizer, loss, batch, compiling=compiling)
    for shift in (1, 2):
        other = torch.utils._pytree.tree_map(lambda leaf, shift=shift: leaf.roll(shift, 0), batch)
        assert step.fits(other)
        torch.testing.assert_close(step(other), eager_step(twin, optimizer_of_twin, loss, other), rtol=1e-9, atol=0)
    for mine, other in zip(array.unfuse(), twin.unfuse(), strict=True):
        same(mine.state_dict(), other.state_dict(), 1e-9, "weights")


@pytest.mark.thorough
@pytest.mark.parametrize("name", CAPTURED)
def test_traced_steps(name: str) -> None:
    steps_agree(name, compiling=False)


@pytest.mark.slow
@pytest.mark.thorough
def test_a_compiled_step() -> None:
    steps_agree("BERT", compiling=True)


class Adapter(nn.Module):
    """Low-rank, on a frozen layer."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, 4, bias=False)
        self.up = nn.Linear(4, base.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + 2 * self.up(self.down(x))


def adapted(seed: int, attention: str, scale: float = 1.0) -> nn.Module:
    """A GPT-NeoX with adapters on its attention's projections, which `scale` multiplies."""
    torch.manual_seed(0)
    config = hf.GPTNeoXConfig(**{**CAUSAL, "hidden_size": 32}, attn_implementation=attention, attention_dropout=0.0)
    model = hf.GPTNeoXForCausalLM(config).requires_grad_(False)
    torch.manual_seed(1 + seed)
    for layer in model.gpt_neox.layers:
        layer.attention.query_key_value = Adapter(layer.attention.query_key_value)
        layer.attention.dense = Adapter(layer.attention.dense)
    with torch.no_grad():
        for parameter in trained(model.double()):
            parameter.mul_(scale)
    return model


def trained(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def next_token(model: Any, tokens: Tensor) -> Tensor:
    logits = model(input_ids=tokens, use_cache=False).logits
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def own_loss(model: Any, tokens: Tensor) -> Tensor:
    loss: Tensor = model(input_ids=tokens, labels=tokens, use_cache=False).loss
    return loss


def text(steps: int) -> Tensor:
    """Batches of tokens as unevenly frequent as words are, [steps, 8, 16]."""
    generator = torch.Generator().manual_seed(1)
    return torch.multinomial(1 / torch.arange(1, 48.0), steps * 8 * 16, True, generator=generator).view(-1, 8, 16) + 3


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(trained(model), lr=0.01)


ADAPTED = {
    "float64 throughout": (next_token, "sdpa", 1e-12),
    "softmax and loss in float32": (own_loss, "eager", 1e-5),
}
"""A loss, what computes attention, and how far gradients may be apart, relative to the largest: where the code of the
model rounds to float32 whatever its weights are, two sums that differ in the last bit of float64 may round apart.
"""


@pytest.mark.parametrize("name", ADAPTED)
def test_gradients_of_adapters_are_those_of_a_plain_loop_from_the_same_weights(name: str) -> None:
    """At each step of a training whose weights soon differ from those of any other run; see the next test."""
    loss, attention, tolerance = ADAPTED[name]
    array = fuse([adapted(b, attention) for b in range(2)])
    optimizer = fuse_optimizers([adam(model) for model in array.members], array)
    twins = [adapted(b, attention) for b in range(2)]
    stacked = {path: data for path, data, _ in array.stacked_tensors() if data.requires_grad}
    for tokens in text(4):
        with torch.no_grad():
            for b, twin in enumerate(twins):
                for path, parameter in twin.named_parameters():
                    if parameter.requires_grad:
                        parameter.grad = None
                        parameter.copy_(stacked[path][b])
        for twin in twins:
            loss(twin, tokens).backward()
        for model, twin in zip(array.members, twins, strict=True):
            loss(model, tokens).backward()
            check_gradients(model, twin, tolerance)
        optimizer.zero_grad()
        array.map(loss, tokens).sum().backward()
        for b, twin in enumerate(twins):
            for path, parameter in twin.named_parameters():
                if parameter.requires_grad:
                    close_to_largest(stacked[path].grad[b], parameter.grad, tolerance)
        optimizer.step()


def check_gradients(model: nn.Module, twin: nn.Module, tolerance: float) -> None:
    """Those of a member that ran by itself, which are dropped."""
    for mine, other in zip(trained(model), trained(twin), strict=True):
        close_to_largest(mine.grad, other.grad, tolerance)
        mine.grad = None


def close_to_largest(mine: Tensor, other: Tensor, tolerance: float) -> None:
    assert (mine - other).abs().max() <= tolerance * other.abs().max()


@pytest.mark.thorough
def test_a_training_of_adapters_is_as_far_from_a_plain_loop_as_the_loop_from_itself_with_other_last_bits() -> None:
    """At this learning rate training is chaotic: from step 30 on, what began as rounding grows tenfold in a few."""
    array = fuse([adapted(b, "sdpa") for b in range(2)])
    optimizer = fuse_optimizers([adam(model) for model in array.members], array)
    plain, other = ([adapted(b, "sdpa", scale) for b in range(2)] for scale in (1.0, 1 + 1e-14))
    optimizers = {id(model): adam(model) for model in (*plain, *other)}

    def step(model: nn.Module, tokens: Tensor) -> float:
        optimizers[id(model)].zero_grad()
        loss = next_token(model, tokens)
        loss.backward()
        optimizers[id(model)].step()
        return loss.item()

    drifts, own_drifts = [], []
    for tokens in text(60):
        optimizer.zero_grad()
        losses = array.map(next_token, tokens)
        losses.sum().backward()
        optimizer.step()
        wanted, perturbed = ([step(model, tokens) for model in side] for side in (plain, other))
        drifts.append(max(abs(a - b) for a, b in zip(losses.tolist(), wanted, strict=True)))
        own_drifts.append(max(abs(a - b) for a, b in zip(perturbed, wanted, strict=True)))
    assert max(drifts[:8]) < 1e-12
    assert max(own_drifts) > 1e-9, "the loop itself does not keep to 1e-9 of what it was"
    for number, drift in enumerate(drifts):
        assert drift <= 100 * max(own_drifts[: number + 10]) + 1e-12, f"step {number}"


class Classes(shoal.Task):
    """A BERT with dropout everywhere, attention included."""

    def data(self, config: Any) -> Any:
        tokens = torch.randint(3, 50, (24, 7), generator=torch.Generator().manual_seed(2))
        every = TensorDataset(tokens, (tokens.sum(1) % 2))
        return every, every

    def model(self, config: Any) -> nn.Module:
        return MODELS["BERT"].make(0.2).double()

    def optimizer(self, model: nn.Module, config: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=config["lr"], eps=1e-3)

    def loss(self, model: Any, batch: Any) -> Tensor:
        loss: Tensor = model(input_ids=batch[0], labels=batch[1]).loss
        return loss

    def batch_size(self, config: Any) -> int:
        return 8


def test_a_trial_of_a_study_is_a_plain_loop_that_draws_its_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fused and with `fuse=False`; the loop has the order and the random numbers by public names alone."""
    monkeypatch.setenv("SHOAL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(torch, "set_num_threads", lambda threads: None)  # one is fastest for a model this small
    pays = Profile({1: 1.0, 16: 1.0}, 3, 3, base_memory=10**8, member_memory=10**6, compute=1.0, cores=1.0)
    monkeypatch.setattr(run, "measure", lambda *given: pays)
    fused, alone = (
        shoal.tune(
            Classes(),
            {"lr": shoal.grid([0.001, 0.002])},
            metric="valid_loss",
            mode="min",
            algorithm=shoal.Grid(epochs=2),
            directory=tmp_path / str(fuse),
            devices="cpu:1",
            backend="inline",
            fuse=fuse,
            show_progress=False,
        ).trials
        for fuse in (True, False)
    )
    assert [len({row.job for row in rows}) for rows in (fused, alone)] == [1, 2]
    task = Classes()
    tokens, labels = task.data({})[0].tensors
    for row, own in zip(fused, alone, strict=True):
        torch.manual_seed(row.seed)
        model: Any = task.model(row.config)
        optimizer = task.optimizer(model.train(), row.config)
        for step in range(6):
            part = shoal.sample_order(row, step // 3, 24).split(8)[step % 3]
            optimizer.zero_grad()
            with shoal.randomness(row, step):
                model(input_ids=tokens[part], labels=labels[part]).loss.backward()
            optimizer.step()
        with torch.no_grad():
            loss = model.eval()(input_ids=tokens, labels=labels).loss.item()
        assert row.metrics["valid_loss"] == pytest.approx(loss, rel=1e-9)
        assert own.metrics["valid_loss"] == pytest.approx(loss, rel=1e-9)
