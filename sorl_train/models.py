"""Policy and critic: loaded from plain transformers folders, scored position by position."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer

from sorl_env.errors import UserError
from sorl_train.attention import text_config
from sorl_train.config import ModelConfig
from sorl_train.config_check import check_device
from sorl_train.log_probs import TokenStats, token_log_probs

VALUE_HEAD_FILE = "value_head.safetensors"
LORA_FILE = "lora.safetensors"
# of transformers, for a folder that is none or is damaged; a deeply nested config.json is a RecursionError
LOADING_ERRORS = (
    OSError,
    ValueError,
    KeyError,
    TypeError,
    AttributeError,
    RuntimeError,
    RecursionError,
    SafetensorError,
)


def pick_device(name: str) -> torch.device:
    """``auto`` is the first GPU if there is one."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    check_device(name)
    device = torch.device(name)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise UserError(f"device {name}: torch sees no CUDA device; use cpu")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise UserError(f"device {name}: torch sees {torch.cuda.device_count()} CUDA devices, counted from 0")
    return device


def compute_dtype(config: ModelConfig, device: torch.device) -> torch.dtype:
    """``auto`` is bfloat16 on a GPU and float32 on a CPU."""
    if config.dtype == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return {"float32": torch.float32, "bfloat16": torch.bfloat16}[config.dtype]


def autocast(config: ModelConfig, device: torch.device) -> AbstractContextManager[Any]:
    """Forward passes in the compute dtype. Weights stay in float32: at a learning rate of 1e-6 an update is lost in
    the 8 bits of bfloat16."""
    dtype = compute_dtype(config, device)
    if dtype == torch.float32:
        return nullcontext()
    return torch.autocast(device.type, dtype=dtype)


def load_tokenizer(folder: str) -> Any:
    """The tokenizer of a model folder, with a pad token for batches."""
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder)
    except Exception as error:
        if type(error) is not Exception and not isinstance(error, LOADING_ERRORS):
            raise  # a plain Exception is what the tokenizers library has for a damaged file
        raise UserError(_loading_failed("tokenizer", folder, error)) from error
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def load_policy(folder: str, config: ModelConfig) -> Any:
    """A causal language model with float32 weights on the device asked for, with LoRA adapters if asked for."""
    device = pick_device(config.device)
    model = _load_weights(AutoModelForCausalLM, "model", folder)
    if config.lora_rank:
        model = _add_lora(model, config)
    if config.gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.enable_input_require_grads()
    return model.to(device)


def _load_weights(auto_class: Any, what: str, folder: str) -> Any:
    """A float32 model with torch's fast attention, or with plain attention where only that one is right."""
    try:
        try:
            model = auto_class.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa")
        except ValueError:  # it has no other (GPT-OSS); this is raised before any weight is read
            model = auto_class.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    except LOADING_ERRORS as error:
        raise UserError(_loading_failed(what, folder, error)) from error
    if getattr(text_config(model), "attn_logit_softcapping", None):
        model.set_attn_implementation(
            "eager"
        )  # torch's has no cap on scores, and transformers 5.15 would take it
    return model


def _add_lora(model: Any, config: ModelConfig) -> Any:
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError as error:
        raise UserError("hardware.lora_rank needs peft: pip install peft") from error
    lora = LoraConfig(r=config.lora_rank, lora_alpha=config.lora_alpha, target_modules="all-linear")
    model = inject_adapter_in_model(lora, model)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora_" in name)
    return model


def save_policy(model: Any, tokenizer: Any, folder: Path) -> None:
    """A plain transformers folder; LoRA adapters are merged into the weights, and kept beside them for a resume."""
    adapters = {n: p.detach().cpu().contiguous() for n, p in model.named_parameters() if "lora_" in n}
    (_merged(model) if adapters else model).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    if adapters:
        save_file(adapters, folder / LORA_FILE)


def load_adapters(model: Any, folder: Path) -> None:
    """Put the adapters that ``save_policy`` kept in ``folder`` into a model that has LoRA layers."""
    adapters = load_file(folder / LORA_FILE)
    unexpected = model.load_state_dict(adapters, strict=False).unexpected_keys
    if unexpected:
        raise UserError(f"{folder / LORA_FILE} does not fit the model: it has {unexpected[0]}")


def _merged(model: Any) -> Any:
    """A copy with the adapters added to the weights and the LoRA layers gone."""
    from peft.tuners.lora import LoraLayer

    plain = copy.deepcopy(model)
    for name, layer in list(plain.named_modules()):
        if isinstance(layer, LoraLayer):
            layer.merge()
            parent, _, child = name.rpartition(".")
            setattr(plain.get_submodule(parent), child, layer.get_base_layer())
    return plain


def disable_dropout(model: nn.Module) -> None:
    """From now on the model computes in training what it computes in sampling: a ratio of the two is to tell how far
    the weights have moved, and nothing else."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name, value in vars(module).items():  # rates of functional dropout, noise at a router's input
            if ("drop" in name or "jitter" in name) and isinstance(value, float):
                setattr(module, name, 0.0)


def _loading_failed(what: str, folder: str, error: Exception) -> str:
    path = Path(folder)
    first_line = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    if path.is_dir():
        failed = f"no {what} could be loaded from the folder {folder} (it holds {_listing(path)})"
        return failed if first_line.rstrip().endswith(":") else f"{failed}: {first_line}"  # not half a list
    hint = "" if path.exists() else "; there is no such folder, and as a hub name it could not be fetched"
    return f"no {what} could be loaded from {folder!r}{hint}: {first_line}"


def _listing(folder: Path) -> str:
    names = sorted(p.name for p in folder.iterdir())
    return ", ".join(names[:8]) + (", .." if len(names) > 8 else "") if names else "nothing"


def action_stats(
    model: Any,
    token_ids: Tensor,
    mask: Tensor,
    *,
    temperature: float = 1.0,
    entropy: bool = False,
    logit_scale: bool = False,
) -> TokenStats:
    """Log-probabilities (and entropy, logit scale) of the masked tokens, as (B, T) with zeros elsewhere.

    Only the masked positions go through the vocabulary projection: observations and padding cost no logits. There is
    no attention mask because padding is on the right, where causal attention never looks.

    Args:
        token_ids: (B, L). mask: bool (B, T), T = L - 1.
    """
    logits = picked_logits(  # (N, V)
        model, lambda hidden: hidden[mask], {"input_ids": token_ids[:, :-1], "use_cache": False}
    )
    return logit_stats(
        logits, token_ids, mask, temperature=temperature, entropy=entropy, logit_scale=logit_scale
    )


def picked_logits(model: Any, pick: Callable[[Tensor], Tensor], inputs: dict[str, Any]) -> Tensor:
    """Logits (N, V) of the positions that ``pick`` takes out of the last hidden states: (B, L, H) -> (N, H).

    It is the model's own forward pass, with the hidden states of the other positions dropped before its output layer:
    whatever a model does to its logits (Granite divides them, Gemma 2 caps them) is done, and no others are computed.

    Args:
        inputs: the arguments of the model's forward pass.
    """

    def narrow(module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return pick(args[0])[None], *args[1:]

    hook = model.get_output_embeddings().register_forward_pre_hook(narrow)
    try:
        logits: Tensor = model(**inputs, return_dict=True).logits[0]
    finally:
        hook.remove()
    return logits


def logit_stats(
    logits: Tensor,
    token_ids: Tensor,
    mask: Tensor,
    *,
    temperature: float = 1.0,
    entropy: bool = False,
    logit_scale: bool = False,
) -> TokenStats:
    """As ``action_stats``, from the logits (N, V) of the N masked positions."""
    targets = token_ids[:, 1:][mask]  # (N,)
    stats = token_log_probs(
        logits[None], targets[None], temperature=temperature, entropy=entropy, logit_scale=logit_scale
    )

    def spread(values: Tensor | None) -> Tensor | None:
        if values is None:
            return None
        return torch.zeros(mask.shape, dtype=values.dtype, device=values.device).masked_scatter(
            mask, values[0]
        )

    log_probs = spread(stats.log_probs)
    assert log_probs is not None
    return TokenStats(
        log_probs=log_probs, entropy=spread(stats.entropy), logit_scale=spread(stats.logit_scale)
    )


class Critic(nn.Module):
    """A transformer with a scalar head: V(s_t), the value of the state in which token t + 1 is drawn."""

    def __init__(self, backbone: Any) -> None:
        super().__init__()
        self.backbone = backbone
        self.head = nn.Linear(text_config(backbone).hidden_size, 1, dtype=torch.float32)
        nn.init.zeros_(self.head.weight)  # starts at V = 0: the first advantages are the rewards themselves
        nn.init.zeros_(self.head.bias)

    def forward(self, token_ids: Tensor) -> Tensor:
        """token_ids (B, L) -> float32 values (B, T), T = L - 1."""
        hidden = self.backbone(input_ids=token_ids[:, :-1], use_cache=False).last_hidden_state
        with torch.autocast(hidden.device.type, enabled=False):  # values of 8 bits would be too coarse
            return self.head(hidden.float()).squeeze(-1)

    def save(self, folder: Path) -> None:
        """A plain transformers folder and the head beside it."""
        self.backbone.save_pretrained(folder)
        save_file(
            {k: v.detach().cpu().contiguous() for k, v in self.head.state_dict().items()},
            folder / VALUE_HEAD_FILE,
        )


def load_critic(folder: str, config: ModelConfig) -> Critic:
    """A critic from a folder written by ``Critic.save``, or a fresh head on any language model's backbone."""
    device = pick_device(config.device)
    critic = Critic(_load_weights(AutoModel, "critic", folder))
    head = Path(folder) / VALUE_HEAD_FILE
    if head.is_file():
        critic.head.load_state_dict(load_file(head))
    if config.gradient_checkpointing:
        critic.backbone.gradient_checkpointing_enable({"use_reentrant": False})
    return critic.to(device)
