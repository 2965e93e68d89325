"""A stop-gradient in DDP: torch refuses parameters without a gradient, and the audit says which these are."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import gradsurgery as gs

from .nets import Net, Patient
from .outcome import assert_right, rows, step

pytestmark = pytest.mark.filterwarnings("ignore:.*(c10d|unused parameters).*")


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


@pytest.mark.usefixtures("alone")
def test_a_stop_in_ddp() -> None:
    model = gs.insert_stop_gradient(DistributedDataParallel(Net()), "plain")
    audit = str(gs.audit(model, rows()))
    assert "can no longer train: enc.weight, plain.fc.weight" in audit
    step(model, rows())
    with pytest.raises(RuntimeError, match=r"find_unused_parameters=True[\s\S]*did not receive grad for rank 0: 0 1"):
        step(model, rows())
    model = gs.insert_stop_gradient(DistributedDataParallel(Net(), find_unused_parameters=True), "plain")
    right = step(Patient("StopGradient", "plain module").by_hand(), rows())
    for _ in range(2):
        assert_right(step(model, rows()), right)
    model = gs.insert_stop_gradient(Net(), "plain")
    model.get_submodule("enc").requires_grad_(False)
    model.get_submodule("plain").requires_grad_(False)
    ddp = DistributedDataParallel(model)
    for _ in range(2):
        found = step(ddp, rows())
    assert torch.equal(found["head.weight"], right["head.weight"])
