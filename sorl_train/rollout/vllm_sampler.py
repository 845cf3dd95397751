"""A sampler with vLLM, on the GPU that trains the policy: faster than ``sampler.py`` for real models, not reproducible.

The engine runs in this process. The event loop steps it, so that trajectories come and go between two steps. Its prefix
cache keeps the earlier turns of a trajectory, and new weights are copied into it before each batch. Random numbers come
from the engine's own generator, not from the trajectory's seed: batches differ between runs anyway, and a generator
for each request costs time on a GPU and fails on a CPU.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from typing import Any

import torch

from sorl_env.errors import UserError, install_command
from sorl_env.rollout import SampledTurn, SamplingParams
from sorl_train.config.settings import SamplerConfig
from sorl_train.models.forward import compute_dtype


class VllmSampler:
    """Implements ``sorl_env.rollout.Sampler``; see the module's docstring. Log-probabilities are those of the
    distribution that is sampled from, after the temperature and ``top_p``, as in ``draw``. ``model`` is the trainer's
    policy, whose weights are copied before each batch; ``folder`` is the model folder or hub name from which vLLM
    builds the same model; ``max_tokens`` are those of the longest trajectory. Raises ``UserError`` if vLLM is not
    installed, or refuses the model."""

    def __init__(
        self, model: Any, folder: str, max_tokens: int, settings: SamplerConfig, *, dtype: str, seed: int
    ) -> None:
        try:
            # the weights of an engine in another process could not be replaced
            os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
            from vllm import EngineArgs, LLMEngine
        except ImportError as error:
            raise UserError(
                f"sampler.backend=vllm needs vLLM: {install_command('vllm')}, or use sampler.backend=transformers"
            ) from error
        device = next(model.parameters()).device
        args = EngineArgs(
            model=folder,
            dtype=str(compute_dtype(dtype, device)).removeprefix("torch."),
            max_model_len=max_tokens,
            max_num_seqs=settings.max_concurrency,
            gpu_memory_utilization=settings.gpu_memory,
            enable_prefix_caching=True,
            logprobs_mode="processed_logprobs",
            enforce_eager=device.type == "cpu",
            disable_log_stats=True,
            seed=seed,
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
        """Around one batch: loads the newest weights and drops what was cached with older ones."""
        weights = [(name, parameter.detach()) for name, parameter in self.model.named_parameters()]
        with torch.inference_mode():
            self._engine.apply_model(lambda served: served.load_weights(weights) and None)
        if not self._engine.reset_prefix_cache():
            raise RuntimeError(
                "vLLM cannot drop the keys and values of older weights: a request of an earlier batch still runs"
            )
        try:
            yield self
        finally:
            for session in list(self._requests):
                self.release(session)
            self._driver = None

    async def generate(self, session: str, token_ids: Sequence[int], params: SamplingParams) -> SampledTurn:
        """Sample one turn (see ``Sampler.generate``). Raises ``ValueError`` if the session's last turn is still being
        sampled, and ``asyncio.CancelledError`` if the trajectory was released meanwhile, or the session ended."""
        if self._requests.get(session) in self._replies:
            raise ValueError(f"session {session}: its last turn is still being sampled; await it first")
        request = f"{session}#{next(self._numbers)}"
        self._requests[session] = request
        reply = self._replies[request] = asyncio.get_running_loop().create_future()
        self._engine.add_request(request, {"prompt_token_ids": list(token_ids)}, vllm_params(params))
        if self._driver is None or self._driver.done():
            self._driver = asyncio.ensure_future(self._drive())
        try:
            return await reply
        finally:
            # does nothing for a finished one; else the caller was cancelled or vLLM failed
            self._abort(request)

    def release(self, session: str) -> None:
        """Forget the session; a turn that is still being sampled is cancelled."""
        request = self._requests.pop(session, None)
        if request is not None:
            self._abort(request)

    def _abort(self, request: str) -> None:
        reply = self._replies.pop(request, None)
        if reply is None:
            return
        self._engine.abort_request([request])
        if not reply.done() and not reply.get_loop().is_closed():
            reply.cancel()

    async def _drive(self) -> None:
        try:
            while self._engine.has_unfinished_requests():
                for output in self._engine.step():
                    reply = self._replies.pop(output.request_id, None)
                    if reply is not None and not reply.done():
                        reply.set_result(sampled_turn(output.outputs[0], self.policy_version))
                for _ in range(2):  # callers add a tool's reply and request their next turn
                    await asyncio.sleep(0)
        except Exception as error:
            for reply in self._replies.values():
                if not reply.done():
                    reply.set_exception(error)
            raise


def vllm_params(params: SamplingParams) -> Any:
    """vLLM's own parameters of one turn; nothing but temperature and ``top_p`` shapes the distribution."""
    from vllm import SamplingParams as VllmParams
    from vllm.sampling_params import RequestOutputKind

    return VllmParams(
        max_tokens=params.max_new_tokens,
        temperature=params.temperature,
        top_p=params.top_p if params.temperature else 1.0,
        stop=list(params.stop),
        stop_token_ids=list(params.stop_ids),
        include_stop_str_in_output=True,
        logprobs=0,  # only that of the sampled token
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def sampled_turn(output: Any, policy_version: int) -> SampledTurn:
    """The ``SampledTurn`` of one output of vLLM."""
    ids = list(output.token_ids)
    log_probs = [entry[token].logprob for token, entry in zip(ids, output.logprobs, strict=True)]
    if output.finish_reason == "length":
        return SampledTurn(ids, log_probs, "length", policy_version)
    stopped = isinstance(output.stop_reason, str)  # for an end-of-text token it is None, or the token's id
    return SampledTurn(ids, log_probs, "stop" if stopped else "eos", policy_version)
