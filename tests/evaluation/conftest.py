"""One base, one export that is its base exactly (zeroed out-projections), one that is not; read only."""

import pytest

from megatron_patch.evaluation.loading import inspect_directory, load_model
from tests.evaluation.models import make_fake_export, write_suite


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
