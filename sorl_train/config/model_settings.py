"""Sections of ``TrainConfig`` about the model that is made and how it is trained on demonstrations."""

from __future__ import annotations

from typing import Annotated

from annotated_types import Le
from pydantic.dataclasses import dataclass

from sorl_train.config.field import SECTION_RULES, NonNegativeInt, PositiveFloat, PositiveInt, Share


@dataclass(frozen=True, config=SECTION_RULES)
class LoraConfig:
    """LoRA adapters (with the package peft) in place of training all weights."""

    rank: Annotated[NonNegativeInt, Le(65536)] = 0
    """Rank of the adapters; 0: no adapters, all weights are trained."""
    alpha: PositiveInt = 32
    """Scale of the adapters: they are multiplied by alpha / rank."""


@dataclass(frozen=True, config=SECTION_RULES)
class TinyConfig:
    """Sizes of the policy that ``model: tiny`` builds for the task."""

    hidden_size: Annotated[PositiveInt, Le(65536)] = 96
    """Width of the hidden states."""
    num_layers: Annotated[PositiveInt, Le(65536)] = 3
    """Transformer blocks."""
    num_heads: Annotated[PositiveInt, Le(65536)] = 4
    """Attention heads; they split hidden_size into parts of even width."""


@dataclass(frozen=True, config=SECTION_RULES)
class SftConfig:
    """Supervised fine-tuning on demonstrations: ``--stage sft``, and the cold start of ``model: tiny``."""

    demos: str | None = None
    """JSONL or Parquet file of trajectories or chat messages; None: the task's scripted expert plays them."""
    num_demos: PositiveInt = 4000
    """Demonstrations that the expert plays."""
    steps: PositiveInt = 300
    """Optimizer steps."""
    batch_size: PositiveInt = 24
    """Demonstrations in one optimizer step."""
    micro_batch_size: PositiveInt = 24
    """Demonstrations in one forward pass."""
    lr: PositiveFloat = 1e-5
    """Highest learning rate; it falls as a cosine to a tenth."""
    warmup_ratio: Share = 0.05
    """Share of the steps in which the rate rises."""
    max_grad_norm: PositiveFloat = 1.0
    """Largest norm of the gradient."""
