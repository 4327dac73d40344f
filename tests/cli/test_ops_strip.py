"""The strip of products: what each mesh axis divides, read off the strategies, and one box an op in the picture."""

import xml.etree.ElementTree as ElementTree
from dataclasses import replace

import pytest
import torch
from models import MODELS

from alpa_strategy.cluster.spec import ClusterSpec
from alpa_strategy.display import plan_svg
from alpa_strategy.display.picture import products, split_kind
from alpa_strategy.ir.op import AxisStrategy
from alpa_strategy.options import PlanOptions
from alpa_strategy.planner.planner import make_plan


@pytest.mark.parametrize(
    ("strategy", "kind"),
    [
        ("S0,R*->S0", "batch"),
        ("R*,S0->S1", "out"),
        ("S2,S1,R*->P@bias_on_first", "in"),
        ("R,R->R", "repeated"),
        ("S1,S1,S1->S1", "other"),
    ],
)
def test_kinds(strategy, kind):
    assert split_kind(AxisStrategy.parse(strategy)) == kind


def test_every_product_has_a_box_and_data_parallelism_divides_the_batch():
    module = MODELS["convnet"](channels=64, image_size=64)  # large enough that dividing it pays
    cluster = ClusterSpec.load("pcie_8gpu").with_nodes(1, 2)
    options = PlanOptions(parallel="data")
    plan = make_plan(module, module.example_batch(64, torch.Generator().manual_seed(0)), cluster, options)
    found = products(plan.stages[0])
    assert [kinds for _, kinds in found] == [("batch",)] * 3  # two convolutions and the head
    root = ElementTree.fromstring(plan_svg(plan))
    titles = [node.text or "" for node in root.iter("{http://www.w3.org/2000/svg}title")]
    assert [t.partition(":")[0] for t in titles if "axis 0" in t] == [name for name, _ in found]
    without = replace(plan, stages=(replace(plan.stages[0], strategies={}),))
    assert "How each product" not in plan_svg(without)
