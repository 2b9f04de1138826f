"""An accelerate loop whose ranks shrink their micro-batches together; lines marked `# +` are what it takes.

    accelerate launch --config_file profiles/ddp.yaml examples/accelerate_loop.py --oom-at 3

Without the marked lines, and with the lines that start with `# -`, it is a plain loop. The model is a small random
Llama, the data are random tokens. `--oom-at` imitates a rank 1 in whose memory only two samples fit.
"""

import argparse
import random

import torch
from accelerate import Accelerator, PartialState
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM, get_linear_schedule_with_warmup

from allranks.library import Coordinator  # +

TINY = LlamaConfig(vocab_size=96, hidden_size=48, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4)


def collate(samples):
    """Pad to the longest sample."""
    rows = [torch.tensor(sample) for sample in samples]
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    labels = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=-100)
    return {"input_ids": ids, "attention_mask": (labels != -100).long(), "labels": labels}


def main():
    """Train for one epoch of 64 samples, 16 a step on two ranks."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--oom-at", type=int, metavar="STEP", help="step in which rank 1 has room for two samples only")
    options = parser.parse_args()

    accelerator = Accelerator(cpu=not torch.cuda.is_available())
    torch.manual_seed(0)
    rng = random.Random(0)
    data = [[rng.randrange(1, 96) for _ in range(rng.randint(4, 40))] for _ in range(64)]
    loader = DataLoader(data, batch_size=8, shuffle=True, collate_fn=list)
    model = LlamaForCausalLM(TINY)

    def run_out_of_memory(_module, _args, inputs):
        if options.oom_at == step and accelerator.process_index == 1 and len(inputs["input_ids"]) > 2:
            raise torch.OutOfMemoryError("CUDA out of memory (injected)")

    model.register_forward_pre_hook(run_out_of_memory, with_kwargs=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scheduler = get_linear_schedule_with_warmup(optimizer, 0, 8)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    coordinator = Coordinator(accelerator, model, optimizer, max_samples=8, max_grad_norm=1.0)  # +

    def loss_of(samples):
        batch = {name: tensor.to(accelerator.device) for name, tensor in collate(samples).items()}
        targets = int((batch["labels"][:, 1:] != -100).sum())  # +
        return model(**batch).loss * targets, targets  # +
        # -  return model(**batch).loss

    for step, samples in enumerate(loader, start=1):
        # -  loss = loss_of(samples)
        # -  accelerator.backward(loss)
        # -  accelerator.clip_grad_norm_(model.parameters(), 1.0)
        # -  optimizer.step()
        done = coordinator.step(samples, loss_of)  # +
        loss = done.loss  # +
        scheduler.step()
        optimizer.zero_grad()
        accelerator.print(f"step {step} loss {loss:.9f}", flush=True)
    accelerator.print(f"final cap {done.max_samples}")  # +


if __name__ == "__main__":
    main()
    # Only here is the model gone; a DDP model that is the last to hold its gloo group can wait for ever as it ends.
    PartialState().destroy_process_group()
