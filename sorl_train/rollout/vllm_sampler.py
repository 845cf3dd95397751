"""A sampler on vLLM for a policy that is trained on the same GPU: faster than ours for real models, not reproducible.

The engine runs in this process and is stepped from the event loop, so that trajectories come and go between two steps.
Its prefix cache keeps a trajectory's earlier turns. Weights are copied into it before each batch. Draws come from the
engine's own generator, not from a trajectory's seed: its batches differ from run to run anyway, and a generator for
each request costs time on a GPU and fails on a CPU.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from typing import Any

import torch

from sorl_env.errors import UserError
from sorl_env.rollout import SampledTurn, SamplingParams
from sorl_train.config.settings import TrainConfig
from sorl_train.models.forward import compute_dtype


class VllmSampler:
    """Implements ``sorl_env.rollout.Sampler``; see the module's docstring.

    Log-probabilities are those of the distribution drawn from: after the temperature and ``top_p``.

    Args:
        model: the trainer's policy; its weights are copied before each batch.
        folder: the model folder (or hub name) that vLLM builds the same model from.
        max_tokens: of a trajectory.

    Raises:
        UserError: vLLM is not installed, or refuses the model.
    """

    def __init__(self, model: Any, folder: str, max_tokens: int, config: TrainConfig) -> None:
        try:
            # in another process its weights would be out of reach
            os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
            from vllm import EngineArgs, LLMEngine
        except ImportError as error:
            raise UserError(
                "sampler.backend=vllm needs vLLM: pip install vllm, or use sampler.backend=transformers"
            ) from error
        device = next(model.parameters()).device
        args = EngineArgs(
            model=folder,
            dtype=str(compute_dtype(config.hardware, device)).removeprefix("torch."),
            max_model_len=max_tokens,
            max_num_seqs=config.sampler.max_concurrency,
            gpu_memory_utilization=config.sampler.gpu_memory,
            enable_prefix_caching=True,
            logprobs_mode="processed_logprobs",
            enforce_eager=device.type == "cpu",
            disable_log_stats=True,
            seed=config.seed,
        )
        try:
            self._engine = LLMEngine.from_engine_args(args)
        except (ValueError, RuntimeError, OSError) as error:
            raise UserError(
                f"vLLM cannot serve {folder} ({error}); sampler.backend=transformers takes any model"
            ) from error
        self.model = model
        self.policy_version = 0
        self._numbers = count()
        self._replies: dict[str, asyncio.Future[SampledTurn]] = {}  # by request
        self._requests: dict[str, str] = {}  # by session
        self._driver: asyncio.Task[None] | None = None

    @contextmanager
    def session(self) -> Iterator[VllmSampler]:
        """Around one batch: brings the newest weights and drops what is cached of older ones."""
        weights = [(name, parameter.detach()) for name, parameter in self.model.named_parameters()]
        with torch.inference_mode():
            self._engine.apply_model(lambda served: served.load_weights(weights) and None)
        if not self._engine.reset_prefix_cache():
            raise RuntimeError(
                "vLLM keeps keys and values of older weights: a request of a batch before still runs"
            )
        try:
            yield self
        finally:
            for session in list(self._requests):
                self.release(session)
            self._driver = None

    async def generate(self, session: str, token_ids: Sequence[int], params: SamplingParams) -> SampledTurn:
        """Draw one turn (see ``Sampler.generate``).

        Raises:
            ValueError: the session's last turn is still being drawn.
            asyncio.CancelledError: the trajectory was released meanwhile, or the session ended.
        """
        from vllm import SamplingParams as VllmParams
        from vllm.sampling_params import RequestOutputKind

        if self._requests.get(session) in self._replies:
            raise ValueError(f"session {session}: its last turn is still being drawn; await it first")
        request = f"{session}#{next(self._numbers)}"
        self._requests[session] = request
        reply = self._replies[request] = asyncio.get_running_loop().create_future()
        self._engine.add_request(
            request,
            {"prompt_token_ids": list(token_ids)},
            VllmParams(
                max_tokens=params.max_new_tokens,
                temperature=params.temperature,
                top_p=params.top_p if params.temperature else 1.0,
                stop=list(params.stop),
                include_stop_str_in_output=True,
                logprobs=0,  # of the drawn token alone
                output_kind=RequestOutputKind.FINAL_ONLY,
            ),
        )
        if self._driver is None or self._driver.done():
            self._driver = asyncio.ensure_future(self._drive())
        try:
            return await reply
        finally:
            self._abort(request)  # where it has not ended: the caller is cancelled, or the engine failed

    def release(self, session: str) -> None:
        """Forget the session; a turn that is still being drawn is cancelled."""
        request = self._requests.pop(session, None)
        if request is not None:
            self._abort(request)

    def _abort(self, request: str) -> None:
        """Give up a request that is still running, and tell who waits for it."""
        reply = self._replies.pop(request, None)
        if reply is None:
            return
        self._engine.abort_request([request])
        if not reply.done() and not reply.get_loop().is_closed():
            reply.cancel()

    async def _drive(self) -> None:
        """Step the engine until it has nothing to do; errors reach every caller that waits."""
        try:
            while self._engine.has_unfinished_requests():
                for output in self._engine.step():
                    reply = self._replies.pop(output.request_id, None)
                    if reply is not None and not reply.done():
                        reply.set_result(sampled_turn(output.outputs[0], self.policy_version))
                await asyncio.sleep(0)  # callers append the reply of a tool and come back
                await asyncio.sleep(0)
        except Exception as error:
            for reply in self._replies.values():
                if not reply.done():
                    reply.set_exception(error)
            raise


def sampled_turn(output: Any, policy_version: int) -> SampledTurn:
    """What vLLM drew for one request with ``logprobs``, as this project's record."""
    ids = list(output.token_ids)
    log_probs = [entry[token].logprob for token, entry in zip(ids, output.logprobs, strict=True)]
    if output.finish_reason == "length":
        return SampledTurn(ids, log_probs, "length", policy_version)
    stopped = isinstance(output.stop_reason, str)  # an end-of-text token has no reason, or its id
    return SampledTurn(ids, log_probs, "stop" if stopped else "eos", policy_version)
