"""The error of a job whose step cannot be captured, as users see it."""

from __future__ import annotations

from jobs import run_job

REFUSED = """
import lightning.pytorch as pl, torch
from alpa_strategy import AlpaStrategy

class Net(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def training_step(self, batch, batch_idx):
        loss = self.layer(batch).square().mean()
        return loss if float(loss) > -1.0 else None

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

strategy = AlpaStrategy(cluster="pcie_8gpu", verbose=False, capture="require")
trainer = pl.Trainer(
    accelerator="cpu", devices=2, strategy=strategy, logger=False, enable_checkpointing=False
)
trainer.fit(Net(), torch.utils.data.DataLoader(torch.randn(16, 4), 4))
"""


def test_a_refusal_is_one_message_and_comes_last(tmp_path) -> None:
    job = run_job(tmp_path, REFUSED)
    assert job.returncode != 0
    lines = job.stderr.strip().splitlines()
    assert lines[-3].startswith("CaptureError: training_step cannot be captured")
    assert "job.py" in lines[-2]
    assert lines[-1].startswith("  What to do:")
    assert "frame #" not in job.stderr
    assert sum("What to do" in line for line in lines) == 1
    assert "Traceback" not in job.stderr
