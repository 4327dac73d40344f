"""Damaged and planted checkpoints for `fuzz.py`: sharded (two ranks, one, in the background) and
ordinary files.

Accidents (bits, cuts, files that are missing, mixed up, doubled) must be refused as a
CheckpointError or change nothing that is read. Attacks (pickles, metadata and markers rewritten to
fit) must run no code and be refused or read.
What is left to Lightning: the plain values deep inside what it wrote itself (its loops, a module's
hyper-parameters), where its own errors count as refusals, and the values of ordinary files, whose
checksums torch does not read.
"""

from __future__ import annotations

import copy
import dataclasses
import io
import json
import os
import pickle
import random
import shutil
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from fuzz_damage import changed

from alpa_strategy import AlpaError, AlpaStrategy, export_checkpoint, open_checkpoint
from alpa_strategy.checkpoint.opening import COMPLETE, METADATA, REST
from alpa_strategy.checkpoint.tensors import StoredTensor, map_tensors

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
KINDS = {
    "two ranks": (2, {"checkpoint": "sharded", "parallel": "zero3"}),
    "background": (2, {"checkpoint": "sharded", "async_checkpoint": True}),
    "one rank": (1, {"checkpoint": "sharded"}),
    "one file": (1, {"checkpoint": "single"}),
}


class Tiny(pl.LightningModule):
    """Two linear layers."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = torch.nn.Sequential(
            torch.nn.Linear(4, width), torch.nn.Tanh(), torch.nn.Linear(width, 2)
        )

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.net(batch[0]).square().mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", self.net(batch[0]).mean())

    test_step = validation_step

    def predict_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.net(batch[0])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters())


class Save(pl.Callback):
    """A checkpoint after each step."""

    def __init__(self, path: str) -> None:
        self.path = path

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        trainer.save_checkpoint(self.path)


def trainer_of(root: str, devices: int, options: dict[str, Any], max_steps: int) -> pl.Trainer:
    strategy = AlpaStrategy(
        **{"cluster": "pcie_8gpu", "verbose": False, "plan_dir": root + "/plans", **options}
    )
    return pl.Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=devices,
        max_steps=max_steps,
        max_epochs=100,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=root,
        enable_checkpointing=False,
    )


def rows() -> torch.utils.data.DataLoader:
    data = torch.randn(8, 4, generator=torch.Generator().manual_seed(1))
    return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(data), batch_size=4)


def write(root: str, devices: int, options: dict[str, Any], name: str) -> None:
    """Train a step and save; on every rank."""
    torch.manual_seed(0)
    trainer = trainer_of(root, devices, options, 1)
    trainer.callbacks.append(Save(f"{root}/{name}"))
    trainer.fit(Tiny(), rows())


def good_checkpoints(folder: Path) -> dict[str, Path]:
    """Kind -> a checkpoint that the strategy has written so."""
    from worker_pool import WorkerPool

    pool, folders = WorkerPool(), {}
    for kind, (devices, options) in KINDS.items():
        name = kind.replace(" ", "_") + ".ckpt"
        pool.run(devices, write, str(folder), devices, options, name, init_group=False)
        folders[kind] = folder / name
    pool.close()
    return folders


# Loaders: everything of ours that opens a checkpoint, under its defaults


def load_open(path: Path) -> Any:
    return map_tensors(open_checkpoint(path), StoredTensor, lambda stored: stored.full_tensor())[
        "state_dict"
    ]


def load_module(path: Path) -> Any:
    return Tiny.load_from_checkpoint(path).state_dict()


def load_export(path: Path) -> Any:
    target = path.parent / "exported.ckpt"
    try:
        return torch.load(export_checkpoint(path, target), weights_only=True)["state_dict"]
    finally:
        target.unlink(missing_ok=True)


def load_command(path: Path) -> Any:
    from alpa_strategy.cli import main

    target = path.parent / "exported.ckpt"
    try:
        if main(["export", str(path), str(target)]) == 0:
            return torch.load(target, weights_only=True)["state_dict"]
        raise AlpaError("refused by the command", "")
    finally:
        target.unlink(missing_ok=True)


def load_shown(path: Path) -> Any:
    """`alpa show`, on the checkpoint as if it were a plan, and on its files."""
    from alpa_strategy.cli import main

    for file in [path, *(path.iterdir() if path.is_dir() else [])]:
        assert main(["show", str(file)]) != 0
    raise AlpaError("no plan", "")


def _with_trainer(verb: str, path: Path) -> Any:
    module = Tiny()
    trainer = trainer_of(
        str(path.parent), 1, {"checkpoint": "sharded"}, 1
    )  # the step that it was saved after
    arguments = {"ckpt_path": str(path)}
    if verb == "fit":
        trainer.fit(module, rows(), **arguments)
    elif verb == "predict":
        trainer.predict(module, rows(), **arguments)
    else:
        getattr(trainer, verb)(module, rows(), verbose=False, **arguments)
    return module.state_dict()


LOADERS: dict[str, Callable[[Path], Any]] = {
    "open": load_open,
    "load_from_checkpoint": load_module,
    "export_checkpoint": load_export,
    "alpa export": load_command,
    "alpa show": load_shown,
    **{
        f"{verb}(ckpt_path=)": lambda path, verb=verb: _with_trainer(verb, path)
        for verb in ("fit", "validate", "test", "predict")
    },
}
OFTEN = ("open", "open", "load_from_checkpoint", "export_checkpoint", "fit(ckpt_path=)")


# Damage


class Planted:
    """Unpickled, it makes a folder."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple:
        return os.mkdir, (self.path,)


def files_of(path: Path) -> list[Path]:
    return sorted(path.iterdir()) if path.is_dir() else [path]


def accident(path: Path, rng: random.Random) -> None:
    """Something that happens to files."""
    file = rng.choice(files_of(path))
    content = bytearray(file.read_bytes())
    match rng.randrange(7):
        case 0 | 1:
            for _ in range(rng.randint(1, 4)):
                content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
        case 2:
            del content[rng.randrange(len(content)) :]
        case 3:
            start = rng.randrange(len(content))
            content[start : start + 512] = bytes(min(512, len(content) - start))  # a hole of zeros
        case 4:
            content += rng.randbytes(rng.choice([1, 100]))
        case 5 if path.is_dir():
            file.unlink()
            return
        case _ if path.is_dir():
            other = rng.choice(files_of(path))
            theirs = other.read_bytes()
            other.write_bytes(content)
            content = bytearray(theirs)
        case _:
            content = bytearray(rng.randbytes(rng.choice([0, 10, 5000])))
    file.write_bytes(content)


def planted_in(path: Path, name: str, canary: str) -> None:
    """A pickle that runs code, in one file, so that the folder looks whole."""
    file, planted = path / name if path.is_dir() else path, Planted(canary)
    if name == METADATA:
        metadata = pickle.loads(file.read_bytes())
        metadata.planner_data = planted
        file.write_bytes(pickle.dumps(metadata))
    elif name in (REST, path.name):
        stored = torch.load(file, weights_only=True)
        (stored["rest"] if name == REST else stored)["hyper_parameters"]["width"] = planted
        torch.save(stored, file)
    elif name == COMPLETE:
        file.write_bytes(pickle.dumps(planted))
        return
    else:
        # the tensors' file: every tensor's archive gets another pickle of the same length or is one
        file.write_bytes(_with_planted_tensors(file.read_bytes(), planted))
    if path.is_dir():
        marked_again(path)


def _with_planted_tensors(content: bytes, planted: Planted) -> bytes:
    plain = pickle.dumps(planted, protocol=2)
    return plain + content[len(plain) :] if len(plain) < len(content) else plain


def marked_again(path: Path) -> None:
    """The marker as if the folder had been written so."""
    marker = json.loads((path / COMPLETE).read_text())
    marker["files"] = {
        file.name: file.stat().st_size for file in path.iterdir() if file.name != COMPLETE
    }
    marker.pop("sums", None)
    (path / COMPLETE).write_text(json.dumps(marker))


def attack(path: Path, rng: random.Random, canary: str) -> None:
    names = [file.name for file in files_of(path)]
    if not path.is_dir() or rng.random() < 0.3:
        if rng.random() < 0.5:
            planted_in(path, rng.choice(names), canary)
        else:
            _rewrite_rest(path / REST if path.is_dir() else path, rng)
            if path.is_dir():
                marked_again(path)
        return
    metadata = pickle.loads((path / METADATA).read_bytes())
    for _ in range(rng.randint(1, 3)):
        _change_metadata(metadata, rng)
    (path / METADATA).write_bytes(pickle.dumps(metadata))
    marked_again(path)


def _change_metadata(metadata: Any, rng: random.Random) -> None:
    tensors, stored = metadata.state_dict_metadata, metadata.storage_data
    if not tensors or not stored:
        return
    key, index = rng.choice(sorted(tensors)), rng.choice(list(stored))
    tensor = tensors[key] = copy.deepcopy(tensors[key])
    odd = rng.choice([0, 1, 7, 10**6, 10**10, 2**62, -1])
    match rng.randrange(10):
        case 0:
            tensor.size = torch.Size([odd] * rng.randint(0, 3)) if odd >= 0 else torch.Size([odd])
        case 1 if tensor.chunks:
            tensor.chunks[0] = dataclasses.replace(tensor.chunks[0], sizes=torch.Size([odd, 2]))
        case 2 if tensor.chunks:
            tensor.chunks[0] = dataclasses.replace(tensor.chunks[0], offsets=torch.Size([odd]))
        case 3 if tensor.chunks:
            tensor.chunks.pop() if rng.random() < 0.5 else tensor.chunks.append(tensor.chunks[0])
        case 4:
            tensor.properties.dtype = rng.choice(
                [torch.float64, torch.int8, torch.complex128, torch.quint8, None]
            )
        case 5:
            del tensors[key]
        case 6:
            tensors[rng.choice(["", "x", "state_dict", "../x"])] = tensors.pop(key)
        case 7:
            stored[index] = dataclasses.replace(stored[index], offset=odd)
        case 8:
            stored[index] = dataclasses.replace(stored[index], length=odd)
        case _:
            stored[index] = dataclasses.replace(
                stored[index],
                relative_path=rng.choice(["../x", "/etc/passwd", "", REST, "x\0y", METADATA]),
            )


def _rewrite_rest(file: Path, rng: random.Random) -> None:
    """Plain values that no checkpoint has, in one that `weights_only` reads."""
    stored = torch.load(file, weights_only=True)
    for _ in range(rng.randint(1, 4)):
        stored = changed(stored, rng)
    buffer = io.BytesIO()
    torch.save(stored, buffer)
    file.write_bytes(buffer.getvalue())


def _raised_by(error: BaseException) -> str:
    """The file, below site-packages, of the code that raised."""
    return traceback.extract_tb(error.__traceback__)[-1].filename.rpartition("site-packages/")[2]


class Checkpoints:
    """The format "checkpoint" of the fuzzer.

    Args:
        folder: for the checkpoints; the canary appears there when code runs.
    """

    def __init__(self, folder: Path, canary: str) -> None:
        self._folder, self._canary = folder, str(folder / canary)
        self._good = good_checkpoints(folder)
        self._values = {kind: load_open(path) for kind, path in self._good.items()}
        self._loader = "open"
        self._expected = None
        self._is_lightnings = False

    def write(self, rng: random.Random) -> Path:
        """A damaged copy; the loader that will read it is drawn, too."""
        kind = rng.choice(sorted(self._good))
        path = self._folder / "case.ckpt"
        shutil.rmtree(path, ignore_errors=True)
        path.unlink(missing_ok=True)
        source = self._good[kind]
        shutil.copytree(source, path) if source.is_dir() else shutil.copy(source, path)
        self._loader = rng.choice(OFTEN) if rng.random() < 0.8 else rng.choice(sorted(LOADERS))
        is_accident = rng.random() < 0.5
        accident(path, rng) if is_accident else attack(path, rng, self._canary)
        # Nothing in an ordinary file of torch tells of changed values: its reader does not look at
        # its checksums.
        if is_accident and path.is_dir():
            self._expected = self._values[kind]
        else:
            self._expected = None
        self._is_lightnings = not (is_accident and path.is_dir())
        return path

    def read(self, path: Path) -> None:
        try:
            entries = LOADERS[self._loader](path)
        except AlpaError:
            raise
        except Exception as error:
            error.add_note(f"by {self._loader}")
            if self._is_lightnings and _raised_by(error).startswith(
                ("lightning", "torch/optim", "torch/nn")
            ):
                raise AlpaError(f"refused by Lightning: {error}", "") from error
            raise
        if self._expected is not None:
            wrong = [
                name
                for name, value in self._expected.items()
                if not torch.equal(value, entries[name])
            ]
            assert not wrong, f"{self._loader} read other values of {wrong[:3]} without a word"
