import os

import pytest


@pytest.fixture(scope="session", autouse=True)
def threads():
    """One thread: the same sums on every machine, and models this small are faster without the others."""
    import torch

    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def smollm2():
    """The small real model, in float32 on the CPU. On CI it has to be there."""
    import specdec
    from specdec.models.weights import WeightsUnavailable

    try:
        return specdec.load("smollm2-135m", device="cpu", dtype="float32")
    except WeightsUnavailable as error:
        if os.environ.get("CI") == "true":
            raise
        pytest.skip(f"the weights of smollm2-135m cannot be had: {error}")


def pytest_collection_modifyitems(items):
    for item in items:
        if "smollm2" in item.fixturenames:
            item.add_marker("weights")
