"""Rule cases of convolutions, pooling and batch norms."""

from __future__ import annotations

from rule_data import Add, aten, c, f, u

from alpa_strategy.capture import ops


def convolution_cases(add: Add) -> None:
    conv = ("S0,R*,R*->S0", "R*,S0,S0->S1", "S1,S1,R*->P@bias_on_first")
    add("conv1d", aten.conv1d.default, f(4, 6, 5), f(8, 6, 3), f(8), expect=conv)
    add(
        "conv2d",
        aten.conv2d.default,
        f(4, 6, 5, 5),
        f(8, 6, 3, 3),
        f(8),
        (1, 1),
        (1, 1),
        expect=conv,
    )
    add(
        "conv2d_same",
        aten.conv2d.padding,
        f(4, 6, 5, 5),
        f(8, 6, 3, 3),
        f(8),
        (1, 1),
        "same",
        expect=conv,
    )
    add(
        "conv2d_single",
        aten.conv2d.default,
        f(6, 5, 5),
        f(8, 6, 3, 3),
        expect=("S0,S1->P", "R*,S0->S0"),
    )
    add("conv3d", aten.conv3d.default, f(4, 6, 3, 3, 3), f(8, 6, 2, 2, 2), f(8), expect=conv)
    add(
        "convolution",
        aten.convolution.default,
        f(4, 6, 5),
        f(8, 6, 3),
        f(8),
        (1,),
        (0,),
        (1,),
        False,
        (0,),
        1,
        expect=conv,
    )


def grouped_and_transposed_convolution_cases(add: Add) -> None:
    depthwise = ("S0,R*,R*->S0", "S1,S0,S0->S1")
    add(
        "conv2d_depthwise",
        aten.conv2d.default,
        f(4, 12, 4, 4),
        f(24, 1, 3, 3),
        f(24),
        groups=12,
        expect=depthwise,
    )
    add(
        "conv2d_groups",
        aten.conv2d.default,
        f(4, 12, 4, 4),
        f(24, 3, 3, 3),
        f(24),
        groups=4,
        expect=depthwise,
    )
    transposed = ("S0,R*,R*->S0", "R*,S1,S0->S1", "S1,S0,R*->P@bias_on_first")
    add(
        "conv_transpose1d",
        aten.conv_transpose1d.default,
        f(4, 6, 5),
        f(6, 8, 3),
        f(8),
        expect=transposed,
    )
    add(
        "conv_transpose2d",
        aten.conv_transpose2d.input,
        f(4, 6, 3, 3),
        f(6, 8, 2, 2),
        f(8),
        expect=transposed,
    )


def pooling_and_batch_norm_cases(add: Add) -> None:
    for op, args in (
        (aten.max_pool2d.default, ((2, 2),)),
        (aten.avg_pool2d.default, ((2, 2),)),
        (aten.adaptive_avg_pool2d.default, ((1, 1),)),
        (aten.upsample_nearest2d.vec, (None, (2.0, 2.0))),
    ):
        add(str(op), op, f(4, 6, 6, 6), *args, expect=("S0->S0", "S1->S1"))
    add(
        "max_pool_indices",
        aten.max_pool2d_with_indices.default,
        f(4, 6, 6, 6),
        (2, 2),
        expect="S0->S0,S0",
    )
    add("pixel_shuffle", aten.pixel_shuffle.default, f(4, 8, 3, 3), 2, expect="S0->S0")
    stats = (c(6), u(6).detach())
    args = (False, 0.1, 1e-5, False)
    add(
        "batch_norm_eval",
        aten.batch_norm.default,
        f(4, 6, 5, 5),
        f(6),
        f(6),
        *stats,
        *args,
        expect=("S0,R*,R*,R,R->S0", "S1,S0,S0,S0,S0->S1"),
    )
    add(
        "batch_norm_train",
        ops.batch_norm_train,
        *(f(8, 6, 3, 3), f(6), f(6), c(6), u(6).detach(), 0.1, 1e-5),
        expect=("S1,S0,S0,S0,S0->S1,S0,S0", "S0,R*,R*,R,R->S0,R,R@batch_norm_sync"),
    )
    add(
        "batch_norm_plain",
        ops.batch_norm_train,
        f(8, 6),
        None,
        None,
        None,
        None,
        0.1,
        1e-5,
        expect=("S1->S1", "S0->S0@batch_norm_sync"),
    )
