"""One base, one export that is its base exactly (zeroed out-projections), one that is not; read only."""

import pytest

from megatron_patch.evaluation.evaluate import run
from megatron_patch.evaluation.loading import inspect_directory, load_model
from tests.evaluation.models import make_fake_export, make_talking_base, write_suite, write_talking_suite


@pytest.fixture(scope="session")
def zeroed_export(tiny_base, tmp_path_factory):
    return make_fake_export(tmp_path_factory.mktemp("zeroed") / "export", tiny_base, zeroed=True)


@pytest.fixture(scope="session")
def export(tiny_base, tmp_path_factory):
    return make_fake_export(tmp_path_factory.mktemp("random") / "export", tiny_base, zeroed=False)


@pytest.fixture(scope="session")
def suite(tmp_path_factory):
    return write_suite(tmp_path_factory.mktemp("suites") / "suite")


@pytest.fixture(scope="session")
def base_model(tiny_base):
    return load_model(inspect_directory(tiny_base))


@pytest.fixture(scope="session")
def zeroed_model(zeroed_export):
    return load_model(inspect_directory(zeroed_export))


@pytest.fixture(scope="session")
def export_model(export):
    return load_model(inspect_directory(export))


@pytest.fixture(scope="session")
def talking(tmp_path_factory):
    """A base, an export and a suite in which both are right in some rows: (base, export, suite)."""
    path = tmp_path_factory.mktemp("talking")
    base = make_talking_base(path / "base")
    export = make_fake_export(path / "export", base, zeroed=False)
    return base, export, write_talking_suite(path / "suite", export)


@pytest.fixture(scope="session")
def talking_evaluation(talking, tmp_path_factory):
    """The output directory of `evaluate` on them."""
    output = tmp_path_factory.mktemp("talking_evaluation") / "out"
    base, export, suite = talking
    assert run(base, export, suite, output, device="cpu") == 0
    return output
