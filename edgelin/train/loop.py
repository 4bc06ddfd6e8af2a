"""The training loop: steps, held-out measurements, checkpoints, and how a run stops and goes on.

Output folder: the checkpoint (best held-out score, or the latest without held-out data),
``log.jsonl``, ``loss.png``, ``training_state/`` and ``cache/``.
"""

from __future__ import annotations

import json
import math
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError
from tqdm import tqdm

from edgelin import checkpoint
from edgelin.config import RunConfig, to_dict
from edgelin.errors import EdgelinError
from edgelin.model import Block, SequenceModel, check_size
from edgelin.stop import Stop
from edgelin.train import folder, log, optimizer, snapshot, warm_start
from edgelin.train.data import prepare
from edgelin.train.features import FeatureTask
from edgelin.train.meter import Meter, tell
from edgelin.train.schedule import learning_rate, progress
from edgelin.train.task import Hidden, Task
from edgelin.train.text import TextTask

_TRAINING_BYTES = 16  # a parameter, its gradient and both moments in float32


@dataclass(frozen=True)
class Result:
    """What a call of :func:`train` came to.

    Args:
        step: Optimizer steps done, over all calls.
        interrupted: Whether a signal stopped it; all is saved then.
        metric: Name of the score.
        score: Of all held-out data, streamed through the kept checkpoint in float32; None without
            held-out data, or when interrupted.
    """

    step: int
    interrupted: bool
    metric: str
    score: float | None


def train(
    config: RunConfig,
    out: Path,
    *,
    resume: bool = False,
    device: str = "auto",
    init: Path | None = None,
) -> Result:
    """Train a model as the config says.

    Args:
        config: The run.
        out: Output folder.
        resume: Go on from the folder's training state instead of starting anew.
        device: ``auto``, ``cpu`` or ``cuda``.
        init: Checkpoint of ours whose weights and tokenizer a new run begins with.

    Raises:
        EdgelinError: The folder holds a run already (or none to resume) or cannot be written, the
            data or the config are unusable, or the loss is no longer finite.
    """
    try:
        return _train(config, out, resume, device, init)
    except (OSError, SafetensorError) as error:
        name = getattr(error, "filename", None) or out
        reason = getattr(error, "strerror", None) or error
        raise EdgelinError(
            f"cannot write {name}: {reason}; make room, or choose another --out"
        ) from error


def _train(config: RunConfig, out: Path, resume: bool, device: str, init: Path | None) -> Result:
    where = _pick(device)
    folder.check(out, resume=resume)
    if init is not None:
        warm_start.check(config, init)
    check_size(config.model, bytes_each=_TRAINING_BYTES, memory=_memory(where))
    out.mkdir(parents=True, exist_ok=True)
    if init is not None and not resume:
        warm_start.copy_files(init, out)
    trainer = Trainer(config, out, _task(config, out, where), where)
    _warn_of_export(trainer.model)
    if resume:
        trainer.restore()
    elif init is not None:
        checkpoint.fill(trainer.model, init)
    with Stop() as stop:
        trainer.fit(stop)
    score = None if stop.asked else trainer.final_score()
    return Result(trainer.step, stop.asked, trainer.metric.name, score)


def _task(config: RunConfig, out: Path, device: torch.device) -> Task:
    """Read the data of a run."""
    if config.model.features is not None:
        return FeatureTask(config, device)
    tell("reading and encoding the texts")
    return TextTask(config, prepare(config, out), device)


class Trainer:
    """One run in memory.

    Args:
        config: The run.
        out: Output folder.
        task: Its data and loss.
        device: Where to train.
    """

    def __init__(self, config: RunConfig, out: Path, task: Task, device: torch.device) -> None:
        self.config, self.step, self.metric = config, 0, task.metric
        self._out, self._task, self._device = out, task, device
        self._elapsed, self._started = 0.0, 0.0
        self._best: float | None = None
        torch.manual_seed(config.seed)
        self.model = SequenceModel(config.model).to(device)
        task.initialise(self.model)
        self._optimizer = optimizer.build(self.model, config.optim)
        self._compiled = config.compile and device.type == "cuda"
        hidden = self.model.hidden
        self._hidden = torch.compile(hidden, dynamic=False) if self._compiled else hidden
        self._state: dict[str, torch.Tensor] | None = None

    def restore(self) -> None:
        """Take weights, optimizer and position in the data from the output folder."""
        done, tensors = snapshot.load(self._out)
        for key, value in self._identity().items():
            was = done.run.get(key)
            if was != value:
                detail = "" if isinstance(value, dict) else f" (it was {was!r}, is now {value!r})"
                raise EdgelinError(
                    f"cannot resume {self._out} with another {key}{detail}; put it back, "
                    f"or start a new run in another --out"
                )
        try:
            with torch.no_grad():
                for name, tensor in checkpoint.own_tensors(self.model).items():
                    tensor.copy_(tensors[f"model/{name}"])
            optimizer.restore(self._optimizer, self.model, tensors)
        except (KeyError, RuntimeError) as error:
            raise EdgelinError(
                f"the training state in {self._out} lacks or spoils {error}; "
                f"start again in another --out"
            ) from error
        carried = {
            key.removeprefix("carried/"): value.to(self._device)
            for key, value in tensors.items()
            if key.startswith("carried/")
        }
        self._state = carried or None
        self.step, self._elapsed, self._best = done.step, done.elapsed, done.best

    def fit(self, stop: Stop) -> None:
        """Train to the end of the schedule, or until a stop is asked for."""
        self._log = log.Log(self._out / "log.jsonl", self.step)
        tell(
            f"{self.model.num_parameters():,} parameters, {self._task.size:,} {self._task.unit}, "
            f"{self._task.steps_per_epoch} steps an epoch, on {self._device}"
        )
        self._start_clock()
        if self._device.type == "cuda" and not self._done():
            self._warm_up()
            self._start_clock()
        self._meter = Meter(self._task.units_per_step)
        measured = saved = -1
        with self._bar() as bar:
            while not self._done() and not stop.asked:
                self._meter.add(*self._train_step())
                if self.step % self.config.log_every == 0:
                    self._report(bar)
                if _due(self.step, self.config.eval_every):
                    self._measure()
                    measured = self.step
                if _due(self.step, self.config.save_every):
                    self._save()
                    saved = self.step
            self._report(bar)
            if not stop.asked and measured != self.step:
                self._measure()
            if saved != self.step:
                self._save()

    def final_score(self) -> float | None:
        """The score of all held-out data through the kept checkpoint; None if there are none."""
        if not self._task.has_valid:
            return None
        tell("measuring all held-out data")
        model, _ = checkpoint.load(self._out, device=self._device)
        score = self._task.final_score(model)
        self._log.write(**{"step": self.step, f"streamed_{self.metric.name}": score})
        return score

    def _warm_up(self) -> None:
        """Compile all kernels before the clock runs, by a step that changes nothing."""
        tell("compiling kernels")
        self._gradients()
        self._optimizer.zero_grad()
        torch.cuda.synchronize()

    def _gradients(self) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Loss of the next step, its gradients left in the parameters, and the states after it."""
        loss, after = self._loss(self._hidden, compiled=self._compiled)
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach(), {name: value.detach() for name, value in after.items()}

    def _loss(self, hidden_of: Hidden, *, compiled: bool) -> tuple[torch.Tensor, dict[str, Any]]:
        """Loss of the next step and the states after it, through a form of ``model.hidden``."""
        # Dropout is a pure function of (seed, step), so that no random state need be saved.
        torch.manual_seed((self.config.seed << 32) + self.step + 1)
        with self._autocast():
            return self._task.loss(self.model, hidden_of, self.step, self._state, compiled=compiled)

    def _train_step(self) -> tuple[torch.Tensor, torch.Tensor]:
        """One optimizer step; gives loss and gradient norm without waiting for the device."""
        optim = self.config.optim
        loss, after = self._gradients()
        limit = optim.grad_clip or math.inf
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), limit)
        self._rate = learning_rate(optim, self.step, self._seconds())
        for group in self._optimizer.param_groups:
            group["lr"] = self._rate
        self._optimizer.step()
        self._optimizer.zero_grad()
        self._state = after or None
        self.step += 1
        return loss, norm.detach()

    def _report(self, bar: Any) -> None:
        """Log the steps since the last report and move the bar."""
        reading = self._meter.read()
        if reading is None:
            return
        loss, norm, speed = reading
        self._refuse_unless_finite("loss", loss)
        self._log.write(
            **self._position(),
            loss=loss,
            lr=self._rate,
            grad_norm=norm,
            **{f"{self._task.unit}_per_second": round(speed)},
        )
        bar.set_postfix_str(f"loss {loss:.3f}, {speed:,.0f} {self._task.unit}/s", refresh=False)
        bar.update(self._bar_position() - bar.n)

    def _measure(self) -> None:
        """The held-out score; the weights are kept if they are the best so far."""
        if not self._task.has_valid:
            return
        began = time.perf_counter()
        with self._autocast():
            score = self._task.score(self.model)
        self._refuse_unless_finite("held-out score", score)
        self._log.write(**self._position(), **{self.metric.name: score})
        tell(f"step {self.step}: held-out {score:.4f} {self.metric.words}")
        if self.metric.improves(score, self._best):
            self._best = score
            self._keep()
        self._meter.pause(time.perf_counter() - began)

    def _save(self) -> None:
        """Write the training state, the picture and, without held-out data, the checkpoint."""
        began = time.perf_counter()
        with torch.no_grad():  # the loss of a step says nothing of the weights that it made
            loss, _ = self._loss(self.model.hidden, compiled=False)
        self._refuse_unless_finite("loss", float(loss))
        tensors = {
            f"model/{name}": tensor for name, tensor in checkpoint.own_tensors(self.model).items()
        }
        tensors |= optimizer.tensors(self._optimizer, self.model)
        tensors |= {f"carried/{name}": value for name, value in (self._state or {}).items()}
        finite = [tensor.isfinite().all() for tensor in tensors.values()]
        if not torch.stack([value.cpu() for value in finite]).all():
            self._refuse_unless_finite("optimizer's state", math.nan)
        if self._best is None:  # nothing measured: the latest weights are the best known
            self._keep()
        done = snapshot.Progress(self.step, self._seconds(), self._best, self._identity())
        snapshot.save(self._out, done, tensors)
        log.plot(self._out / "log.jsonl", self._out / "loss.png", self._task.unit, self.metric)
        self._meter.pause(time.perf_counter() - began)

    def _refuse_unless_finite(self, name: str, value: float) -> None:
        """End a run that has diverged, before anything of it is written."""
        if not math.isfinite(value):
            raise EdgelinError(
                f"the {name} is {value} at step {self.step}; lower optim.learning_rate or raise "
                f"optim.warmup_steps ({folder.saved(self._out)})"
            )

    def _keep(self) -> None:
        folder.keep(self._out, self.model, self._task.tokenizer_json)

    def _position(self) -> dict[str, Any]:
        """Where a line of the log stands."""
        return {
            "step": self.step,
            "seconds": round(self._seconds(), 3),
            self._task.unit: self.step * self._task.units_per_step,
        }

    def _identity(self) -> dict[str, Any]:
        """What must not change when a run is resumed."""
        model: dict[str, Any] = json.loads(json.dumps(to_dict(self.config.model)))
        return {
            "model": model,
            "seed": self.config.seed,
            "optim.batch_size": self.config.optim.batch_size,
            "optim.sequence_length": self.config.optim.sequence_length,
            **self._task.identity,
        }

    def _autocast(self) -> torch.autocast:
        return torch.autocast(
            self._device.type, torch.bfloat16, enabled=self._device.type == "cuda"
        )

    def _start_clock(self) -> None:
        self._started = time.perf_counter() - self._elapsed

    def _seconds(self) -> float:
        return time.perf_counter() - self._started

    def _done(self) -> bool:
        return progress(self.config.optim, self.step, self._seconds()) >= 1

    def _bar(self) -> Any:
        """A bar over steps, or over seconds where only time ends the run."""
        steps = self.config.optim.steps
        total = steps if steps is not None else math.ceil(self.config.optim.max_seconds or 0)
        quiet = not sys.stderr.isatty()  # a log file is not to be flooded
        return tqdm(
            total=total,
            initial=self._bar_position(),
            unit="step" if steps is not None else "s",
            mininterval=30 if quiet else 0.5,
            dynamic_ncols=True,
        )

    def _bar_position(self) -> int:
        return self.step if self.config.optim.steps is not None else int(self._seconds())


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


def _memory(device: torch.device) -> int | None:
    """Bytes of memory of a GPU; None: those of the machine."""
    return torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else None


def _warn_of_export(model: SequenceModel) -> None:
    """Say in a line a mixer what will keep `edgelin export` from taking the model."""
    blocks = cast(list[Block], list(model.blocks))
    branches = [branch for block in blocks for branch in block.branches()]
    configs = [getattr(branch, "config", None) for branch in branches]
    obstacles = [getattr(config, "export_obstacle", None) for config in configs]
    for obstacle in dict.fromkeys(filter(None, obstacles)):
        tell(f"warning: {obstacle}")


def _pick(device: str) -> torch.device:
    """The device that a name asks for."""
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device == "cuda" and not torch.cuda.is_available():
        raise EdgelinError("there is no CUDA GPU; take --device cpu or auto")
    return torch.device(device)
