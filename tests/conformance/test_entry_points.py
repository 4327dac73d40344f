"""Other ways to the strategy: LightningCLI's YAML files, notebooks, Fabric."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
from conformance.bench import Bench, Net
from jobs import run_job
from quiet import QUIET
from worker_pool import WorkerError

from alpa_strategy import AlpaError, AlpaStrategy

SCRIPT = """
import alpa_strategy
from conformance.test_entry_points import Data
from conformance.bench import Net
from lightning.pytorch.cli import LightningCLI

cli = LightningCLI(Net, Data, save_config_kwargs={"overwrite": True})
print(f"RAN {type(cli.trainer.strategy).__name__} on {cli.trainer.world_size}", flush=True)
"""


class Data(pl.LightningDataModule):
    """Sixteen rows."""

    def __init__(self, rows: int = 16) -> None:
        super().__init__()
        self.rows = rows

    def train_dataloader(self) -> Any:
        from torch.utils.data import DataLoader, TensorDataset

        data = Bench("alpa", ".").data(self.rows)
        return DataLoader(TensorDataset(*(t.float() for t in data.tensors)), batch_size=4)

    val_dataloader = train_dataloader


def config(folder: Path, strategy: str) -> Path:
    path = folder / "config.yaml"
    path.write_text(f"""
trainer: {{accelerator: cpu, devices: 2, fast_dev_run: 2, logger: false, enable_progress_bar: false,
  enable_model_summary: false, default_root_dir: {folder}, strategy: {strategy}}}
model: {{d_hidden: 12}}
data: {{rows: 16}}
""")
    return path


# By default two ranks of the pool: the next test.
@pytest.mark.slow
def test_a_name_in_a_yaml_file_of_a_script(tmp_path: Path) -> None:
    pytest.importorskip("jsonargparse")
    done = run_job(tmp_path, SCRIPT, "fit", "--config", str(config(tmp_path, "alpa")), timeout=200)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("RAN AlpaStrategy on 2") == 2


def run_cli(path: str, *overrides: str) -> tuple[str, Any]:
    from lightning.pytorch.cli import LightningCLI

    arguments = ["fit", "--config", path, *overrides]
    cli = LightningCLI(Net, Data, args=arguments, save_config_callback=None)
    strategy = cli.trainer.strategy
    return type(strategy).__name__, (
        strategy.options.parallel,
        strategy.options.num_stages,
        strategy.options.placements,
    )


def test_a_name_in_a_yaml_file(pool, tmp_path: Path) -> None:
    pytest.importorskip("jsonargparse")
    per_rank = pool.run(2, run_cli, str(config(tmp_path, "alpa")))
    assert [name for name, _ in per_rank] == ["AlpaStrategy"] * 2


def test_a_class_with_options_in_a_yaml_file(pool, tmp_path: Path) -> None:
    pytest.importorskip("jsonargparse")
    options = (
        "{parallel: zero3, cluster: pcie_8gpu, verbose: false, placements: {net.2.weight: R*}}"
    )
    path = config(tmp_path, f"{{class_path: alpa_strategy.AlpaStrategy, init_args: {options}}}")
    per_rank = pool.run(2, run_cli, str(path))
    assert per_rank == [("AlpaStrategy", ("zero3", None, (("net.2.weight", "R*"),)))] * 2
    pipelined = [
        "--trainer.strategy.parallel=auto",
        "--trainer.strategy.num_stages=2",
        "--trainer.strategy.num_microbatches=2",
        "--trainer.strategy.placements={}",
    ]
    assert pool.run(2, run_cli, str(path), *pipelined)[0][1][1] == 2


def test_a_misspelt_option_in_a_yaml_file(pool, tmp_path: Path) -> None:
    pytest.importorskip("jsonargparse")
    path = config(tmp_path, "{class_path: alpa_strategy.AlpaStrategy, init_args: {paralel: zero3}}")
    with pytest.raises(WorkerError, match="paralel"):
        pool.run(2, run_cli, str(path))


def test_fabric_is_refused() -> None:
    from lightning.fabric import Fabric

    with pytest.raises(AlpaError, match=r"Trainer\(strategy=\"alpa\"\)"):
        Fabric(strategy="alpa", accelerator="cpu", devices=1)


def test_notebooks(monkeypatch, tmp_path: Path) -> None:
    """One device works without a launcher; several cannot be launched from there, which Lightning
    says.
    """
    from lightning.pytorch.trainer.connectors import accelerator_connector

    monkeypatch.setattr(accelerator_connector, "_IS_INTERACTIVE", True)
    bench = Bench("alpa", str(tmp_path))
    strategy = AlpaStrategy(cluster="pcie_8gpu", verbose=False)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=1,
        strategy=strategy,
        precision="64-true",
        default_root_dir=tmp_path,
        max_epochs=1,
        **QUIET,
    )
    trainer.fit(bench.module(), bench.loader())
    assert trainer.global_step == 8
    with pytest.raises(Exception, match="not compatible with an interactive environment"):
        pl.Trainer(accelerator="cpu", devices=2, strategy=AlpaStrategy(), **QUIET)
