"""TRL: its loss and ours on the same tensors, its optimizer steps against our engine's, and whole runs with tools."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.utils.rnn import pad_sequence

from sorl_train.config.settings import TrainConfig
from sorl_train.learner.backend import TorchBackend
from sorl_train.learner.batch import Batch, collate
from sorl_train.learner.optimizer_step import Means
from sorl_train.learner.update import PolicyUpdate
from sorl_train.models.policy import load_policy
from sorl_train.plugins.objective import turn_ids_of

from ..conftest import short_config, weights_of
from ..learner.test_batch import trajectory
from .conftest import ToolPolicy

pytest.importorskip("trl", reason="TRL is not installed (pip install -e '.[interop]'); it needs Python 3.11")
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from sorl_train.plugins.trl import SorlGRPOTrainer, SorlOptions

LR = 3e-3


def length_reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """Varies within each group, whatever is sampled."""
    return [float(sum(ids) % 7) for ids in completion_ids]


def trainer_of(
    policy: ToolPolicy, folder: Path, kind: Any = SorlGRPOTrainer, tools: bool = True, **options: Any
) -> Any:
    sorl = {"sorl": options.pop("sorl", None)} if kind is SorlGRPOTrainer else {}
    dropout, lora = options.pop("dropout", 0.0), options.pop("peft_config", None)
    settings: dict[str, Any] = {
        "per_device_train_batch_size": 8,
        "num_generations": 4,
        "max_completion_length": 72,
        "learning_rate": LR,
        "lr_scheduler_type": "constant",
        "loss_type": "grpo",
        "max_steps": 2,
        "logging_steps": 1,
        "report_to": "none",
        "save_strategy": "no",
        "use_cpu": True,
        "disable_dropout": True,
        "max_tool_calling_iterations": 2,
        "bf16": False,
        "gradient_checkpointing": False,
    }
    return kind(
        model=AutoModelForCausalLM.from_pretrained(policy.folder, attention_dropout=dropout),
        processing_class=AutoTokenizer.from_pretrained(policy.folder),
        reward_funcs=length_reward,
        args=GRPOConfig(output_dir=str(folder), **(settings | options)),
        train_dataset=Dataset.from_list(policy.questions),
        tools=[policy.search] if tools else None,
        peft_config=lora,
        **sorl,
    )


class Keep(TrainerCallback):
    """Keeps the micro-batches of each generation as TRL made them."""

    def __init__(self) -> None:
        self.trainer: Any = None
        self.batches: list[list[dict[str, Any]]] = []

    def on_step_end(self, *_: Any, **__: Any) -> None:
        if not self.batches or self.batches[-1] is not self.trainer._buffered_inputs:
            self.batches.append(self.trainer._buffered_inputs)


def trained(
    policy: ToolPolicy, folder: Path, kind: Any = SorlGRPOTrainer, **options: Any
) -> tuple[Any, list[list[dict[str, Any]]]]:
    """A trainer after its steps, and the micro-batches of each generation."""
    trainer = trainer_of(policy, folder, kind, **options)
    keep = Keep()
    keep.trainer = trainer
    trainer.add_callback(keep)
    trainer.train()
    return trainer, keep.batches


OFF_POLICY = {"num_iterations": 2, "epsilon": 0.01, "adam_epsilon": 1e-5, "max_grad_norm": 0.5}
OURS = {
    "rollout__group_size": 4,
    "loss__clip_eps": 0.01,
    "optim__max_grad_norm": 0.5,
}  # the same in our words
IN_PIECES = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4}


def mask_of(micro: dict[str, Any]) -> torch.Tensor:
    mask: torch.Tensor = micro["completion_mask"] * micro["tool_mask"]
    return mask


@pytest.mark.slow
def test_a_run_with_tools_learns_from_several_turns(tool_policy: ToolPolicy, tmp_path: Path) -> None:
    trainer, batches = trained(tool_policy, tmp_path, **OFF_POLICY)
    assert max(int(turn_ids_of(mask_of(micro)).max()) for batch in batches for micro in batch) >= 1
    first, second = [line for line in trainer.state.log_history if "sorl/normalizer" in line]
    assert first["sorl/normalizer"] == 1.0 and first["sorl/ratio_mean"] == pytest.approx(1.0, abs=1e-4)
    assert second["sorl/normalizer"] < 1.0 and second["sorl/clip_frac"] > 0.0
    assert first["tools/call_frequency"] > 0.0
    assert trainer.optimizer.param_groups[0]["lr"] == LR  # scaled for single steps only
    _losses_agree(trainer, batches[0][0])


def _losses_agree(trainer: Any, inputs: dict[str, Any]) -> None:
    """TRL's own loss on the same trainer and tensors, which are off-policy and have several turns."""
    model = trainer.model
    trainer.beta = 0.1
    noise = torch.randn(inputs["old_per_token_logps"].shape, generator=torch.Generator().manual_seed(0))
    inputs = inputs | {"ref_per_token_logps": inputs["old_per_token_logps"] + 0.1 * noise}
    for loss_type in ("grpo", "bnpo", "dr_grpo", "dapo"):
        trainer.loss_type = loss_type
        losses = [trainer._compute_loss(model, inputs), GRPOTrainer._compute_loss(trainer, model, inputs)]
        ours, theirs = [torch.autograd.grad(loss, list(model.parameters())) for loss in losses]
        torch.testing.assert_close(*losses, atol=1e-6, rtol=0)
        for one, other in zip(ours, theirs, strict=True):
            torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-4)


def batch_of(micros: list[dict[str, Any]]) -> Batch:
    """TRL's micro-batches as one batch of our engine, whose rewards nothing reads."""
    found, old, advantages = [], [], []
    for number, (micro, row) in enumerate((m, i) for m in micros for i in range(len(m["prompt_ids"]))):
        one = {name: values[row] for name, values in micro.items() if values.ndim}
        prompt = one["prompt_ids"][one["prompt_mask"].bool()]
        here = one["completion_mask"].bool()
        ids = torch.cat([prompt, one["completion_ids"][here]])
        drawn = torch.cat([torch.zeros(len(prompt)), one["tool_mask"][here]])
        turns = turn_ids_of(drawn[None])[0]
        found.append(trajectory(str(number), ids.tolist(), turns.tolist(), [0.0] * (int(turns.max()) + 1)))
        old.append(torch.cat([torch.zeros(len(prompt)), one["old_per_token_logps"][here]])[1:])
        advantages.append(one["advantages"].expand(len(ids) - 1))
    batch = collate(found, classify=lambda t: np.zeros(len(t.token_ids), np.int8))
    scored = {"old_log_probs": pad_sequence(old, True), "advantages": pad_sequence(advantages, True)}
    return batch.with_fields(**{name: values * batch.action_mask for name, values in scored.items()})


def by_our_engine(
    policy: ToolPolicy, batch: Batch, config: TrainConfig, look: Batch | None = None
) -> tuple[Any, dict[str, float]]:
    """The model after two steps, and the means of their metrics."""
    model = load_policy(str(policy.folder), "cpu")
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, eps=1e-5, weight_decay=0.0)
    update = PolicyUpdate(TorchBackend(model, optimizer), config)
    update.begin_batch()
    means = Means()
    for _ in range(2):
        update.step(batch, LR, means)
    update.end_batch(batch if look is None else look, means)
    return model, means.result()


@pytest.mark.slow
def test_steps_are_those_of_our_engine(tool_policy: ToolPolicy, tmp_path: Path) -> None:
    trainer, batches = trained(
        tool_policy, tmp_path, sorl=SorlOptions("so_grpo", ratio="turn"), **IN_PIECES, **OFF_POLICY
    )
    assert len(batches) == 1 and len(batches[0]) == 4
    config = short_config(algo="so_grpo", loss__ratio="turn", **OURS)
    model, found = by_our_engine(tool_policy, batch_of(batches[0]), config)
    assert found["loss/normalizer"] < 1.0
    torch.testing.assert_close(weights_of(trainer.model), weights_of(model), atol=1e-5, rtol=0)


@pytest.mark.slow
def test_the_trust_region_is_that_of_our_engine(tool_policy: ToolPolicy, tmp_path: Path) -> None:
    trainer, batches = trained(
        tool_policy,
        tmp_path,
        sorl=SorlOptions("grpo", trust_kl=1e-4),
        save_strategy="steps",
        save_steps=2,
        **IN_PIECES,
        **OFF_POLICY,
    )
    line = [line for line in trainer.state.log_history if "sorl/trust_kl" in line][-1]
    assert line["sorl/trust_moves_back"] >= 1 and line["sorl/trust_scale"] < 1.0
    assert line["sorl/trust_kl"] <= 1e-4 < line["sorl/trust_kl_max"]
    saved = json.loads((tmp_path / "checkpoint-2" / "sorl_trust_region.json").read_text())
    assert saved["scale"] == trainer._trust.region.scale
    config = short_config(algo="grpo", update__trust_kl=1e-4, **OURS)
    look = batch_of(batches[0][:1])  # one of four micro-batches
    model, found = by_our_engine(tool_policy, batch_of(batches[0]), config, look)
    assert found["loss/trust_moves_back"] >= 1
    torch.testing.assert_close(weights_of(trainer.model), weights_of(model), atol=1e-5, rtol=0)
    trainer._trust._batch[0][0]["completion_mask"] = torch.zeros_like(batches[0][0]["completion_mask"])
    assert trainer._trust._kl() > 0.0  # of the next micro-batch, where TRL masks truncated completions
    resumed = trainer_of(tool_policy, tmp_path, sorl=SorlOptions("grpo", trust_kl=1e-4), **OFF_POLICY)
    resumed.create_optimizer_and_scheduler(2)
    resumed._load_optimizer_and_scheduler(str(tmp_path / "checkpoint-2"))
    assert resumed._trust.region.state_dict() == saved


@pytest.mark.slow
def test_the_trust_region_with_lora_pieces_epochs_and_a_resume(
    tool_policy: ToolPolicy, tmp_path: Path
) -> None:
    """Two generations of two optimizer steps each, in four pieces: killed between them, bit for bit as in one go."""
    options: dict[str, Any] = {
        "sorl": SorlOptions("grpo", trust_kl=1e-3),
        "tools": False,
        "max_completion_length": 8,
        "learning_rate": 0.1,
        "max_steps": 4,
        "save_strategy": "steps",
        "save_steps": 2,
        **IN_PIECES,
        **OFF_POLICY,
    }
    kept, logs = [], []
    for folder in ("straight", "resumed"):
        lora = LoraConfig(r=2, target_modules="all-linear")
        trainer = trainer_of(tool_policy, tmp_path / folder, peft_config=lora, **options)
        frozen = [(p, p.detach().clone()) for p in trainer.model.parameters() if not p.requires_grad]
        killed_at = None if folder == "straight" else str(tmp_path / "straight" / "checkpoint-2")
        trainer.train(resume_from_checkpoint=killed_at)
        assert len(trainer._trust.region._start) == sum(p.requires_grad for p in trainer.model.parameters())
        assert frozen and all(torch.equal(now, start) for now, start in frozen)
        kept.append([p.detach() for p in trainer.model.parameters() if p.requires_grad])
        logs.append([line for line in trainer.state.log_history if "sorl/trust_scale" in line])
    for one, other in zip(*kept, strict=True):
        assert torch.equal(one, other)
    names = [name for name in logs[0][-1] if name.startswith("sorl/")]
    assert [[line[name] for name in names] for line in logs[0]] == [
        [line[name] for name in names] for line in logs[1]
    ]
    moves = [line["sorl/trust_moves_back"] for line in logs[0]]
    assert len(moves) == 2 and moves[0] >= 1 and logs[0][-1]["sorl/trust_kl"] <= 1e-3


def test_dropout_is_no_kl_of_the_trust_region(tool_policy: ToolPolicy, tmp_path: Path) -> None:
    options = {"tools": False, "max_completion_length": 8, "dropout": 0.3, "disable_dropout": False}
    trainer, _ = trained(
        tool_policy, tmp_path, sorl=SorlOptions("grpo", trust_kl=1e-3), **options, **OFF_POLICY
    )
    kls = [line["sorl/trust_kl"] for line in trainer.state.log_history if "sorl/trust_kl" in line]
    assert kls and max(kls) <= 1e-3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"loss_type": "cispo"}, "loss_type='cispo': here it only chooses the mean"),
        ({"importance_sampling_level": "sequence"}, "the algorithm has its level"),
        ({"top_entropy_quantile": 0.5}, "top_entropy_quantile=0.5 changes TRL's own loss"),
        ({"off_policy_mask_threshold": 1.0}, "off_policy_mask_threshold=1.0 changes"),
        (
            {
                "sorl": SorlOptions("grpo", trust_kl=0.01),
                "steps_per_generation": 3,
                "gradient_accumulation_steps": 2,
            },
            "3 micro-batches .* do not go with gradient_accumulation_steps=2",
        ),
    ],
)
def test_options_that_would_do_nothing_are_refused(
    options: dict[str, Any], message: str, tool_policy: ToolPolicy, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=message):
        trainer_of(tool_policy, tmp_path, tools=False, **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"algorithm": "so_ppo"}, "has no critic; choose from grpo, gspo, so_grpo"),
        ({"algorithm": "rloo"}, "is not one that TRL's GRPOTrainer can run"),
        ({"trust_kl": 0.0}, "trust_kl must be above 0"),
        ({"trust_kl": 0.01, "trust_max_scale": 0.5}, "at least 1"),
        ({"trust_max_scale": 2.0}, "no effect without trust_kl"),
        ({"algorithm": "grpo", "clip_bias_delta": 0.5}, "no effect on 'grpo'"),
    ],
)
def test_mistakes(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SorlOptions(**options)
