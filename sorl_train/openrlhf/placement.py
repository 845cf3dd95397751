"""Which GPUs train and which sample."""

from __future__ import annotations

from dataclasses import dataclass

from sorl_env.errors import UserError
from sorl_train.config.settings import TrainConfig


@dataclass(frozen=True)
class Placement:
    """``shared``: the same GPUs train and sample in turns. Otherwise vLLM has GPUs of its own (asynchronous)."""

    train_nodes: int
    train_gpus_per_node: int
    sample_gpus: int
    shared: bool

    @classmethod
    def of(cls, config: TrainConfig) -> Placement:
        """The placement that a config asks for.

        Raises:
            UserError: the GPUs do not come out even.
        """
        cluster = config.cluster
        total = cluster.nodes * cluster.gpus_per_node
        sample = cluster.vllm_engines * cluster.vllm_tensor_parallel
        engines = f"{cluster.vllm_engines} vLLM engines of {cluster.vllm_tensor_parallel} GPUs"
        gpus = f"{cluster.nodes} nodes of {cluster.gpus_per_node} GPUs"
        if not cluster.async_rollout:
            if sample != total:
                raise UserError(
                    f"{engines} take {sample} GPUs and {gpus} are {total}: training and sampling share the GPUs, so "
                    "cluster.vllm_engines x cluster.vllm_tensor_parallel has to be all of them"
                )
            return cls(cluster.nodes, cluster.gpus_per_node, sample, shared=True)
        left = total - sample
        if left < 1 or left % cluster.nodes:
            raise UserError(
                f"{engines} of their own leave {left} of {gpus} for training, which does not come out even: change "
                "cluster.vllm_engines or cluster.vllm_tensor_parallel"
            )
        return cls(cluster.nodes, left // cluster.nodes, sample, shared=False)

    @property
    def ranks(self) -> int:
        """Data-parallel ranks of the trainer."""
        return self.train_nodes * self.train_gpus_per_node

    @property
    def gpus(self) -> int:
        """All of them."""
        return self.ranks if self.shared else self.ranks + self.sample_gpus

    def micro_batch(self, wanted: int, batch: int) -> int:
        """The largest micro-batch of at most ``wanted`` rows that divides a rank's share of ``batch``."""
        share = max(1, batch // self.ranks)
        return next(size for size in range(min(wanted, share), 0, -1) if share % size == 0)
