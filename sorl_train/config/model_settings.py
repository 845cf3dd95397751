"""Sections of ``TrainConfig`` about the model that is made and how it is trained on demonstrations."""

from __future__ import annotations

from dataclasses import dataclass

from sorl_train.config.field import opt


@dataclass(frozen=True)
class LoraConfig:
    """LoRA adapters (with the package peft) in place of training all weights."""

    rank: int = opt(0, "rank of the adapters; 0: no adapters, all weights are trained", low=0, high=65536)
    alpha: int = opt(32, "scale of the adapters: they are multiplied by alpha / rank", low=1)


@dataclass(frozen=True)
class TinyConfig:
    """Sizes of the policy that ``model: tiny`` builds for the task."""

    hidden_size: int = opt(96, "width of the hidden states", low=1, high=65536)
    num_layers: int = opt(3, "transformer blocks", low=1, high=65536)
    num_heads: int = opt(
        4, "attention heads; they split hidden_size into parts of even width", low=1, high=65536
    )


@dataclass(frozen=True)
class SftConfig:
    """Supervised fine-tuning on demonstrations: ``--stage sft``, and the cold start of ``model: tiny``."""

    demos: str | None = opt(
        None,
        "JSONL or Parquet file of trajectories or chat messages; None: the task's scripted expert plays them",
    )
    num_demos: int = opt(4000, "demonstrations that the expert plays", low=1)
    steps: int = opt(300, "optimizer steps", low=1)
    batch_size: int = opt(24, "demonstrations in one optimizer step", low=1)
    micro_batch_size: int = opt(24, "demonstrations in one forward pass", low=1)
    lr: float = opt(1e-5, "highest learning rate; it falls as a cosine to a tenth", above=0)
    warmup_ratio: float = opt(0.05, "share of the steps in which the rate rises", low=0, high=1)
    max_grad_norm: float = opt(1.0, "largest norm of the gradient", above=0)
