"""The policy and the critic: loaded from and saved to plain transformers folders; and the sizes of a model.

The policy has LoRA adapters or none; the critic is a transformer with a scalar head.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers  # its classes are loaded where they are used: AutoModel takes .3 s, which a dry run can spare
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from sorl_env.errors import UserError
from sorl_train.config.run_settings import LoraConfig
from sorl_train.models import packing
from sorl_train.models.attention import text_config
from sorl_train.models.find_model import require_model
from sorl_train.models.forward import pick_device

LORA_FILE = "lora/adapters.safetensors"  # in a folder of its own: vLLM reads all safetensors of the policy's
# What transformers raises for a folder that is missing or damaged. RuntimeError includes RecursionError, which a
# deeply nested config.json raises.
LOADING_ERRORS = (OSError, ValueError, KeyError, TypeError, AttributeError, RuntimeError, SafetensorError)


def load_tokenizer(folder: str) -> Any:
    """The tokenizer of a model folder, with a pad token for batches. Raises ``UserError`` if none can be loaded."""
    require_model(folder)
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
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
    """A causal language model with float32 weights on a device (see ``pick_device``). With a ``lora.rank`` it has new
    LoRA adapters, and nothing else of it is trained. Raises ``UserError`` if no model can be loaded, torch lacks the
    device, or peft is needed and missing."""
    target = pick_device(device)
    model = load_weights(transformers.AutoModelForCausalLM, "model", folder)
    if lora.rank:
        model = _add_lora(model, lora)
    if gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.enable_input_require_grads()
    return model.to(target)


def load_weights(auto_class: Any, what: str, folder: str) -> Any:
    """A float32 model, with torch's fast attention if that computes what the model asks for; ``what`` names it."""
    require_model(folder)
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
        (folder / LORA_FILE).parent.mkdir()
        save_file(adapters, folder / LORA_FILE)


def load_adapters(model: Any, folder: Path) -> None:
    """Load the adapters that ``save_policy`` kept in ``folder`` into a model with LoRA layers."""
    unexpected = model.load_state_dict(load_file(folder / LORA_FILE), strict=False).unexpected_keys
    if unexpected:
        raise UserError(f"{folder / LORA_FILE} does not fit the model: it has {unexpected[0]}")


def _merged(model: Any) -> Any:
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
    return f"no {what} could be loaded from {folder!r}: {first_line}"


def _listing(folder: Path) -> str:
    names = sorted(p.name for p in folder.iterdir())
    return ", ".join(names[:8]) + (", .." if len(names) > 8 else "") if names else "nothing"


VALUE_HEAD_FILE = "value_head.safetensors"


class Critic(nn.Module):
    """Gives V(s_t), the value of the state in which token t + 1 is sampled."""

    def __init__(self, backbone: Any) -> None:
        super().__init__()
        self.backbone = backbone
        self.head = nn.Linear(text_config(backbone).hidden_size, 1, dtype=torch.float32)
        nn.init.zeros_(self.head.weight)  # V = 0 at first: advantages are the rewards themselves
        nn.init.zeros_(self.head.bias)

    def forward(self, token_ids: Tensor, mask: Tensor) -> Tensor:
        """Values of some states, in packed rows where that saves enough (``packing``). ``token_ids`` is (B, L); the
        bool ``mask`` (B, T), T = L - 1, has the tokens whose states are asked for. Returns (B, T) float32, 0 off the
        mask."""
        packed = packing.pack(token_ids, mask) if packing.uses_packing(self.backbone) else None
        if packed is None:
            inputs = {"input_ids": token_ids[:, :-1], "use_cache": False}
        else:
            inputs = packing.inputs(packed)
        hidden = self.backbone(**inputs).last_hidden_state
        # the 8 bits of bfloat16 are too coarse for values
        with torch.autocast(hidden.device.type, enabled=False):
            values = self.head(hidden.float()).squeeze(-1)
        return torch.where(mask, values if packed is None else values[0][packed.where], 0.0)

    def save(self, folder: Path) -> None:
        """Write a plain transformers folder with the head beside it."""
        self.backbone.save_pretrained(folder)
        head = {name: value.detach().cpu().contiguous() for name, value in self.head.state_dict().items()}
        save_file(head, folder / VALUE_HEAD_FILE)


def load_critic(folder: str, device: str = "auto", *, gradient_checkpointing: bool = False) -> Critic:
    """Load what ``Critic.save`` wrote, or put a new head on the backbone of any language model."""
    target = pick_device(device)
    critic = Critic(load_weights(transformers.AutoModel, "critic", folder))
    head = Path(folder) / VALUE_HEAD_FILE
    if head.is_file():
        critic.head.load_state_dict(load_file(head))
    if gradient_checkpointing:
        critic.backbone.gradient_checkpointing_enable({"use_reentrant": False})
    return critic.to(target)


@dataclass(frozen=True)
class ModelShape:
    """The sizes of a decoder-only transformer: ``parameters`` with and ``backbone_parameters`` without the output
    layer. Those of LoRA, or all, are ``trained``. Tensor parallelism cuts a model between its ``heads``."""

    parameters: int
    backbone_parameters: int
    trained: int
    layers: int
    hidden: int
    intermediate: int
    key_value_width: int
    vocabulary: int
    key_value_heads: int = 1
    heads: int = 1

    @property
    def critic_parameters(self) -> int:
        """Of a ``Critic`` with this backbone: its head has a weight for each hidden unit, and a bias."""
        return self.backbone_parameters + self.hidden + 1

    @property
    def block_width(self) -> int:
        """Elements that one block keeps for each token, for the backward pass."""
        return 12 * self.hidden + 4 * self.intermediate

    @property
    def scoring_width(self) -> int:
        """Elements that a forward pass without gradients needs at once for each token."""
        return 4 * self.hidden + 3 * self.intermediate


def model_shape(folder: str, lora_rank: int = 0) -> ModelShape:
    """The sizes of the model in a folder, from its configuration alone: on torch's meta device it has no storage.
    Raises ``UserError`` if the folder has no configuration that can be read."""
    require_model(folder)
    try:
        config = transformers.AutoConfig.from_pretrained(folder)
        with torch.device("meta"):
            policy = transformers.AutoModelForCausalLM.from_config(config)
            backbone = transformers.AutoModel.from_config(config)
    except LOADING_ERRORS as error:
        raise UserError(loading_failed("model configuration", folder, error)) from error
    config = config.get_text_config(decoder=True)  # of a model that also reads images
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    parameters = sum(p.numel() for p in policy.parameters())
    output = policy.get_output_embeddings()
    linear = [module for module in policy.modules() if isinstance(module, nn.Linear) and module is not output]
    adapters = sum(lora_rank * (layer.in_features + layer.out_features) for layer in linear)
    return ModelShape(
        parameters=parameters,
        backbone_parameters=sum(p.numel() for p in backbone.parameters()),
        trained=adapters if lora_rank else parameters,
        layers=config.num_hidden_layers,
        hidden=config.hidden_size,
        intermediate=getattr(config, "intermediate_size", None) or 4 * config.hidden_size,
        key_value_width=heads * head_dim,
        vocabulary=config.vocab_size,
        key_value_heads=heads,
        heads=config.num_attention_heads,
    )
