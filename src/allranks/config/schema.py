"""The keys of `run.yaml`. Names are those of transformers, PEFT and bitsandbytes.

Every key carries its meaning, and its unit where it has one, in `description`: the reference
page and `allranks config show` print it. Unknown keys are refused (`extra="forbid"`).
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

MAX_COUNT = 2**31 - 1
"""The largest count that the libraries beneath take everywhere."""


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True, strict=True, allow_inf_nan=False)


class ModelConfig(_Section):
    """Which model is fine-tuned."""

    name_or_path: str = Field(min_length=1, description="Hub id or folder of the base model.")
    revision: str | None = Field(None, description="Branch, tag or commit of the model on the hub.")
    tokenizer_name_or_path: str | None = Field(None, description="Tokenizer, if it is not the model's own.")
    task: Literal["causal-lm", "sequence-classification"] = Field(
        "causal-lm", description="Head of the model, loss, and LoRA preset."
    )
    num_labels: int | None = Field(
        None, ge=2, le=MAX_COUNT, description="Classes of sequence-classification; default: found in the data."
    )
    trust_remote_code: bool = Field(False, description="Run Python code that comes with the model.")
    attn_implementation: Literal["auto", "flash_attention_3", "flash_attention_2", "varlen_attn", "sdpa", "eager"] = (
        Field(
            "sdpa",
            description="Attention kernel; auto takes the first that works of flash_attention_2, varlen_attn (the same "
            "kernel inside torch), sdpa and eager. The flash kernels and varlen_attn train without padding.",
        )
    )
    resize_token_embeddings: bool = Field(
        False,
        description="Add the tokenizer's extra tokens to the embedding; it is then trained and saved with the adapter.",
    )


class QuantizationConfig(_Section):
    """How the frozen base is stored: the fields of transformers' BitsAndBytesConfig."""

    load_in_4bit: bool = Field(True, description="Store linear layers in 4 bits; false keeps the model's own dtype.")
    bnb_4bit_quant_type: Literal["nf4", "fp4"] = Field("nf4", description="4-bit data type.")
    bnb_4bit_use_double_quant: bool = Field(True, description="Quantise the quantisation constants too.")
    bnb_4bit_compute_dtype: Literal["auto", "bfloat16", "float16", "float32"] = Field(
        "auto", description="Dtype of the matrix products; auto follows mixed_precision."
    )
    bnb_4bit_quant_storage: Literal["auto", "uint8", "bfloat16", "float32"] = Field(
        "auto", description="Dtype that holds the packed bytes; auto is the one that is safe under the profile."
    )


class LoraConfig(_Section):
    """The adapter: the fields of PEFT's LoraConfig."""

    r: int = Field(16, ge=1, le=MAX_COUNT, description="Rank of the adapter.")
    lora_alpha: float | None = Field(None, gt=0, description="Scaling numerator; default 2·r.")
    lora_dropout: float = Field(0.0, ge=0.0, lt=1.0, description="Dropout on the adapter's input.")
    target_modules: Literal["auto", "all-linear"] | list[str] = Field(
        "auto",
        description="Names of the adapted layers, or all-linear; auto is the preset of the task "
        "(seven projections for causal-lm, q_proj and v_proj for sequence-classification).",
    )
    modules_to_save: list[str] = Field(default_factory=list, description="Further modules trained in full.")
    use_rslora: bool = Field(False, description="Scale by alpha/sqrt(r) instead of alpha/r.")


class DataConfig(_Section):
    """Where the samples come from and how they become tokens."""

    train: str = Field(min_length=1, description="jsonl, csv or parquet file, folder saved by `datasets`, or hub id.")
    eval: str | None = Field(None, description="Evaluation set, of the same kinds; none: no evaluation.")
    train_split: str = Field("train", description="Split of a hub id or saved DatasetDict.")
    eval_split: str = Field("test", description="Split of the evaluation set, likewise.")
    format: Literal["auto", "prompt-completion", "chat", "text", "classification"] = Field(
        "auto", description="Kind of sample; auto looks at the columns."
    )
    prompt_column: str = Field("prompt", description="Column of the prompt.")
    completion_column: str = Field("completion", description="Column of the completion.")
    messages_column: str = Field("messages", description="Column of the chat messages.")
    text_column: str = Field("text", description="Column of plain text.")
    label_column: str = Field("label", description="Column of the class, for sequence-classification.")
    completion_only_loss: bool = Field(True, description="Loss on completions and assistant turns only.")
    max_length: Literal["auto"] | Annotated[int, Field(ge=8, le=MAX_COUNT)] = Field(
        "auto", description="Tokens per sample; auto is the 95th percentile of the training set."
    )
    max_length_cap: int = Field(4096, ge=8, le=MAX_COUNT, description="Hard cap on max_length, in tokens.")
    on_bad_sample: Literal["skip", "refuse"] = Field(
        "skip", description="Samples that are empty or have no target: skip and list them, or stop."
    )
    max_samples: int | None = Field(
        None, ge=1, le=MAX_COUNT, description="Use only the first so many training samples."
    )


class TrainingConfig(_Section):
    """Optimisation: the fields of transformers' TrainingArguments."""

    num_train_epochs: int = Field(1, ge=1, le=MAX_COUNT, description="Passes over the training set.")
    max_steps: int | None = Field(
        None, ge=1, le=MAX_COUNT, description="Stop after so many optimizer steps, whatever the epochs."
    )
    global_batch_size: int | None = Field(
        None, ge=1, le=MAX_COUNT, description="Samples of one optimizer step over all ranks; memory never changes it."
    )
    per_device_train_batch_size: int = Field(
        4, ge=1, le=MAX_COUNT, description="Initial cap on samples per micro-batch."
    )
    gradient_accumulation_steps: int | None = Field(
        None,
        ge=1,
        le=MAX_COUNT,
        description="Micro-steps per step at the first launch; default: 1, or what global_batch_size needs.",
    )
    max_tokens_per_micro_batch: int | None = Field(
        None,
        ge=8,
        le=MAX_COUNT,
        description="Cap on tokens (padding included) per micro-batch; default: no cap but the samples'.",
    )
    per_device_eval_batch_size: int | None = Field(
        None,
        ge=1,
        le=MAX_COUNT,
        description="Cap on samples per evaluation micro-batch; default: half the training cap.",
    )
    learning_rate: float = Field(2e-4, gt=0, description="Peak learning rate.")
    lr_scheduler_type: Literal["cosine", "linear", "constant"] = Field("cosine", description="Schedule after warm-up.")
    warmup_steps: int | None = Field(
        None, ge=0, le=MAX_COUNT, description="Steps of linear warm-up; default: 3 % of all steps."
    )
    weight_decay: float = Field(0.0, ge=0, description="AdamW's decoupled weight decay.")
    adam_beta1: float = Field(0.9, ge=0, lt=1, description="Decay of AdamW's first moment.")
    adam_beta2: float = Field(0.999, ge=0, lt=1, description="Decay of AdamW's second moment.")
    adam_epsilon: float = Field(1e-8, gt=0, description="AdamW's epsilon.")
    max_grad_norm: float = Field(1.0, ge=0, description="Clip the global gradient norm to this; 0: no clipping.")
    optim: Literal["adamw_torch_fused", "adamw_8bit", "paged_adamw_8bit"] = Field(
        "adamw_torch_fused", description="Optimizer; the 8-bit ones need a working bitsandbytes."
    )
    mixed_precision: Literal["auto", "bf16", "fp16", "no"] = Field(
        "auto", description="Compute dtype; auto follows the profile as far as the hardware goes."
    )
    gradient_checkpointing: bool = Field(True, description="Recompute activations in backward to save memory.")
    gradient_checkpointing_layers: int | None = Field(
        None,
        ge=1,
        le=MAX_COUNT,
        description="Recompute those of the first so many decoder layers only: faster, for more memory; null: of all.",
    )
    loss_reduction: Literal["token", "sample"] = Field(
        "token", description="Mean over the global batch's target tokens, or mean of per-sample means."
    )
    loss_kernel: Literal["auto", "liger", "torch", "chunked", "logits"] = Field(
        "auto",
        description="How the loss of a language model is computed: by a kernel that never holds whole logits "
        "(auto: the first of liger, torch and chunked that works here), or from logits.",
    )
    fit_cost: bool = Field(
        True,
        description="Fit what a token and a micro-batch cost to the first steps, for an even split over the ranks; "
        "false: the split depends on no measurement.",
    )
    group_by_length_window: int = Field(
        1,
        ge=1,
        le=MAX_COUNT,
        description="Steps inside which samples are grouped by length; 1 keeps the plain shuffled order.",
    )
    seed: int = Field(42, ge=0, lt=2**32, description="Seed of order, dropout and adapter initialisation.")
    logging_steps: int = Field(1, ge=1, le=MAX_COUNT, description="Steps between log lines.")
    eval_steps: int | None = Field(
        None, ge=1, le=MAX_COUNT, description="Steps between evaluations; default: only at the end."
    )
    eval_on_start: bool = Field(False, description="Evaluate before the first step too.")


def recomputes_all(training: TrainingConfig) -> bool:
    """No more activations could be recomputed than are."""
    return training.gradient_checkpointing and training.gradient_checkpointing_layers is None


class OomConfig(_Section):
    """What the ranks do together when one of them runs out of memory."""

    max_retries_per_step: int = Field(
        16, ge=0, le=MAX_COUNT, description="Retries of one global batch before the run stops."
    )
    max_skipped_samples: int = Field(
        0,
        ge=0,
        le=MAX_COUNT,
        description="Training samples that may be left out because not even one alone fits; 0: the first ends the run.",
    )
    grow_back: bool = Field(
        True, description="Let micro-batches that were made smaller grow again when every GPU has room for it."
    )
    memory_history: int = Field(
        0,
        ge=0,
        le=MAX_COUNT,
        description="Last allocations, with their Python stacks, in the snapshot of a first OOM; remembering them "
        "made a step of an 8B model 14 % longer. 0: the state of the memory alone, at no cost.",
    )
    max_respawns: int = Field(
        10,
        ge=0,
        le=MAX_COUNT,
        description="Restarts of all ranks from the last checkpoint that one cause may use up, in one launch; one that "
        "got no further counts double. 0: a dead rank ends the run.",
    )
    hang_timeout_s: float | None = Field(
        600.0,
        gt=0,
        description="Seconds without progress after which a rank is hung: the stacks of all are written, and all start "
        "again; null: never.",
    )
    stop_timeout_s: float = Field(
        60.0, gt=0, description="Seconds in which all ranks of fsdp and zero3 must have agreed to stop."
    )


class OutputConfig(_Section):
    """What is written, and where."""

    dir: str = Field(
        "runs",
        min_length=1,
        description="Folder that holds the run directories; a relative one starts at the working directory.",
    )
    name: str | None = Field(None, description="Name of the run directory; default: the config file's name.")
    save_steps: int | None = Field(
        50, ge=1, le=MAX_COUNT, description="Steps between checkpoints; null: only when the run ends."
    )
    save_total_limit: int = Field(2, ge=1, le=MAX_COUNT, description="Complete checkpoints kept.")


class RunConfig(_Section):
    """One run, as `run.yaml` describes it."""

    model: ModelConfig
    quantization: QuantizationConfig = Field(default_factory=QuantizationConfig)
    lora: LoraConfig = Field(default_factory=LoraConfig)
    data: DataConfig
    training: TrainingConfig = Field(default_factory=TrainingConfig)
    oom: OomConfig = Field(default_factory=OomConfig)
    output: OutputConfig = Field(default_factory=OutputConfig)
