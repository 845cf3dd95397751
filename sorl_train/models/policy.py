"""The policy: loaded from and saved to plain transformers folders, with or without LoRA adapters."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from sorl_env.errors import UserError
from sorl_train.config.run_settings import LoraConfig
from sorl_train.models.attention import text_config
from sorl_train.models.forward import pick_device

LORA_FILE = "lora.safetensors"
# What transformers raises for a folder that is missing or damaged. RuntimeError includes RecursionError, which a
# deeply nested config.json raises.
LOADING_ERRORS = (OSError, ValueError, KeyError, TypeError, AttributeError, RuntimeError, SafetensorError)


def load_tokenizer(folder: str) -> Any:
    """The tokenizer of a model folder, with a pad token for batches. Raises ``UserError`` if none can be loaded."""
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder)
    except Exception as error:
        if type(error) is not Exception and not isinstance(error, LOADING_ERRORS):
            raise  # the tokenizers library raises a plain Exception for a damaged file
        raise UserError(loading_failed("tokenizer", folder, error)) from error
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def load_policy(
    folder: str,
    device: str = "auto",
    *,
    lora: LoraConfig = LoraConfig(),
    gradient_checkpointing: bool = False,
) -> Any:
    """A causal language model with float32 weights on a device (see ``pick_device``).

    With a ``lora.rank`` it has new LoRA adapters, and nothing else of it is trained.

    Raises:
        UserError: no model can be loaded, torch lacks the device, or peft is needed and missing.
    """
    target = pick_device(device)
    model = load_weights(AutoModelForCausalLM, "model", folder)
    if lora.rank:
        model = _add_lora(model, lora)
    if gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.enable_input_require_grads()
    return model.to(target)


def load_weights(auto_class: Any, what: str, folder: str) -> Any:
    """A float32 model, with torch's fast attention if that computes what the model asks for; ``what`` names it."""
    try:
        try:
            model = auto_class.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa")
        except ValueError:  # the model has plain attention alone (GPT-OSS); raised before any weight is read
            model = auto_class.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    except LOADING_ERRORS as error:
        raise UserError(loading_failed(what, folder, error)) from error
    if getattr(text_config(model), "attn_logit_softcapping", None):
        # torch's fast attention does not cap its scores, and transformers 5.15 would use it all the same
        model.set_attn_implementation("eager")
    return model


def _add_lora(model: Any, lora: LoraConfig) -> Any:
    try:
        import peft
    except ImportError as error:
        raise UserError("lora.rank needs peft: pip install peft") from error
    adapters = peft.LoraConfig(r=lora.rank, lora_alpha=lora.alpha, target_modules="all-linear")
    model = peft.inject_adapter_in_model(adapters, model)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora_" in name)
    return model


def save_policy(model: Any, tokenizer: Any, folder: Path) -> None:
    """Write a plain transformers folder. LoRA adapters are merged into the weights, and kept beside them to resume."""
    adapters = {n: p.detach().cpu().contiguous() for n, p in model.named_parameters() if "lora_" in n}
    (_merged(model) if adapters else model).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    if adapters:
        save_file(adapters, folder / LORA_FILE)


def load_adapters(model: Any, folder: Path) -> None:
    """Load the adapters that ``save_policy`` kept in ``folder`` into a model with LoRA layers."""
    unexpected = model.load_state_dict(load_file(folder / LORA_FILE), strict=False).unexpected_keys
    if unexpected:
        raise UserError(f"{folder / LORA_FILE} does not fit the model: it has {unexpected[0]}")


def _merged(model: Any) -> Any:
    """A copy without LoRA layers, whose weights have the adapters added."""
    from peft.tuners.lora import LoraLayer

    plain = copy.deepcopy(model)
    for name, layer in list(plain.named_modules()):
        if isinstance(layer, LoraLayer):
            layer.merge()
            parent, _, child = name.rpartition(".")
            setattr(plain.get_submodule(parent), child, layer.get_base_layer())
    return plain


def loading_failed(what: str, folder: str, error: Exception) -> str:
    """Why ``what`` could not be loaded, with what is in the folder."""
    path = Path(folder)
    first_line = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    if path.is_dir():
        failed = f"no {what} could be loaded from the folder {folder} (it holds {_listing(path)})"
        # a first line with a colon at its end begins a list, which one line cannot show
        return failed if first_line.rstrip().endswith(":") else f"{failed}: {first_line}"
    hint = "" if path.exists() else "; there is no such folder, and as a hub name it could not be fetched"
    return f"no {what} could be loaded from {folder!r}{hint}: {first_line}"


def _listing(folder: Path) -> str:
    names = sorted(p.name for p in folder.iterdir())
    return ", ".join(names[:8]) + (", .." if len(names) > 8 else "") if names else "nothing"
