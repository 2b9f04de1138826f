"""From a micro-batch to its loss without the logits: for 16,384 tokens of Llama 3 they would take 8 GiB in fp32.

A kernel takes the hidden states in pieces from the output layer's matrix to the loss and back to their gradient. To the
model it is the output layer itself: while it is armed with targets, the layer returns the loss in place of logits. So
whatever is wrapped around the model, and gathers and frees the layer's weight, goes on as before.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F

from allranks.data.collate import pad_batch
from allranks.data.tokens import Tokens
from allranks.errors import Problem, ProblemsError
from allranks.train.linear_loss import chunked_loss
from allranks.train.loss import Targets, split_off_targets, targets_of, weighted_loss

Kernel = Literal["liger", "torch", "chunked", "logits"]
LADDER: tuple[Kernel, ...] = get_args(Kernel)
"""From the fastest on; the last one is no kernel: the loss of whole logits."""

Forward = Callable[[Mapping[str, torch.Tensor | int]], torch.Tensor]
Hook = Callable[[torch.Tensor], None]
LossFunction = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None, Targets], torch.Tensor]
"""Hidden states [targets, width], weight [vocabulary, width] and bias of the output layer, targets; a scalar."""

_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 1e-2}
"""Relative, of a loss and of its gradient, by the dtype that is computed in."""


class LossHead:
    """The loss of the micro-batches of one model.

    Attributes:
        kernel: by which it is computed.
        words: why it is not computed by a kernel, if somebody should know.
    """

    def __init__(
        self, kernel: Kernel, layer: Any = None, *, others: tuple[Kernel, ...] = (), words: tuple[str, ...] = ()
    ) -> None:
        """Put the kernel in place.

        Args:
            kernel: by which the loss is computed.
            layer: output layer of the model; None with whole logits.
            others: what else may be tried, should the kernel not work.
            words: see the class.
        """
        self.kernel = kernel
        self.words = words
        self._layer = layer
        self._others = others
        self._armed: tuple[Targets, Hook | None] | None = None
        self._value: torch.Tensor | None = None
        if layer is not None:
            self._logits = layer.forward
            layer.forward = self._forward

    def loss(
        self, forward: Forward, inputs: Mapping[str, torch.Tensor | int], targets: Targets, hook: Hook | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The weighted loss of one micro-batch, as `weighted_loss` defines it.

        Args:
            forward: of the model.
            inputs: of the model, without labels.
            targets: on the device of the inputs.
            hook: called in backward with a gradient from the middle of the graph.

        Returns:
            A scalar for backward, and its value, detached and in fp32: what is wrapped around the model may have cast
            the first one to its own dtype.
        """
        if self._layer is None:
            logits = forward(inputs)
            _register(logits, hook)
            loss = weighted_loss(logits, targets)
            return loss, loss.detach()
        self._armed, self._value = (targets, hook), None
        try:
            loss = forward(inputs)
        finally:
            self._armed = None
        assert self._value is not None
        return loss, self._value

    def step_down(self, why: str) -> None:
        """Take the next kernel, or whole logits if there is none."""
        if not self._others:
            self.give_up(why)
            return
        self.kernel, *others = self._others
        self._others = tuple(others)
        self.words = (f"the loss is computed by {self.kernel}: {why}",)

    def give_up(self, why: str) -> None:
        """From here on the loss is that of whole logits."""
        assert self._layer is not None
        self._layer.forward = self._logits
        self._layer = None
        self.words = (_whole_logits(why),)
        self.kernel = "logits"

    def _forward(self, hidden: torch.Tensor) -> torch.Tensor:
        assert self._layer is not None
        if self._armed is None:
            logits: torch.Tensor = self._logits(hidden)
            return logits
        targets, hook = self._armed
        _register(hidden, hook)
        if len(targets):
            chosen = hidden.flatten(0, -2).index_select(0, targets.positions)
            loss = kernel_of(self.kernel)(chosen, self._layer.weight, self._layer.bias, targets)
        else:
            loss = hidden.float().sum() * 0.0
        self._value = loss.detach().float()
        return loss


def _register(tensor: torch.Tensor, hook: Hook | None) -> None:
    if hook is not None and tensor.requires_grad:
        tensor.register_hook(hook)  # type: ignore[no-untyped-call]


def loss_head(base: Any, wanted: str, *, device: torch.device, uniform: bool) -> LossHead:
    """The head of a loaded model, before it is spread.

    Args:
        base: the model below the adapter.
        wanted: ``auto``, or one of `LADDER`.
        device: where it computes.
        uniform: all targets weigh the same.

    Raises:
        ProblemsError: `wanted` does not work here.
    """
    layer = base.get_output_embeddings()
    if layer is None or wanted == "logits":  # a classifier: a few numbers for each sample
        return LossHead("logits")
    unfit = _unfit(layer)
    lacks = {kernel: unfit or _lack(kernel, device, uniform=uniform) for kernel in LADDER[:-1]}
    if wanted != "auto":
        if (lack := lacks[wanted]) is not None:  # type: ignore[index]
            fits = tuple(kernel for kernel in ("auto", *LADDER) if lacks.get(kernel) is None)  # type: ignore[arg-type]
            raise ProblemsError(
                "the loss kernel",
                [Problem(path="training.loss_kernel", message=f"{wanted} does not work here: {lack}", choices=fits)],
            )
        return LossHead(wanted, layer)  # type: ignore[arg-type]
    if unfit is not None:
        return LossHead("logits", words=(_whole_logits(unfit),))
    found, *others = (kernel for kernel, lack in lacks.items() if lack is None)
    return LossHead(found, layer, others=tuple(others))


def _whole_logits(why: str) -> str:
    return f"the loss is computed from whole logits, which takes more memory: {why}"


def _unfit(layer: Any) -> str | None:
    if type(layer) is not torch.nn.Linear:
        return f"the output layer is a {type(layer).__name__}"
    return "the output layer is trained" if layer.weight.requires_grad else None


def _lack(kernel: Kernel, device: torch.device, *, uniform: bool) -> str | None:
    """Why `kernel` does not work here; None if it does."""
    if kernel == "chunked":
        return None
    if not uniform:
        return "it can't weigh targets, as training.loss_reduction: sample does"
    if kernel == "torch":
        return None if hasattr(F, "linear_cross_entropy") else f"torch {torch.__version__} has no linear_cross_entropy"
    if device.type != "cuda":
        return "needs a GPU"
    try:
        import liger_kernel.transformers  # noqa: F401
    except ImportError as error:
        return f"liger-kernel can't be imported: {error}"
    return None


def kernel_of(name: Kernel) -> LossFunction:
    """The function behind a name; none for ``logits``."""
    return {"liger": _by_liger, "torch": _by_torch, "chunked": _in_chunks}[name]


def _by_liger(hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, targets: Targets) -> torch.Tensor:
    from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

    summed: torch.Tensor = LigerFusedLinearCrossEntropyLoss(reduction="sum")(weight, hidden, targets.labels, bias)
    return summed.float() * targets.weights[0]


def _by_torch(hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, targets: Targets) -> torch.Tensor:
    summed: torch.Tensor = F.linear_cross_entropy(
        hidden,
        weight,
        targets.labels,
        linear_bias=bias,
        reduction="sum",
        options=torch.nn.LinearCrossEntropyOptions(),
    )
    return summed.float() * targets.weights[0]


def _in_chunks(hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, targets: Targets) -> torch.Tensor:
    return chunked_loss(hidden, weight, bias, targets.labels, targets.weights)


def works(head: LossHead, device: torch.device, dtype: torch.dtype) -> str | None:
    """What is wrong with the kernel of `head` on a small layer of its own, loss and gradient; None if all is well.

    Raises:
        torch.OutOfMemoryError: there is no room even for that.
    """
    try:
        return _difference(head, device, dtype)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # whatever a compiler of kernels may raise
        return f"{head.kernel} fails here: {type(error).__name__}: {str(error).partition(chr(10))[0]}"


def _difference(head: LossHead, device: torch.device, dtype: torch.dtype) -> str | None:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(48, 64, generator=generator).to(device, dtype)
    weight = torch.randn(512, 64, generator=generator).to(device, dtype) / 8
    labels = torch.randint(512, (1, 49), generator=generator)
    targets = targets_of(labels, [1.0 / 48]).to(device)
    mine, plain = (hidden.clone().requires_grad_() for _ in range(2))
    found = kernel_of(head.kernel)(mine, weight, None, targets)
    expected = weighted_loss((plain @ weight.t())[None], targets)
    for loss in (found, expected):
        loss.backward()  # type: ignore[no-untyped-call]
    assert mine.grad is not None and plain.grad is not None
    for what, one, other in (("loss", found, expected), ("gradient", mine.grad, plain.grad)):
        error = float((one - other).detach().float().norm() / other.detach().float().norm())
        if not error <= _TOLERANCE[dtype]:
            return f"{head.kernel} gives another {what} (by {error:.1e}) than whole logits"
    return None


def agrees(head: LossHead, forward: Forward, *, vocabulary: int, device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the model's loss by the kernel is that of its logits: not if it does more with them than a matrix.

    Collective where `forward` is.
    """
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(vocabulary, (2, 24), generator=generator).tolist()
    batch = pad_batch([Tokens(input_ids=of, labels=of) for of in ids], 0)
    inputs, targets = split_off_targets(batch, [1.0 / 46] * 2, device)
    with torch.no_grad():
        found = float(head.loss(forward, inputs, targets)[1])
        expected = float(weighted_loss(forward(inputs), targets))
    return abs(found - expected) <= _TOLERANCE[dtype] * abs(expected)
