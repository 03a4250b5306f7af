"""Generators from YAML: the files we ship, and files that are wrong."""

import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from haiku_posteriors.core.errors import UserError
from haiku_posteriors.core.implicit import generators
from haiku_posteriors.core.likelihoods import categorical
from haiku_posteriors.core.log_joint import make_log_joint
from haiku_posteriors.core.priors import make_prior
from haiku_posteriors.utils import models
from haiku_posteriors.utils.stages import generator_files

CONFIGS = pathlib.Path(__file__).resolve().parents[2] / "configs"
SHAPES = {"layer": {"w": jax.ShapeDtypeStruct((3, 4), jnp.float32)}}


@pytest.mark.parametrize(
    ("name", "network", "inputs", "classes", "latent", "weights", "parameters"),
    [
        ("mnist_mlp", "mlp_400_400", (28, 28, 1), 10, 1600, 478_410, 650_570),
        ("mnist_lenet", "lenet5", (28, 28, 1), 10, 4225, 44_426, 176_766),
        ("wide_resnet_16_4", "wide_resnet_16_4", (32, 32, 3), 10, 9025, 2_750_698, 5_964_738),
        ("wide_resnet_28_10", "wide_resnet_28_10", (32, 32, 3), 100, 2025, 36_545_860, 44_288_470),
    ],
)
def test_files_make_the_generators_they_say(
    name, network, inputs, classes, latent, weights, parameters
):
    log_joint = make_log_joint(
        models.get_network(network, classes),
        np.zeros((1, *inputs), np.float32),
        make_prior(1.0),
        categorical(classes),
    )
    shapes = log_joint.shapes
    description = generator_files.describe(str(CONFIGS / f"{name}.yaml"), shapes)
    generator = generators.make_generator(description, shapes)
    assert (generator.latent_size, generator.num_weights) == (latent, weights)
    assert generators.num_parameters(generator, shapes) == parameters


def test_every_file_loads():
    for path in CONFIGS.glob("*.yaml"):
        assert generator_files.describe(str(path), SHAPES)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("kind: [", "is no YAML"),
        ("- 3", "needs a line 'kind: mlp' or 'kind: matrix'"),
        ("kind: flow", "needs a line 'kind: mlp' or 'kind: matrix'"),
        ("kind: mlp\nlatent_size: 3\nwidth: 2", "'width' is none of latent_size"),
        ("kind: mlp\nhidden_sizes: [3]", "lacks 'latent_size'"),
        ("kind: mlp\nlatent_size: large", "'latent_size: large' is not of the form"),
        ("kind: matrix\nlatent_shape: [3]\ntrunk: []", "'latent_shape: [3]' is not of the form"),
        ("kind: matrix\nlatent_shape: [3, 3]\ntrunk: [3]", "'trunk: [3]' is not of the form"),
    ],
)
def test_wrong_files_are_one_sentence(text, sentence, tmp_path):
    path = tmp_path / "generator.yaml"
    path.write_text(text)
    with pytest.raises(UserError) as error:
        generator_files.describe(str(path), SHAPES)
    assert sentence in str(error.value)
