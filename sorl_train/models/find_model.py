"""Whether there is a model under a name, asked before transformers is: it tries a hub that is out for half a minute."""

from __future__ import annotations

import re
from pathlib import Path

from sorl_env.errors import UserError, did_you_mean

_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
_TIMEOUT_S = 10.0


def is_hub_name(model: str) -> bool:
    """Whether a text is the name of a model on the hub, ``owner/name``, and no folder ``owner`` is here."""
    return bool(_HUB_NAME.fullmatch(model)) and not Path(model).parent.is_dir()


def no_model(model: str) -> str:
    """The message about a path without a model, with the most similar folders beside it."""
    path = Path(model).expanduser()
    if path.is_file():
        return f"{model} is a file; give the folder of a model, with its config.json."
    siblings = [entry.name for entry in path.parent.glob("[!.]*/")] if path.parent.is_dir() else []
    hint = did_you_mean(path.name, siblings) if siblings else f"There is no folder in {path.parent}."
    return f"there is no model at {model}. {hint} A name on the hub is written owner/name."


def require_model(model: str) -> None:
    """Raise ``UserError`` for a folder that does not exist, and for a hub name that is not in the cache and cannot be
    fetched."""
    if Path(model).is_dir():
        return
    if not is_hub_name(model):
        raise UserError(no_model(model))
    from huggingface_hub import HfApi, try_to_load_from_cache

    if isinstance(try_to_load_from_cache(model, "config.json"), str):
        return
    try:
        HfApi().model_info(model, timeout=_TIMEOUT_S)
    except Exception as error:  # errors of the hub and of two HTTP libraries have no base of their own
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise UserError(
            f"there is no folder {model}, and as a hub name it cannot be fetched: {reason}. Give the folder of a "
            "model on this machine; in a clone of sorl, 'make model' makes models/SmolLM2-135M-Instruct without the hub"
        ) from error
