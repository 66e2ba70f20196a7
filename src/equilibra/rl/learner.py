"""Learner: a sharded model with its balancer and optimizer. Samples in, log-probabilities or updates out.

Symbols: P prompt and A answer tokens of a sample, N answer tokens of a micro-batch, C columns per answer token.

    batch = learner.begin(samples, mini_batches)         # plan, move homes, prepare copies
    old = batch.logprobs()                               # log-prob stage, for own samples
    batch.give(columns)                                  # loss inputs, sent to the ranks that run the samples
    for mini_batch in range(number_of_mini_batches):
        batch.update(mini_batch, loss)                   # update stage: forward, backward, optimizer

A sample stays on the rank that generated it; the plan says which rank runs it, and only its numbers travel.
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
from equilibra.execute.micro_batch import MicroBatch
from equilibra.execute.moe import BalancedMoE
from equilibra.execute.runtime import Runtime
from equilibra.execute.steps.balancer import Balancer
from equilibra.execute.steps.gradients import clip_gradients, nonfinite_gradients
from equilibra.execute.steps.step import Step
from equilibra.rl.engine import Sample
from equilibra.rl.vocabulary import Padded, chunk_of, padded, token_logprobs
from equilibra.trace.routing import RoutingTrace, narrow_ids

LOG = logging.getLogger(__name__)


class Skipped:
    """Counts a learner's optimizer steps that are skipped for a NaN or infinite gradient, equally on all ranks.

    One bad batch must neither end the run nor reach the weights. Several in a row end the run with an error.
    """

    def __init__(self, limit: int = 3) -> None:
        """limit: consecutive steps that may be skipped."""
        self.limit, self.in_a_row = limit, 0

    def skips(self, norm: float, module: nn.Module, runtime: Runtime) -> bool:
        """Collective: whether to skip the step, given the global gradient norm."""
        if isfinite(norm):
            self.in_a_row = 0
            return False
        self.in_a_row += 1
        found = f"the gradient norm is {norm}, not finite in {'; '.join(nonfinite_gradients(module, runtime))}"
        if self.in_a_row > self.limit:
            raise NonFiniteError(
                f"{found}: {self.in_a_row} optimizer steps in a row, optimizer.max_skipped_steps is {self.limit}. No "
                "weight was changed by them; look at rewards and loss, lower the learning rate, and resume from the "
                "last checkpoint"
            )
        LOG.warning("an optimizer step was skipped: %s", found)
        return True


NOTHING = -1
"""key of the empty columns in `Batch.columns`"""


class Language(Protocol):
    """A language model whose MoE layers share a runtime."""

    runtime: Runtime

    @property
    def moe_layers(self) -> list[BalancedMoE]: ...

    def hidden(self, tokens_BT: Tensor, mask_BT: Tensor) -> Tensor:
        """[B, T, D] output of the last layer."""

    def head(self, hidden_ND: Tensor) -> Tensor:
        """[N, V] logits, or [N, 1] values, row by row."""

    @property
    def head_parameters(self) -> list[nn.Parameter]:
        """The parameters that `head` reads."""

    @property
    def vocabulary(self) -> int: ...


@dataclass(frozen=True, kw_only=True, eq=False)
class Predictions:
    """The model's output for the answer tokens of a micro-batch."""

    logprobs: Tensor
    """[N]; a value model's values"""
    entropy: Tensor
    """[N]; zeros for a value model"""
    sequence: Tensor
    """[N] sequence of each token within the micro-batch"""


@dataclass(frozen=True, kw_only=True, eq=False)
class LossSums:
    """A micro-batch's share of the loss and of its statistics."""

    loss: Tensor
    """[] with its gradient"""
    sums: dict[str, float]
    """statistics that add up over micro-batches and ranks"""


Loss = Callable[[Predictions, Tensor], LossSums]
"""takes predictions and columns [N, C]"""


def total_over(group: ExpertGroup) -> Callable[[NDArray[np.float64]], NDArray[np.float64]]:
    """A collective function that sums an array over all ranks, in rank order: every rank gets the same bits."""

    def total(values: NDArray[np.float64]) -> NDArray[np.float64]:
        said = group.gather(np.ascontiguousarray(values, np.float64)[None], what="summing over all ranks")
        result: NDArray[np.float64] = np.concatenate(said).sum(axis=0)
        return result

    return total


def routing_of(experts: Sequence[NDArray[np.int32]], num_experts: int) -> RoutingTrace | None:
    """Recorded experts of own sequences as a trace; None without sequences."""
    if not experts:
        return None
    ids, recorded = narrow_ids(np.concatenate(experts), num_experts)
    offsets = np.cumsum([0, *(len(part) for part in experts)]).astype(np.int64)
    return RoutingTrace(ids=ids, offsets=offsets, num_experts=num_experts, recorded=recorded)


@dataclass(frozen=True, kw_only=True, eq=False)
class Learner:
    """Trains one model on this rank."""

    model: Language
    """must also be an nn.Module"""
    balancer: Balancer
    optimizer: torch.optim.Optimizer | None
    """None: the model is frozen"""
    pad: int
    """padding token"""
    device: torch.device
    temperature: float = 1.0
    """sampling temperature of the answers"""
    max_norm: float = 1.0
    lr: float = 0.0
    warm_up_steps: int = 0
    """optimizer steps in which the learning rate rises to `lr`"""
    skipped: Skipped = field(default_factory=Skipped)
    values: bool = False
    """whether the model predicts values instead of log-probabilities"""

    def begin(
        self, samples: Sequence[Sample], mini_batches: NDArray[np.int64] | None = None,
        experts: Sequence[NDArray[np.int32]] | None = None,
    ) -> Batch:  # fmt: skip
        """Collective: plan a step for own samples, with the rollout's routing or with `experts`."""
        chosen = [sample.experts for sample in samples] if experts is None else experts
        routing = routing_of(chosen, self.model.runtime.spec.num_experts)
        step = self.balancer.begin(routing, mini_batches=mini_batches)
        is_answer = [np.arange(sample.num_rows + 1) >= sample.prompt.size for sample in samples]
        pairs = [np.stack([sample.tokens, own], axis=1) for sample, own in zip(samples, is_answer, strict=True)]
        tokens = step.send([torch.from_numpy(pair) for pair in pairs])
        return Batch(learner=self, step=step, tokens=dict(zip(step.sequences.tolist(), tokens, strict=True)))

    def begin_live(self, samples: Sequence[Sample]) -> Batch:
        """Collective: plan a step in which every token is routed live, for models that did not generate the samples."""
        layers, top_k = len(self.model.runtime.weights), self.model.runtime.spec.top_k
        unknown = [np.full((sample.num_rows, layers, top_k), -1, np.int32) for sample in samples]
        return self.begin(samples, experts=unknown)

    def set_lr(self) -> None:
        """Set the learning rate of the next optimizer step; the optimizer's state knows how many there were."""
        if self.optimizer is not None and self.warm_up_steps:
            done = max((int(state["step"]) for state in self.optimizer.state.values()), default=0)
            for options in self.optimizer.param_groups:
                options["lr"] = self.lr * min(1.0, (done + 1) / self.warm_up_steps)

    def predict(self, micro_batch: MicroBatch, inputs: Padded) -> Predictions:
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
    """The samples of a step and their plan."""

    learner: Learner
    step: Step
    tokens: dict[int, Tensor]
    """[P + A, 2] token ids and answer flags of every sequence that runs here"""
    columns: dict[int, Tensor] = field(default_factory=dict)
    """[A, C] loss inputs of every sequence that runs here, and [0, C] under NOTHING"""

    def _inputs(self, micro_batch: MicroBatch) -> Padded:
        sequences = [self.tokens[s] for s in micro_batch.sequences.tolist()]
        return padded(
            [(rows[:, 0], int((rows[:, 1] == 0).sum())) for rows in sequences], self.learner.pad, self.learner.device
        )

    @torch.no_grad()
    def logprobs(self) -> list[NDArray[np.float64]]:
        """Collective: the log-prob stage. Log-probabilities (or values) [A] of own samples."""
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
        """Collective: `logprobs`, and the experts of every token."""
        with _captured(self.learner.model, self.step) as experts:
            numbers = self.logprobs()
        here = [torch.from_numpy(experts[s]) for s in self.step.sequences.tolist()]
        return numbers, [part.numpy() for part in self.step.send_back(here)]

    def give(self, columns: Sequence[NDArray[np.float64]]) -> None:
        """Collective: send loss inputs [A, C] of own samples to the ranks that run them."""
        widths = self.learner.model.runtime.group.gather(
            np.array([part.shape[1] for part in columns], np.int64), what="comparing columns of numbers"
        )
        width = int(np.concatenate(widths).max())  # ranks without a sequence learn C from the others
        self.columns[NOTHING] = torch.zeros(0, width, dtype=torch.float64)
        sent = self.step.send([torch.from_numpy(np.ascontiguousarray(part)) for part in columns])
        self.columns.update(zip(self.step.sequences.tolist(), sent, strict=True))

    def update(self, mini_batch: int, loss: Loss) -> dict[str, float]:
        """Collective: forward, backward, and an optimizer step unless the gradient is not finite.

        Returns this rank's statistics, the gradient norm, and whether the step was skipped.
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


@contextmanager
def _captured(model: Language, step: Step) -> Iterator[dict[int, NDArray[np.int32]]]:
    """Experts [rows, L, K] of every sequence that runs inside the block, filled in at its end."""
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
