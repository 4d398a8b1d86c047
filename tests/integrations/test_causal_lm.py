"""The loss of language models without whole logits is the model's own, and is used only where that is shown."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from peft import AdaLoraConfig, LoraConfig, PromptTuningConfig, get_peft_model
from torch import Tensor, nn
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GraniteConfig,
    GraniteForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    MixtralConfig,
    MixtralForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    TrainingArguments,
)

import shoal
from shoal.integrations import causal_lm
from shoal.integrations.causal_lm import causal_lm_log_probs, causal_lm_loss, causal_lm_statistics, why_full_logits
from shoal.integrations.transformers import TrainerTask

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")

WORDS = 4096
SIZES: dict[str, Any] = {
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "pad_token_id": 0,
}
LORA: dict[str, Any] = {"task_type": "CAUSAL_LM", "target_modules": ["q_proj"], "init_lora_weights": False}


def llama(words: int = 48, **more: Any) -> Any:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(vocab_size=words, **SIZES, **more))


def small(model: Any, config: Any, **more: Any) -> Any:
    torch.manual_seed(0)
    return model(config(vocab_size=48, **{**SIZES, **more}))


MODELS: dict[str, tuple[Callable[[], Any], str | None]] = {
    "llama": (llama, None),
    "limited logits": (lambda: small(Gemma2ForCausalLM, Gemma2Config, final_logit_softcapping=0.05), None),
    "scaled logits": (lambda: small(GraniteForCausalLM, GraniteConfig, logits_scaling=0.1), None),
    "biases and tied weights": (
        lambda: GPT2LMHeadModel(GPT2Config(vocab_size=48, n_embd=8, n_layer=1, n_head=2)),
        None,
    ),
    "adapter": (lambda: get_peft_model(llama(), LoraConfig(**LORA, lora_dropout=0.1)), None),
    "experts": (lambda: small(MixtralForCausalLM, MixtralConfig), None),
    "experts with a loss of their own": (
        lambda: small(MixtralForCausalLM, MixtralConfig, output_router_logits=True),
        "adds to its loss",
    ),
    "another way to the backbone": (
        lambda: OPTForCausalLM(
            OPTConfig(vocab_size=48, hidden_size=8, num_hidden_layers=1, ffn_dim=8, num_attention_heads=2)
        ),
        "does not run backbone, head and loss once each",
    ),
    "no language model": (lambda: small(LlamaForSequenceClassification, LlamaConfig), "is no causal language model"),
    "adapter on the head": (
        lambda: get_peft_model(llama(), LoraConfig(**{**LORA, "target_modules": ["lm_head"]})),
        "is no plain nn.Linear",
    ),
    "head of each adapter": (
        lambda: get_peft_model(llama(), LoraConfig(**LORA, modules_to_save=["lm_head"])),
        "is no plain nn.Linear",
    ),
    "adapter with a loss of its own": (
        lambda: get_peft_model(llama(), AdaLoraConfig(**LORA, total_step=4)),
        "AdaLoraModel changes the forward pass",
    ),
    "prompt": (
        lambda: get_peft_model(llama(), PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)),
        "changes the forward pass",
    ),
    "invoked adapter": (
        lambda: get_peft_model(llama(), LoraConfig(**LORA, alora_invocation_tokens=[3])),
        "where tokens invoke it",
    ),
    "another loss": (lambda: _with_loss(llama(), lambda **given: given["logits"].mean()), "is not ForCausalLMLoss"),
    "float64": (lambda: llama().double(), "in float32"),
}


def _with_loss(model: Any, loss: Any) -> Any:
    model.loss_function = loss
    return model


def batch_of(words: int, rows: int = 3, tokens: int = 6, seed: int = 0) -> dict[str, Tensor]:
    ids = torch.randint(1, words, (rows, tokens), generator=torch.Generator().manual_seed(seed))
    labels = ids.clone()
    labels[0, :3] = -100
    labels[-1, -2:] = -100
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}


@pytest.mark.parametrize("name", MODELS)
def test_the_loss_is_the_models_own_where_nothing_stands_against_it(name: str) -> None:
    make, expected = MODELS[name]
    model = make()
    modes = [module.training for module in model.modules()]
    state = torch.get_rng_state()
    found = why_full_logits(model)
    assert torch.equal(state, torch.get_rng_state())
    assert [module.training for module in model.modules()] == modes
    if expected is not None:
        assert found is not None
        assert expected in found
        return
    assert found is None
    model.eval()
    for batch in (batch_of(48), {**batch_of(48), "num_items_in_batch": torch.tensor(23)}):
        torch.testing.assert_close(causal_lm_loss(model, batch), model(**batch).loss, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("change", ["hidden", "logits", "labels", "loss"])
def test_a_forward_that_does_more_is_found_out(change: str) -> None:
    class Changed(LlamaForCausalLM):
        def forward(self, input_ids: Any, attention_mask: Any = None, labels: Any = None, **more: Any) -> Any:  # type: ignore[override]
            hidden = self.model(input_ids=input_ids, attention_mask=attention_mask)[0]
            logits = self.lm_head(hidden * 1.1 if change == "hidden" else hidden)
            logits = logits.clamp(-50, 50) if change == "logits" else logits
            labels = labels.flip(1) if change == "labels" else labels
            loss = self.loss_function(logits, labels, self.config.vocab_size, **more)
            return {"loss": loss * 1.01 if change == "loss" else loss}

    Changed.__name__ = "LlamaForCausalLM"
    found = why_full_logits(Changed(LlamaConfig(vocab_size=48, **SIZES)))
    assert found is not None
    assert {"hidden": "hidden states", "logits": "logits", "labels": "other labels", "loss": "adds"}[change] in found


def test_a_model_that_cannot_run_two_tokens_keeps_its_own_forward() -> None:
    class Long(LlamaForCausalLM):
        def forward(self, input_ids: Any, **more: Any) -> Any:  # type: ignore[override]
            return super().forward(input_ids.view(-1, 3), **more)

    Long.__name__ = "LlamaForCausalLM"
    assert "does not run for two tokens" in (why_full_logits(Long(LlamaConfig(vocab_size=48, **SIZES))) or "")


def test_log_probs_and_statistics_of_shifted_labels() -> None:
    model, batch = llama(), batch_of(48)
    logits = model(batch["input_ids"]).logits[:, :-1]
    labels = batch["labels"][:, 1:]
    expected = logits.log_softmax(-1).gather(2, labels.clamp_min(0).unsqueeze(2)).squeeze(2) * (labels >= 0)
    found = causal_lm_log_probs(model, batch)
    torch.testing.assert_close(found[:, :-1], expected, rtol=1e-5, atol=1e-6)
    assert not found[:, -1].any()
    given = {"input_ids": batch["input_ids"], "shift_labels": causal_lm.shifted_labels(batch)}
    assert torch.equal(causal_lm_statistics(model, given).log_probs, found)


def adapted(config: Any = None) -> nn.Module:
    config = config or {}
    torch.manual_seed(1)
    settings = LoraConfig(**LORA, r=config.get("r", 2), lora_alpha=config.get("alpha", 4))
    return get_peft_model(llama(WORDS, use_cache=False), settings)


@pytest.mark.parametrize("ranks", [(2, 2), (2, 4)], ids=["equal ranks", "mixed ranks"])
def test_trials_of_a_trainer_task_take_tiles_and_lose_what_trainer_has(
    ranks: tuple[int, int], tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    args = TrainingArguments(str(tmp_path), use_cpu=True, report_to=[], per_device_train_batch_size=4)
    samples = [{name: value[0] for name, value in batch_of(WORDS, 1, 72, seed).items()} for seed in range(4)]
    task = TrainerTask(adapted, args, samples, samples[:2])
    batch = task.collate(samples)
    models = [task.model({"r": rank, "alpha": 4 * (b + 1)}) for b, rank in enumerate(ranks)]
    expected = []
    for model in models:
        model.zero_grad()
        loss = model(**batch).loss  # what Trainer trains by
        loss.backward()
        expected.append((loss.detach(), {n: p.grad.clone() for n, p in model.named_parameters() if p.requires_grad}))
        model.zero_grad()
    plain = copy.deepcopy(models[0])
    sizes = []
    scored = causal_lm.token_log_probs
    monkeypatch.setattr(causal_lm, "token_log_probs", lambda *a, **k: (sizes.append(a[0].shape), scored(*a, **k))[1])
    torch.testing.assert_close(task.loss(plain, batch), expected[0][0], rtol=1e-5, atol=1e-6)
    array = shoal.fuse(models, strict=False)
    losses = array.map(task.loss, batch)
    losses.sum().backward()
    assert sizes == [(4, 72, 8)] * 2  # alone, and of one member's shape in the array
    columns = {path: data.grad for path, data, _ in array.stacked_tensors()}
    for path, b, parameter in array.unfused_parameters():
        columns[path] = columns.get(path, {}) | {b: parameter.grad}
    for b, (loss, gradients) in enumerate(expected):
        torch.testing.assert_close(losses[b], loss, rtol=1e-5, atol=1e-6)
        for name, gradient in gradients.items():
            torch.testing.assert_close(columns[name][b], gradient, rtol=1e-4, atol=1e-7)


def test_few_logits_and_other_batches_keep_the_models_own_forward(tmp_path: Any) -> None:
    args = TrainingArguments(str(tmp_path), use_cpu=True, report_to=[], label_smoothing_factor=0.0)
    samples = [{name: value[0] for name, value in batch_of(WORDS, 1, 6).items()}]
    task = TrainerTask(adapted, args, samples, samples)
    model = task.model({})
    large = batch_of(WORDS, 4, 64)
    cases = {
        "large": (model, large, True),
        "few tokens": (model, batch_of(WORDS, 4, 63), False),
        "other inputs": (model, {**large, "inputs_embeds": None}, False),
        "trained head": (llama(WORDS), large, False),
        "small vocabulary": (llama(48), batch_of(48, 400, 64), False),
    }
    for name, (one, batch, wanted) in cases.items():
        causal_lm.mark_bounded(one)
        assert causal_lm.bounds_loss(one, batch) == wanted, name
