from __future__ import annotations

import pytest
import torch

pytest.importorskip("transformers")
from hf.finetune import record
from hf.tiny_models import MODELS


@pytest.mark.parametrize("name", list(MODELS))
@pytest.mark.parametrize("plan", [{"parallel": "zero3"}])
def test_thin(pool, tmp_path, name, plan):
    path = MODELS[name].save(tmp_path / name)
    ref = pool.run(1, record, name, str(path), None, 1, str(tmp_path), init_group=False)[0]
    for run in pool.run(2, record, name, str(path), plan, 2, str(tmp_path)):
        for k, v in ref["first"].items():
            assert torch.equal(run["first"][k], v), k
        for k, v in ref["buffers"].items():
            print(
                k,
                v.dtype,
                run["buffers"][k].dtype,
                (run["buffers"][k] - v).abs().max(),
                v.abs().max(),
            )
        print(
            run["losses"],
            ref["losses"],
            run["is_eager"],
            sum(run["has_memory"].values()),
            len(run["has_memory"]),
        )
        torch.testing.assert_close(
            torch.tensor(run["losses"]), torch.tensor(ref["losses"]), rtol=1e-9, atol=0
        )
        for k, v in ref["state"].items():
            torch.testing.assert_close(run["state"][k], v, rtol=1e-9, atol=1e-9)
