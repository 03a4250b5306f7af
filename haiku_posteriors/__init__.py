"""Functional inference for Bayesian neural networks in JAX and Haiku, measured against HMC.

The public names are those of `__all__`. Each is imported when it is first used, so that importing
the package itself costs nothing and starts nothing: no JAX, no files, no devices.
"""

import importlib
from typing import TYPE_CHECKING, Any

from haiku_posteriors.version import __version__

if TYPE_CHECKING:
    from haiku_posteriors.core import METHODS, likelihoods
    from haiku_posteriors.core.data import Data, make_data
    from haiku_posteriors.core.dropout import mc_dropout
    from haiku_posteriors.core.errors import UserError
    from haiku_posteriors.core.gaussian_dropout import gaussian_dropout
    from haiku_posteriors.core.hmc import hmc
    from haiku_posteriors.core.implicit.implicit_vi import implicit_vi
    from haiku_posteriors.core.laplace import laplace
    from haiku_posteriors.core.layerwise.layerwise_vi import layerwise_vi
    from haiku_posteriors.core.log_joint import LogJoint, make_log_joint
    from haiku_posteriors.core.low_rank import low_rank_vi
    from haiku_posteriors.core.mclmc import mclmc
    from haiku_posteriors.core.method import Method
    from haiku_posteriors.core.multiplicative_flows import multiplicative_flow_vi
    from haiku_posteriors.core.priors import make_prior
    from haiku_posteriors.core.sgd import sgd
    from haiku_posteriors.core.sgmcmc import sgmcmc
    from haiku_posteriors.core.smc import smc
    from haiku_posteriors.core.swag import swag
    from haiku_posteriors.core.vi import mean_field_vi
    from haiku_posteriors.utils.data_utils import from_arrays
    from haiku_posteriors.utils.data_utils import load as load_dataset
    from haiku_posteriors.utils.datasets.own_tables import TableOptions
    from haiku_posteriors.utils.report.arviz_export import to_arviz
    from haiku_posteriors.utils.report.loaded_runs import load_run
    from haiku_posteriors.utils.train_utils import Run, RunResult

__all__ = [
    "METHODS",
    "Data",
    "LogJoint",
    "Method",
    "Run",
    "RunResult",
    "TableOptions",
    "UserError",
    "__version__",
    "from_arrays",
    "gaussian_dropout",
    "hmc",
    "implicit_vi",
    "laplace",
    "layerwise_vi",
    "likelihoods",
    "load_dataset",
    "load_run",
    "low_rank_vi",
    "make_data",
    "make_log_joint",
    "make_prior",
    "mc_dropout",
    "mclmc",
    "mean_field_vi",
    "multiplicative_flow_vi",
    "sgd",
    "sgmcmc",
    "smc",
    "swag",
    "to_arviz",
]

# Where each name is defined, "module" or "module:name"; what type checkers read stands above.
_HOMES = {
    "METHODS": "core:METHODS",
    "Data": "core.data:Data",
    "LogJoint": "core.log_joint:LogJoint",
    "Method": "core.method:Method",
    "Run": "utils.train_utils:Run",
    "RunResult": "utils.train_utils:RunResult",
    "TableOptions": "utils.datasets.own_tables:TableOptions",
    "UserError": "core.errors:UserError",
    "from_arrays": "utils.data_utils:from_arrays",
    "gaussian_dropout": "core.gaussian_dropout:gaussian_dropout",
    "hmc": "core.hmc:hmc",
    "implicit_vi": "core.implicit.implicit_vi:implicit_vi",
    "laplace": "core.laplace:laplace",
    "layerwise_vi": "core.layerwise.layerwise_vi:layerwise_vi",
    "likelihoods": "core.likelihoods",
    "load_dataset": "utils.data_utils:load",
    "load_run": "utils.report.loaded_runs:load_run",
    "low_rank_vi": "core.low_rank:low_rank_vi",
    "make_data": "core.data:make_data",
    "make_log_joint": "core.log_joint:make_log_joint",
    "make_prior": "core.priors:make_prior",
    "mc_dropout": "core.dropout:mc_dropout",
    "mclmc": "core.mclmc:mclmc",
    "mean_field_vi": "core.vi:mean_field_vi",
    "multiplicative_flow_vi": "core.multiplicative_flows:multiplicative_flow_vi",
    "sgd": "core.sgd:sgd",
    "sgmcmc": "core.sgmcmc:sgmcmc",
    "smc": "core.smc:smc",
    "swag": "core.swag:swag",
    "to_arviz": "utils.report.arviz_export:to_arviz",
}


def __getattr__(name: str) -> Any:
    """Imports a public name at its first use (PEP 562)."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, _, attribute = _HOMES[name].partition(":")
    value: Any = importlib.import_module(f"{__name__}.{module}")
    if attribute:
        value = getattr(value, attribute)
    globals()[name] = value  # the next use finds it without coming here
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
