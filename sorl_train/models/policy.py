"""Policy and critic: loaded from plain transformers folders, scored position by position."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from sorl_env.errors import UserError
from sorl_train.config.settings import ModelConfig
from sorl_train.models.attention import text_config
from sorl_train.models.forward import pick_device

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
