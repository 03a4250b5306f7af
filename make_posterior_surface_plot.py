"""Log-density, log-likelihood and log-prior on the plane through three checkpoints.

python make_posterior_surface_plot.py --checkpoint1=runs/hmc/x@0 --checkpoint2=runs/hmc/x@1 \\
  --checkpoint3=runs/sgd/y                 a run's folder or a .safetensors file; @1: second chain
"""

import pathlib
from collections.abc import Sequence

import jax
import numpy as np

from haiku_posteriors.core import surface
from haiku_posteriors.core.errors import UserError
from haiku_posteriors.core.log_joint import LogJoint
from haiku_posteriors.core.trees import Params
from haiku_posteriors.utils import (
    checkpoint_utils,
    cmd_args_utils,
    devices,
    files,
    script_utils,
    tasks,
)
from haiku_posteriors.utils.cmd_args_utils import Flag
from haiku_posteriors.utils.plots.surface import draw_surfaces
from haiku_posteriors.utils.settings import Settings

FLAGS = (
    Flag("limit_bottom", "float", -0.25, "Lower end of the picture."),
    Flag("limit_left", "float", -0.25, "Left end of the picture."),
    Flag("limit_top", "float", 1.25, "Upper end; the third checkpoint is at height 1."),
    Flag("limit_right", "float", 1.25, "Right end; the second checkpoint is at 1."),
    Flag("grid_size", "integer", 20, "Points in each direction.", lower_bound=2),
    *(
        Flag(
            f"checkpoint{number}",
            "path",
            None,
            f"Run folder or .safetensors file of the point at {place}.",
        )
        for number, place in enumerate(("the origin", "the right, at (1, 0)", "the top"), start=1)
    ),
    Flag("pdf", "bool", False, "Write a PDF beside the PNG."),
)
GROUPS = {
    "Data": cmd_args_utils.DATA,
    "Model": cmd_args_utils.MODEL,
    "Run": cmd_args_utils.RUN,
    "Plane": FLAGS,
}

POINTS_AT_ONCE = 10


def split_name(name: str | None) -> tuple[pathlib.Path, int | None]:
    """A path, and the number of the chain after an @."""
    if not name:
        raise UserError("Three points are needed: checkpoint1, checkpoint2 and checkpoint3.")
    path, _, chain = name.rpartition("@")
    if path and chain.isdigit():
        return pathlib.Path(path), int(chain)
    return pathlib.Path(name), None


def load_point(name: str, log_joint: LogJoint) -> Params:
    """The parameters that a flag names: the last draw of a chain."""
    path, chain = split_name(name)
    params = checkpoint_utils.load_params(path, log_joint.shapes)
    found = jax.tree.leaves(params)[0].shape[0]
    if (chain or 0) >= found or (chain is None and found > 1):
        raise UserError(
            f"{path} holds {found} sets of parameters: choose one of {path}@0 to @{found - 1}."
        )
    return jax.tree.map(lambda leaf: leaf[chain or 0], params)


def with_flags_of(folder: pathlib.Path, settings: Settings) -> Settings:
    """The settings, with flags that were not given taken from a run's folder."""
    if not (folder / "flags.json").is_file():
        return settings
    own = files.read_json(folder / "flags.json")
    taken = {
        name: own[name]
        for name in settings.values
        if name in own and name != "dir" and not settings.was_given(name)
    }
    sources = dict.fromkeys(taken, f"flags.json of {folder}")
    return Settings({**settings.values, **taken}, {**settings.sources, **sources})


def run(settings: Settings) -> None:
    """Evaluates the grid in one program, and leaves picture and numbers."""
    names = [settings.checkpoint1, settings.checkpoint2, settings.checkpoint3]
    folders = [split_name(name)[0] for name in names]
    settings = with_flags_of(folders[0], settings)
    jax.config.update("jax_enable_x64", settings.use_float64)
    if settings.limit_left >= settings.limit_right or settings.limit_bottom >= settings.limit_top:
        raise UserError("limit_left must be below limit_right, and limit_bottom below limit_top.")
    task = tasks.load_task("surface", settings)
    tasks.show_if_asked(task.settings)
    log_joint, dataset = task.log_joint, task.dataset
    plane = surface.make_plane(*(load_point(name, log_joint) for name in names))
    first = np.linspace(settings.limit_left, settings.limit_right, settings.grid_size)
    second = np.linspace(settings.limit_bottom, settings.limit_top, settings.grid_size)
    grid = np.stack(np.meshgrid(first, second), axis=-1)
    data = devices.place_data(
        dataset.x_train, dataset.y_train, devices.make_mesh(1), log_joint.num_microbatches
    )
    log_prior, log_likelihood = (
        values.reshape(grid.shape[:2])
        for values in surface.evaluate_on_plane(
            log_joint, data, plane, grid.reshape(-1, 2), at_once=POINTS_AT_ONCE
        )
    )
    surfaces = {
        "log-density": log_prior.astype(np.float64) + log_likelihood,
        "log-likelihood": log_likelihood,
        "log-prior": log_prior,
    }
    directory = pathlib.Path(settings.dir or "runs/surface_plots")
    files.write_arrays(
        directory / "surface.npz",
        first=first,
        second=second,
        lengths=plane.lengths,
        points=plane.points,
        **{name.replace("-", "_"): values for name, values in surfaces.items()},
    )
    pictures = [directory / f"surface.{kind}" for kind in ("png", "pdf")[: 1 + settings.pdf]]
    for path in pictures:
        draw_surfaces(
            path,
            surfaces,
            first,
            second,
            plane.points,
            plane.lengths,
            [*map(files.readable, names)],
        )
    print(f"Points at {plane.points.round(3).tolist()}, in units of {plane.lengths.round(3)}.")
    print(f"Pictures: {', '.join(map(str, pictures))}; numbers: {directory / 'surface.npz'}")


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the script."""
    script_utils.run_script(run, GROUPS, __doc__, arguments)


if __name__ == "__main__":
    main()
