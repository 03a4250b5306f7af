"""The mathematics: pure functions on pytrees. No files, no flags, no printing."""

import functools
from collections.abc import Callable

if __name__ == "core":  # a module loaded under two names is two modules
    raise ImportError("Import haiku_posteriors.core; core alone is not an import name.")

from haiku_posteriors.core import (
    dropout,
    gaussian_dropout,
    hmc,
    laplace,
    low_rank,
    mclmc,
    multiplicative_flows,
    sgd,
    sgmcmc,
    smc,
    swag,
    vi,
)
from haiku_posteriors.core.implicit import implicit_vi
from haiku_posteriors.core.layerwise import layerwise_vi
from haiku_posteriors.core.method import Method

# Every method, by name: built as METHODS[name](log_joint, **settings), all settings optional.
# The contract tests iterate over this table.
METHODS: dict[str, Callable[..., Method]] = {
    "sgd": sgd.sgd,
    "hmc": hmc.hmc,
    "mclmc": mclmc.mclmc,
    "adjusted_mclmc": functools.partial(mclmc.mclmc, adjusted=True),
    "sgmcmc": sgmcmc.sgmcmc,
    "smc": smc.smc,
    "implicit": implicit_vi.implicit_vi,
    "mean_field_vi": vi.mean_field_vi,
    "low_rank_vi": low_rank.low_rank_vi,
    "mnf_vi": multiplicative_flows.multiplicative_flow_vi,
    "layerwise_vi": layerwise_vi.layerwise_vi,
    "laplace": laplace.laplace,
    "swag": swag.swag,
    "mc_dropout": dropout.mc_dropout,
    "gaussian_dropout": gaussian_dropout.gaussian_dropout,
}
