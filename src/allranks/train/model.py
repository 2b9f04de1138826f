"""The frozen, quantised base with its adapter, and the tokenizer put right."""

from __future__ import annotations

import functools
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from allranks.config.schema import LoraConfig, RunConfig
from allranks.errors import UserError
from allranks.plan.plan import ProfileKind
from allranks.train.attention import Attention, choose_attention, fitting
from allranks.train.head import LossHead, loss_head

PRESETS: dict[str, tuple[str, ...]] = {
    "causal-lm": ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
    "sequence-classification": ("q_proj", "v_proj"),
}
"""`lora.target_modules: auto`, by task."""

COMPUTE_DTYPE = {"bf16": torch.bfloat16, "fp16": torch.float16, "no": torch.float32}

# Storage of the packed bytes that survives the profile (see docs/profiles.md): FSDP shards floating-point
# parameters only, and with an fp32 adapter beside bf16 storage it gathers raw bytes. ZeRO-3 likewise.
SAFE_STORAGE: dict[ProfileKind, str] = {
    "single": "uint8",
    "ddp": "uint8",
    "zero2": "uint8",
    "zero3": "bfloat16",
    "fsdp": "bfloat16",
}

_HUB_TIMEOUT_S = 10.0

# Tokens that model families reserve for padding; never seen as text.
_RESERVED_PADS = ("<|finetune_right_pad_id|>", "<pad>", "<|pad|>", "[PAD]", "<|endoftext|>", "<unk>")


@dataclass(frozen=True, kw_only=True)
class ModelParts:
    """A loaded model.

    Attributes:
        model: the PEFT model; the base is frozen, trained parameters are fp32.
        attention: its kernel.
        head: its loss.
        notes: what differs from what a user may expect, one line each.
    """

    model: Any
    attention: Attention
    head: LossHead
    notes: tuple[str, ...]


def load_tokenizer(config: RunConfig) -> tuple[Any, tuple[str, ...]]:
    """The tokenizer, with a padding token and right padding; and what was changed, said."""
    from transformers import AutoTokenizer

    own = config.model.tokenizer_name_or_path is None
    source = config.model.tokenizer_name_or_path or config.model.name_or_path
    revision = config.model.revision if own else None  # it names a version of the model's repository
    notes = []
    if config.model.revision is not None and Path(config.model.name_or_path).is_dir():
        notes.append(f"model.revision {config.model.revision!r} is ignored: {config.model.name_or_path} is a folder")
    _require_a_model(config.model.name_or_path)
    key = "model.name_or_path" if own else "model.tokenizer_name_or_path"
    unreachable = _hub_out_of_reach(source, revision)
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            source,
            revision=revision,
            trust_remote_code=config.model.trust_remote_code,
            local_files_only=unreachable is not None,
        )
    except (OSError, ValueError) as error:
        if unreachable is not None:
            raise _not_found(key, source, unreachable) from error
        raise UserError(
            f"model: no usable tokenizer at {source!r}: {_in_one_line(error)}\n"
            "    fix: name a hub id, or a folder with config.json and tokenizer.json, "
            "or set model.tokenizer_name_or_path"
        ) from error
    if tokenizer.pad_token is None:
        vocabulary = tokenizer.get_vocab()
        reserved = next((token for token in _RESERVED_PADS if token in vocabulary), None)
        tokenizer.pad_token = reserved if reserved is not None else tokenizer.eos_token
        notes.append(f"the tokenizer has no padding token: {tokenizer.pad_token!r} pads (masked by position)")
    if tokenizer.padding_side != "right":
        notes.append(f"the tokenizer pads on the {tokenizer.padding_side}: training pads on the right")
        tokenizer.padding_side = "right"
    return tokenizer, tuple(notes)


def model_max_length(config: RunConfig) -> int | None:
    """Tokens that the model takes at most, if its configuration says so."""
    from transformers import AutoConfig

    unreachable = _hub_out_of_reach(config.model.name_or_path, config.model.revision)
    try:
        found = AutoConfig.from_pretrained(
            config.model.name_or_path,
            revision=config.model.revision,
            trust_remote_code=config.model.trust_remote_code,
            local_files_only=unreachable is not None,
        )
    except (OSError, ValueError) as error:
        raise _no_model(config, unreachable, error) from error
    length = getattr(found, "max_position_embeddings", None)
    return int(length) if length is not None else None


def load_model(
    config: RunConfig,
    *,
    tokenizer: Any,
    profile: ProfileKind,
    precision: str,
    device: torch.device,
    num_labels: int | None,
) -> ModelParts:
    """Load and quantise the base on `device`, freeze it, and put a fresh adapter on it.

    Raises:
        UserError: no such model, targets that the model lacks, tokens that its embedding lacks.
    """
    notes: list[str] = []
    torch.manual_seed(config.training.seed)  # the same new head of a classifier on every rank
    base, attention = _load_base(config, profile=profile, precision=precision, device=device, num_labels=num_labels)
    attention = fitting(base, attention)
    notes += attention.words
    base.config.use_cache = False
    base.config.pad_token_id = tokenizer.pad_token_id
    extra_modules = _fit_vocabulary(base, tokenizer, config, notes)
    for parameter in base.parameters():
        parameter.requires_grad_(False)
    for module in base.modules():
        if type(module).__name__ == "Linear4bit":
            # On CPUs with AVX512-BF16, bitsandbytes otherwise repacks the weight in place at the first evaluation.
            module.support_avx512bf16_for_cpu = False
    model = _add_adapter(base, config, extra_modules)
    if config.training.gradient_checkpointing:
        layers = config.training.gradient_checkpointing_layers
        found = checkpoint_activations(model, layers)
        if layers is not None and layers >= found:
            notes.append(
                f"training.gradient_checkpointing_layers is {layers}, and the model has {found}: all recompute"
            )
    head = loss_head(
        base, config.training.loss_kernel, device=device, uniform=config.training.loss_reduction == "token"
    )
    return ModelParts(model=model, attention=attention, head=head, notes=(*notes, *head.words))


def checkpoint_activations(model: Any, layers: int | None = None) -> int:
    """Recompute activations in backward from here on; may be called at any time between two steps.

    Args:
        model: below or above its adapter.
        layers: of the first so many decoder layers; None: of all. The last ones are the ones to keep: their activations
            are gone when backward comes to the layers that recompute.

    Returns:
        How many layers there are.
    """
    from transformers.modeling_layers import GradientCheckpointingLayer

    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.enable_input_require_grads()
    found = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    for kept in found[layers:] if layers is not None else ():
        kept.gradient_checkpointing = False
    return len(found)


def _load_base(
    config: RunConfig, *, profile: ProfileKind, precision: str, device: torch.device, num_labels: int | None
) -> tuple[Any, Attention]:
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    dtype = COMPUTE_DTYPE[precision]
    unreachable = _hub_out_of_reach(config.model.name_or_path, config.model.revision)
    arguments: dict[str, Any] = {
        "revision": config.model.revision,
        "trust_remote_code": config.model.trust_remote_code,
        "dtype": dtype,
        "local_files_only": unreachable is not None,
    }
    if profile != "zero3":  # transformers refuses a map there: the engine moves what it spreads
        arguments["device_map"] = {"": device.index if device.type == "cuda" else "cpu"}
    if config.quantization.load_in_4bit:
        arguments["quantization_config"] = _quantization(config, profile, dtype)
    if config.model.task == "sequence-classification":
        factory: Any = AutoModelForSequenceClassification
        arguments["num_labels"] = num_labels
    else:
        factory = AutoModelForCausalLM
    unfit: dict[str, str] = {}
    while True:
        attention = choose_attention(config.model.attn_implementation, device, precision, unfit)
        kernel = attention.implementation
        try:
            return factory.from_pretrained(
                config.model.name_or_path, attn_implementation=kernel, **arguments
            ), attention
        except OSError as error:
            raise _no_model(config, unreachable, error) from error
        except (ValueError, ImportError) as error:
            if "ttention" in str(error) and kernel != "eager":
                unfit[kernel] = _in_one_line(error)
            elif isinstance(error, ValueError):
                raise _no_model(config, unreachable, error) from error
            else:
                raise


def _quantization(config: RunConfig, profile: ProfileKind, dtype: torch.dtype) -> Any:
    from transformers import BitsAndBytesConfig

    wanted = config.quantization
    storage = wanted.bnb_4bit_quant_storage
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type=wanted.bnb_4bit_quant_type,
        bnb_4bit_use_double_quant=wanted.bnb_4bit_use_double_quant,
        bnb_4bit_compute_dtype=dtype if wanted.bnb_4bit_compute_dtype == "auto" else wanted.bnb_4bit_compute_dtype,
        bnb_4bit_quant_storage=SAFE_STORAGE[profile] if storage == "auto" else storage,
    )


def _fit_vocabulary(base: Any, tokenizer: Any, config: RunConfig, notes: list[str]) -> list[str]:
    """Names of the modules that must be trained in full because the embedding grew; none otherwise."""
    rows = base.get_input_embeddings().num_embeddings
    if len(tokenizer) <= rows:
        return []
    if not config.model.resize_token_embeddings:
        raise UserError(
            f"model: the tokenizer has {len(tokenizer)} tokens and the model's embedding {rows} rows\n"
            "    fix: use the model's own tokenizer, or set model.resize_token_embeddings: true "
            "(the embedding is then trained and saved with the adapter)"
        )
    base.resize_token_embeddings(len(tokenizer))
    notes.append(f"embedding resized from {rows} to {len(tokenizer)} rows: it is trained and saved with the adapter")
    names = {id(base.get_input_embeddings()), id(base.get_output_embeddings())}
    return sorted({name.rsplit(".", 1)[-1] for name, module in base.named_modules() if id(module) in names})


def _add_adapter(base: Any, config: RunConfig, extra_modules: list[str]) -> Any:
    from peft import LoraConfig as PeftLoraConfig
    from peft import get_peft_model

    lora = config.lora
    wanted = sorted({*lora.modules_to_save, *extra_modules})
    tied = bool(getattr(base.config, "tie_word_embeddings", False)) and bool(extra_modules)
    peft_config = PeftLoraConfig(
        r=lora.r,
        lora_alpha=lora.lora_alpha if lora.lora_alpha is not None else 2 * lora.r,
        lora_dropout=lora.lora_dropout,
        target_modules=_targets(base, lora, config.model.task),
        modules_to_save=wanted or None,
        ensure_weight_tying=tied,
        use_rslora=lora.use_rslora,
        task_type="SEQ_CLS" if config.model.task == "sequence-classification" else "CAUSAL_LM",
    )
    torch.manual_seed(config.training.seed)  # the same adapter on every rank
    model = get_peft_model(base, peft_config)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
    return model


def _targets(base: Any, lora: LoraConfig, task: str) -> str | list[str]:
    if lora.target_modules == "all-linear":
        return "all-linear"
    wanted = list(PRESETS[task]) if lora.target_modules == "auto" else list(lora.target_modules)
    linear = sorted(
        {name.rsplit(".", 1)[-1] for name, module in base.named_modules() if isinstance(module, torch.nn.Linear)}
    )
    missing = [name for name in wanted if not any(full.split(".")[-1] == name for full in linear)]
    if missing:
        raise UserError(
            f"lora.target_modules: the model has no layer named {', '.join(missing)}\n"
            f"    valid: all-linear, {', '.join(linear)}\n"
            "    fix: name layers of this model, or set lora.target_modules: all-linear"
        )
    return wanted


def _require_a_model(name: str) -> None:
    if Path(name).is_dir() and not (Path(name) / "config.json").is_file():
        raise UserError(
            f"model.name_or_path: the folder {name} holds no model: there is no config.json in it\n"
            "    fix: name the folder into which the model was saved or downloaded, or a hub id"
        )


@functools.cache
def _hub_out_of_reach(name: str, revision: str | None) -> str | None:
    """Why the hub can't be asked about `name`; None if it answers, or if `name` is a folder.

    Asked once and without the minute of retries of the loaders: they then look into the cache alone.
    """
    if Path(name).is_dir():
        return None
    from huggingface_hub import get_hf_file_metadata, hf_hub_url
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, OfflineModeIsEnabled

    try:
        get_hf_file_metadata(hf_hub_url(name, "config.json", revision=revision), timeout=_HUB_TIMEOUT_S)
    except (HfHubHTTPError, HFValidationError):
        return None  # the loader says it better
    except OfflineModeIsEnabled:
        return "HF_HUB_OFFLINE is set"
    except Exception as error:  # of whichever HTTP library the hub's client uses
        return _in_one_line(error)
    return None


def _not_found(key: str, name: str, unreachable: str) -> UserError:
    return UserError(
        f"{key}: {name!r} is no folder here and not in the hub's cache, and the hub can't be asked: {unreachable}\n"
        "    fix: check the spelling of the id, and the network; or download it where there is one, with "
        f"`hf download {shlex.quote(name)}`"
    )


def _no_model(config: RunConfig, unreachable: str | None, error: Exception) -> UserError:
    name = config.model.name_or_path
    if unreachable is not None:
        return _not_found("model.name_or_path", name, unreachable)
    return UserError(f"model.name_or_path: {name!r}: {_in_one_line(error)}")


def _in_one_line(error: Exception) -> str:
    """The first line of a message, or all of it where that breaks off in mid-sentence."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0].strip() if lines[0].rstrip().endswith((".", "!", "?")) else " ".join(map(str.strip, lines))
