"""Learner: a model on several ranks, its balancer and its optimizer. Samples in, log-probabilities or updates out.

Symbols: A answer tokens of a sample, N answer tokens of a micro-batch, C columns of numbers per answer token.

    batch = learner.begin(samples, mini_batches)         # plan, move homes, arm copies
    old = batch.logprobs()                               # log-prob stage: own samples in, own numbers out
    batch.give(columns)                                  # what the loss needs, to the ranks that run the samples
    for mini_batch in range(batch.num_mini_batches):
        batch.update(mini_batch, loss)                   # update stage: forward, backward, optimizer

A sample stays with the rank that rolled it out; the plan says which rank runs it, and its numbers travel.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import isfinite
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from equilibra.core.errors import NonFiniteError
from equilibra.core.plan import Stage
from equilibra.execute.group import ExpertGroup
from equilibra.execute.moe.layer import BalancedMoE
from equilibra.execute.runtime import Runtime
from equilibra.execute.steps.balancer import Balancer
from equilibra.execute.steps.gradients import clip_gradients, nonfinite_gradients
from equilibra.execute.steps.step import Step
from equilibra.execute.visits.micro_batch import MicroBatch
from equilibra.rl.sample import Sample
from equilibra.rl.vocabulary import chunk_of, token_logprobs
from equilibra.trace.routing import RoutingTrace, narrow_ids

__all__ = [
    "Batch", "Language", "Learner", "Loss", "LossSums", "Padded", "Predictions", "Skipped", "padded", "routing_of",
    "total_over",
]  # fmt: skip

# Sequences of a micro-batch as a rectangle of tokens, and where in it the answers are predicted.
#
# Symbols: B sequences, T tokens of the longest, N answer tokens.
#
# The last token of a sequence is no input: only a target. So all inputs have recorded routing.


@dataclass(frozen=True, kw_only=True, eq=False)
class Padded:
    """Inputs and targets; padding is behind the tokens. Without sequences it is one padding token."""

    tokens_BT: Tensor
    """inputs"""
    mask_BT: Tensor
    """1 for tokens, 0 for padding"""
    rows: Tensor
    """places of all inputs in the flattened rectangle, sequence by sequence"""
    predicting: Tensor
    """[N] places whose next token is one of an answer"""
    targets: Tensor
    """[N] those next tokens"""
    sequence: Tensor
    """[N] which sequence they belong to"""


def padded(sequences: Sequence[tuple[Tensor, int]], pad: int, device: torch.device) -> Padded:
    """Of (tokens, how many of them are the prompt) of each sequence."""
    longest = max((len(tokens) - 1 for tokens, _ in sequences), default=1)
    tokens_BT = torch.full((max(len(sequences), 1), longest), pad)
    mask_BT = torch.zeros_like(tokens_BT)
    if not sequences:
        mask_BT[:] = 1  # attention needs something to look at; no row of it goes to experts or into the loss
    rows, predicting, targets, sequence = [], [], [], []
    for number, (tokens, prompt) in enumerate(sequences):
        first, size = number * longest, len(tokens) - 1
        tokens_BT[number, :size] = tokens[:-1]
        mask_BT[number, :size] = 1
        rows.append(torch.arange(first, first + size))
        predicting.append(torch.arange(first + prompt - 1, first + size))
        targets.append(tokens[prompt:])
        sequence.append(torch.full((size - prompt + 1,), number))

    def joined(parts: list[Tensor]) -> Tensor:
        return torch.cat([torch.zeros(0, dtype=torch.long), *parts]).to(device)

    return Padded(
        tokens_BT=tokens_BT.to(device), mask_BT=mask_BT.to(device), rows=joined(rows), predicting=joined(predicting),
        targets=joined(targets), sequence=joined(sequence),
    )  # fmt: skip


# Optimizer steps that are skipped because a gradient is NaN or infinite, and when that ends the run.
#
# One bad batch should not end a run, and must not reach the weights: the step is skipped on all ranks and counted.
# Several in a row are no accident: the run ends with an error that names the parameters, and its checkpoints stay.


LOG = logging.getLogger(__name__)


class Skipped:
    """Counts skipped steps of one learner; every rank counts the same."""

    def __init__(self, limit: int = 3) -> None:
        """limit: steps in a row that may be skipped."""
        self.limit, self.in_a_row = limit, 0

    def skips(self, norm: float, module: nn.Module, runtime: Runtime) -> bool:
        """Collective: whether the step with a gradient of this norm, the same on all ranks, must be skipped."""
        if isfinite(norm):
            self.in_a_row = 0
            return False
        self.in_a_row += 1
        found = f"the norm of the gradient is {norm}, not finite in {'; '.join(nonfinite_gradients(module, runtime))}"
        if self.in_a_row > self.limit:
            raise NonFiniteError(
                f"{found}: {self.in_a_row} optimizer steps in a row, optimizer.max_skipped_steps is {self.limit}. No "
                "weight was changed by them; look at rewards and loss, lower the learning rate, and resume from the "
                "last checkpoint"
            )
        LOG.warning("an optimizer step was skipped: %s", found)
        return True


NOTHING = -1
"""in place of a sequence: the numbers of no token"""


class Language(Protocol):
    """A model whose MoE layers share a runtime."""

    runtime: Runtime

    @property
    def moe_layers(self) -> list[BalancedMoE]:
        """In order."""

    def hidden(self, tokens_BT: Tensor, mask_BT: Tensor) -> Tensor:
        """[B, T, D]."""

    def head(self, hidden_ND: Tensor) -> Tensor:
        """[N, V] logits, or [N, 1] values; row by row."""

    @property
    def head_parameters(self) -> list[nn.Parameter]:
        """All that `head` reads."""

    @property
    def vocabulary(self) -> int:
        """V."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Predictions:
    """What the model says of the answer tokens of a micro-batch."""

    logprobs: Tensor
    """[N]; of a value model: the values"""
    entropy: Tensor
    """[N]; of a value model: zeros"""
    sequence: Tensor
    """[N] which sequence of the micro-batch a token is of"""


@dataclass(frozen=True, kw_only=True, eq=False)
class LossSums:
    """A rank's share of the loss of a mini-batch, and of what is reported with it."""

    loss: Tensor
    """to go backward from"""
    sums: dict[str, float]
    """shares that add up over micro-batches and ranks"""


Loss = Callable[[Predictions, Tensor], LossSums]
"""from predictions and columns [N, C]"""


def total_over(group: ExpertGroup) -> Callable[[NDArray[np.float64]], NDArray[np.float64]]:
    """A function that sums an array over all ranks, in the order of ranks: everybody gets the same bits."""

    def total(values: NDArray[np.float64]) -> NDArray[np.float64]:
        said = group.gather(np.ascontiguousarray(values, np.float64)[None], what="summing over all ranks")
        result: NDArray[np.float64] = np.concatenate(said).sum(axis=0)
        return result

    return total


def routing_of(experts: Sequence[NDArray[np.int32]], num_experts: int) -> RoutingTrace | None:
    """Recorded experts of own sequences as a trace; None if there are no sequences."""
    if not experts:
        return None
    ids, recorded = narrow_ids(np.concatenate(experts), num_experts)
    offsets = np.cumsum([0, *(len(part) for part in experts)]).astype(np.int64)
    return RoutingTrace(ids=ids, offsets=offsets, num_experts=num_experts, recorded=recorded)


@dataclass(frozen=True, kw_only=True, eq=False)
class Learner:
    """What trains one model on this rank."""

    model: Language
    """also an nn.Module"""
    balancer: Balancer
    """plans and moves"""
    optimizer: torch.optim.Optimizer | None
    """None: the model does not learn"""
    pad: int
    """token that fills up"""
    device: torch.device
    """where the model is"""
    temperature: float = 1.0
    """that answers were drawn with"""
    max_norm: float = 1.0
    """of the gradient"""
    lr: float = 0.0
    """learning rate"""
    warm_up_steps: int = 0
    """optimizer steps in which the learning rate rises to it"""
    skipped: Skipped = field(default_factory=Skipped)
    """optimizer steps without a finite gradient"""
    values: bool = False
    """whether the model says values instead of log-probabilities"""

    def begin(
        self, samples: Sequence[Sample], mini_batches: NDArray[np.int64] | None = None,
        experts: Sequence[NDArray[np.int32]] | None = None,
    ) -> Batch:  # fmt: skip
        """Collective: plan for own samples, with the routing of their rollout or another one."""
        chosen = [sample.experts for sample in samples] if experts is None else experts
        routing = routing_of(chosen, self.model.runtime.spec.num_experts)
        step = self.balancer.begin(routing, mini_batches=mini_batches)
        tokens = step.send([torch.from_numpy(_tokens(sample)) for sample in samples])
        of_sequence = dict(zip(step.sequences.tolist(), tokens, strict=True))
        return Batch(learner=self, step=step, tokens=of_sequence)

    def begin_live(self, samples: Sequence[Sample]) -> Batch:
        """Collective: for a model that did not generate the samples: every token is routed live."""
        layers, top_k = len(self.model.runtime.weights), self.model.runtime.spec.top_k
        unknown = [np.full((sample.num_rows, layers, top_k), -1, np.int32) for sample in samples]
        return self.begin(samples, experts=unknown)

    def set_lr(self) -> None:
        """The learning rate of the next optimizer step; how many there were is in the optimizer's own state."""
        if self.optimizer is not None and self.warm_up_steps:
            done = max((int(state["step"]) for state in self.optimizer.state.values()), default=0)
            for options in self.optimizer.param_groups:
                options["lr"] = self.lr * min(1.0, (done + 1) / self.warm_up_steps)

    def predict(self, micro_batch: MicroBatch, inputs: Padded) -> Predictions:
        """Run the model on a micro-batch."""
        micro_batch.rows = inputs.rows
        hidden = self.model.hidden(inputs.tokens_BT, inputs.mask_BT)
        predicting = hidden.flatten(0, 1)[inputs.predicting]
        if self.values:
            said = self.model.head(predicting)
            return Predictions(logprobs=said[:, 0], entropy=torch.zeros_like(said[:, 0]), sequence=inputs.sequence)
        logprobs, entropy = token_logprobs(
            self.model.head, predicting, inputs.targets, self.model.head_parameters, temperature=self.temperature,
            chunk=chunk_of(self.model.vocabulary),
        )  # fmt: skip
        return Predictions(logprobs=logprobs, entropy=entropy, sequence=inputs.sequence)


@dataclass(frozen=True, kw_only=True, eq=False)
class Batch:
    """A step's samples under a plan."""

    learner: Learner
    """whose model runs them"""
    step: Step
    """its plan"""
    tokens: dict[int, Tensor]
    """[P + A, 2] tokens and whether they are of the answer, of every sequence that runs here"""
    columns: dict[int, Tensor] = field(default_factory=dict)
    """[A, C] numbers of every sequence that runs here, and [0, C] under NOTHING"""

    @property
    def num_mini_batches(self) -> int:
        """Optimizer steps over all samples."""
        return self.step.num_mini_batches

    def _inputs(self, micro_batch: MicroBatch) -> Padded:
        sequences = [self.tokens[s] for s in micro_batch.sequences.tolist()]
        return padded(
            [(rows[:, 0], int((rows[:, 1] == 0).sum())) for rows in sequences], self.learner.pad, self.learner.device
        )

    @torch.no_grad()
    def logprobs(self) -> list[NDArray[np.float64]]:
        """Collective: the log-prob stage. [A] log-probabilities (or values) of own samples, forward only."""
        said: dict[int, Tensor] = {}
        for micro_batch in self.step.micro_batches(Stage.LOGPROB):
            inputs = self._inputs(micro_batch)
            with micro_batch:
                numbers = self.learner.predict(micro_batch, inputs).logprobs.double().cpu()
            sizes = torch.bincount(inputs.sequence.cpu(), minlength=len(micro_batch.sequences)).tolist()
            said.update(zip(micro_batch.sequences.tolist(), torch.split(numbers, sizes), strict=True))
        back = self.step.send_back([said[s] for s in self.step.sequences.tolist()])
        return [numbers.numpy() for numbers in back]

    def logprobs_and_experts(self) -> tuple[list[NDArray[np.float64]], list[NDArray[np.int32]]]:
        """Collective: the same, and the experts that every token went to."""
        with _captured(self.learner.model, self.step) as experts:
            numbers = self.logprobs()
        here = [torch.from_numpy(experts[s]) for s in self.step.sequences.tolist()]
        return numbers, [part.numpy() for part in self.step.send_back(here)]

    def give(self, columns: Sequence[NDArray[np.float64]]) -> None:
        """Collective: numbers [A, C] of own samples to the ranks that run them."""
        widths = self.learner.model.runtime.group.gather(
            np.array([part.shape[1] for part in columns], np.int64), what="comparing columns of numbers"
        )
        width = int(np.concatenate(widths).max())  # ranks without a sequence learn C from the others
        self.columns[NOTHING] = torch.zeros(0, width, dtype=torch.float64)
        sent = self.step.send([torch.from_numpy(np.ascontiguousarray(part)) for part in columns])
        self.columns.update(zip(self.step.sequences.tolist(), sent, strict=True))

    def update(self, mini_batch: int, loss: Loss) -> dict[str, float]:
        """Collective: forward, backward and an optimizer step; returns this rank's sums and the gradient's norm.

        The step is skipped where the gradient is not finite.
        """
        learner, model = self.learner, self.learner.model
        assert learner.optimizer is not None
        assert isinstance(model, nn.Module)
        sums: dict[str, float] = {}
        for micro_batch in self.step.micro_batches(Stage.UPDATE, mini_batch):
            inputs = self._inputs(micro_batch)
            parts = [self.columns[s] for s in micro_batch.sequences.tolist()]
            with micro_batch:
                predictions = learner.predict(micro_batch, inputs)
                columns = torch.cat([self.columns[NOTHING], *parts])
                share = loss(predictions, columns.to(learner.device, predictions.logprobs.dtype))
                share.loss.backward()  # type: ignore[no-untyped-call]
            for name, value in share.sums.items():
                sums[name] = sums.get(name, 0.0) + value
        learner.balancer.finish_gradients(model)
        norm = clip_gradients(model, model.runtime, learner.max_norm, error_if_nonfinite=False)
        skipped = learner.skipped.skips(norm, model, model.runtime)
        if skipped:
            learner.balancer.discard_gradients(model)
        else:
            learner.set_lr()
            learner.optimizer.step()
            learner.optimizer.zero_grad()
        return {**sums, "gradient_norm": norm, "skipped": float(skipped)}


def _tokens(sample: Sample) -> NDArray[np.int64]:
    """[P + A, 2] tokens and whether they are of the answer."""
    is_answer = np.arange(sample.num_rows + 1) >= sample.prompt.size
    return np.stack([sample.tokens, is_answer.astype(np.int64)], axis=1)


@contextmanager
def _captured(model: Language, step: Step) -> Iterator[dict[int, NDArray[np.int32]]]:
    """Experts [rows, L, K] of every sequence that is run inside, filled in when the block ends."""
    seen: dict[int, dict[int, Tensor]] = {}
    runtime = model.runtime

    def keep(layer: int) -> Callable[[nn.Module, object, tuple[Tensor, Tensor]], None]:
        def hook(_module: nn.Module, _inputs: object, output: tuple[Tensor, Tensor]) -> None:
            assert runtime.current is not None
            seen.setdefault(runtime.current.number, {})[layer] = output[0].detach()

        return hook

    hooks = [moe.router.register_forward_hook(keep(moe.layer)) for moe in model.moe_layers]
    found: dict[int, NDArray[np.int32]] = {}
    try:
        yield found
    finally:
        for one in hooks:
            one.remove()
    for micro_batch in step.micro_batches(Stage.LOGPROB):
        experts = torch.stack([part for _, part in sorted(seen[micro_batch.number].items())], dim=1)
        sizes = [len(step.experts_of_sequence[s]) for s in micro_batch.sequences.tolist()]
        for s, part in zip(micro_batch.sequences.tolist(), torch.split(experts, sizes), strict=True):
            found[s] = part.to(torch.int32).cpu().numpy()
