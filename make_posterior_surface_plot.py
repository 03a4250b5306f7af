"""Log-density, log-likelihood and log-prior on the plane through three checkpoints.

python make_posterior_surface_plot.py --checkpoint1=runs/hmc/x@0 --checkpoint2=runs/hmc/x@1 \\
  --checkpoint3=runs/sgd/y                 a run's folder or a .safetensors file; @1: second chain
"""

import pathlib

import jax
import numpy as np
from absl import flags

from haiku_posteriors.core import surface
from haiku_posteriors.core.errors import UserError
from haiku_posteriors.core.log_joint import LogJoint
from haiku_posteriors.core.trees import Params
from haiku_posteriors.utils import checkpoint_utils, cmd_args_utils, devices, script_utils
from haiku_posteriors.utils.plots.surface import draw_surfaces
from haiku_posteriors.utils.report import run_folders

FLAGS = flags.FLAGS

cmd_args_utils.define_common_flags()
flags.adopt_module_key_flags(cmd_args_utils)
flags.DEFINE_float("limit_bottom", -0.25, "Lower end of the picture.")
flags.DEFINE_float("limit_left", -0.25, "Left end of the picture.")
flags.DEFINE_float("limit_top", 1.25, "Upper end; the third checkpoint is at height 1.")
flags.DEFINE_float("limit_right", 1.25, "Right end; the second checkpoint is at 1.")
flags.DEFINE_integer("grid_size", 20, "Points in each direction.", lower_bound=2)
for number, place in enumerate(("the origin", "the right, at (1, 0)", "the top"), start=1):
    flags.DEFINE_string(
        f"checkpoint{number}", None, f"Run folder or .safetensors file of the point at {place}."
    )
flags.DEFINE_bool("pdf", False, "Write a PDF beside the PNG.")

POINTS_AT_ONCE = 10


def split_name(name: str | None) -> tuple[pathlib.Path, int | None]:
    """A path, and the number of the chain after an @."""
    if not name:
        raise UserError("Three points are needed: checkpoint1, checkpoint2 and checkpoint3.")
    path, _, chain = name.rpartition("@")
    if path and chain.isdigit():
        return pathlib.Path(path).expanduser(), int(chain)
    return pathlib.Path(name).expanduser(), None


def load_point(name: str, log_joint: LogJoint) -> Params:
    """The parameters that a flag names: the last draw of a chain."""
    path, chain = split_name(name)
    template = jax.eval_shape(log_joint.init, jax.random.key(0))
    params = checkpoint_utils.load_params(path, template)
    found = jax.tree.leaves(params)[0].shape[0]
    if (chain or 0) >= found or (chain is None and found > 1):
        raise UserError(
            f"{path} holds {found} sets of parameters: choose one of {path}@0 to @{found - 1}."
        )
    return jax.tree.map(lambda leaf: leaf[chain or 0], params)


def main() -> None:
    """Evaluates the grid in one program, and leaves picture and numbers."""
    names = [FLAGS.checkpoint1, FLAGS.checkpoint2, FLAGS.checkpoint3]
    folders = [split_name(name)[0] for name in names]
    if (folders[0] / "flags.json").is_file():
        for name, value in run_folders.read_flags(folders[0]).items():
            if name in FLAGS and name != "dir" and not FLAGS[name].present:
                FLAGS[name].value = value
        jax.config.update("jax_enable_x64", FLAGS.use_float64)
    if FLAGS.limit_left >= FLAGS.limit_right or FLAGS.limit_bottom >= FLAGS.limit_top:
        raise UserError("limit_left must be below limit_right, and limit_bottom below limit_top.")
    log_joint, dataset = script_utils.load_problem()
    plane = surface.make_plane(*(load_point(name, log_joint) for name in names))
    first = np.linspace(FLAGS.limit_left, FLAGS.limit_right, FLAGS.grid_size)
    second = np.linspace(FLAGS.limit_bottom, FLAGS.limit_top, FLAGS.grid_size)
    grid = np.stack(np.meshgrid(first, second), axis=-1)
    mesh = devices.make_mesh(1)
    data = devices.place_data(dataset.x_train, dataset.y_train, mesh, log_joint.num_microbatches)
    log_prior, log_likelihood = (
        values.reshape(grid.shape[:2])
        for values in surface.evaluate(
            log_joint, data, plane, grid.reshape(-1, 2), at_once=POINTS_AT_ONCE
        )
    )
    surfaces = {
        "log-density": log_prior.astype(np.float64) + log_likelihood,
        "log-likelihood": log_likelihood,
        "log-prior": log_prior,
    }
    directory = pathlib.Path(FLAGS.dir or "runs/surface_plots")
    checkpoint_utils.write_arrays(
        directory / "surface.npz",
        first=first,
        second=second,
        lengths=plane.lengths,
        points=plane.points,
        **{name.replace("-", "_"): values for name, values in surfaces.items()},
    )
    pictures = [directory / f"surface.{kind}" for kind in ("png", "pdf")[: 1 + FLAGS.pdf]]
    for path in pictures:
        draw_surfaces(path, surfaces, first, second, plane.points, plane.lengths)
    print(f"Points at {plane.points.round(3).tolist()}, in units of {plane.lengths.round(3)}.")
    print(f"Pictures: {', '.join(map(str, pictures))}; numbers: {directory / 'surface.npz'}")


if __name__ == "__main__":
    script_utils.run_script(main)
