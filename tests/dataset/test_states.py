"""States that no iterator returned are refused in a line that says what is missing."""

import grain
import pytest
from dataset.order.test_batches import make_batches
from dataset.tasks.test_batches import PARITY
from dataset.test_synthetic_dataloading import make_iterator
from meshes import make_mesh

from xlstm_jax.dataset import FormalTaskDataConfig
from xlstm_jax.dataset.grain_batch_rampup import BatchRampUpIterDataset, constant_rampup_schedule
from xlstm_jax.dataset.multihost_dataloading import MultiHostDataLoadIterator
from xlstm_jax.dataset.tasks.batches import TaskBatches

ITERATORS = {
    "synthetic": make_iterator,
    "task": lambda: TaskBatches(FormalTaskDataConfig(**PARITY)),
    "ordered": make_batches,
    "rampup": lambda: iter(
        BatchRampUpIterDataset(grain.MapDataset.range(4).to_iter_dataset(), constant_rampup_schedule(2))
    ),
    "multihost": lambda: MultiHostDataLoadIterator([{}], make_mesh(), iterator_length=1),
}


@pytest.mark.parametrize("name", ITERATORS)
def test_a_state_without_entries_is_refused(name):
    with pytest.raises(ValueError, match=r"The state has no entries, but needs '.*pass what get_state"):
        ITERATORS[name]().set_state({})


@pytest.mark.usefixtures("unchecked_shapes")
def test_a_state_that_is_no_dictionary_is_refused():
    with pytest.raises(ValueError, match="The state is a NoneType, but must be a dictionary"):
        make_iterator().set_state(None)


def test_the_state_of_a_loader_that_cannot_tell_its_place_needs_its_number():
    with pytest.raises(ValueError, match="The state has no entries, but needs 'num_drawn'"):
        ITERATORS["multihost"]().set_state({"step": 0, "iterator_length": 1, "iterator": {}})
