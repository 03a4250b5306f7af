"""The mathematics: pure functions on pytrees. No files, no flags, no printing."""

from collections.abc import Callable

from core import dropout, hmc, implicit, sgd, sgmcmc, vi
from core.method import Method

# Every method, by name: built as METHODS[name](log_joint, **settings), all settings optional.
# The contract tests iterate over this table.
METHODS: dict[str, Callable[..., Method]] = {
    "sgd": sgd.sgd,
    "hmc": hmc.hmc,
    "sgmcmc": sgmcmc.sgmcmc,
    "implicit": implicit.implicit,
    "mean_field_vi": vi.mean_field_vi,
    "mc_dropout": dropout.mc_dropout,
}
