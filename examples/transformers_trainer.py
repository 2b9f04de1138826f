"""transformers.Trainer whose ranks shrink their micro-batches together; lines marked `# +` are what it takes.

    accelerate launch --config_file profiles/ddp.yaml examples/transformers_trainer.py --oom-at 3

Without the marked lines, and with the line that starts with `# -`, it is a plain Trainer. The model is a small random
Llama, the data are random tokens. `--oom-at` imitates a rank 1 in whose memory only one sample fits.
"""

import argparse
import gc
import random

import torch
from accelerate import PartialState
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from allranks.library.trainer import CoordinatorMixin  # +

TINY = LlamaConfig(vocab_size=96, hidden_size=48, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4)


# -  class MyTrainer(Trainer):
class MyTrainer(CoordinatorMixin, Trainer):  # +
    """One's own trainer, with whatever it changes."""


def collate(samples):
    """Pad to the longest sample."""
    rows = [torch.tensor(sample) for sample in samples]
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    labels = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=-100)
    return {"input_ids": ids, "attention_mask": (labels != -100).long(), "labels": labels}


def main():
    """Train for six steps of 16 samples on two ranks, in batches of 4."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--oom-at", type=int, metavar="STEP", help="step in which rank 1 has room for one sample only")
    parser.add_argument("--output-dir", default="trainer_output")
    options = parser.parse_args()

    rng = random.Random(0)
    data = [[rng.randrange(1, 96) for _ in range(rng.randint(4, 40))] for _ in range(96)]
    args = TrainingArguments(
        output_dir=options.output_dir,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        max_steps=6,
        learning_rate=3e-3,
        logging_steps=1,
        remove_unused_columns=False,
        use_cpu=not torch.cuda.is_available(),
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(TINY)
    trainer = MyTrainer(model, args, train_dataset=data, data_collator=collate)

    def run_out_of_memory(_module, _args, inputs):
        at = trainer.state.global_step + 1
        if options.oom_at == at and trainer.args.process_index == 1 and len(inputs["input_ids"]) > 1:
            raise torch.OutOfMemoryError("CUDA out of memory (injected)")

    model.register_forward_pre_hook(run_out_of_memory, with_kwargs=True)
    trainer.train()
    if trainer.is_world_process_zero():
        for entry in trainer.state.log_history[:-1]:
            print(f"step {entry['step']} loss {entry['loss']:.9f}")
        print(f"final cap {trainer.caps.max_samples}")  # +


if __name__ == "__main__":
    main()
    # The model goes first, of which the Trainer is part of a cycle; a DDP model can wait for ever for a group that is
    # gone. Left to the end of Python, the threads of gloo may abort a process that has finished.
    gc.collect()
    PartialState().destroy_process_group()
