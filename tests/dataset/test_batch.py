"""Batches slice, travel through transformations and know where documents begin."""

import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

import xlstm_jax.dataset
from xlstm_jax.dataset import Batch, LLMBatch, LLMIndexedBatch
from xlstm_jax.dataset import batch as batch_module
from xlstm_jax.dataset.batch import find_token_ranges

SEGMENTATION = np.array([[1, 1, 1, 1, 2, 2, 2, 0], [1, 1, 1, 2, 2, 0, 0, 0]], np.int32)
BORDERS = np.array([[1, 0, 0, 0, 1, 0, 0, 1], [1, 0, 0, 1, 0, 1, 0, 0]], bool)


def packed(numpy=np, **changes):
    tokens = numpy.arange(16, dtype=numpy.int32).reshape(2, 8)
    segmentation = numpy.asarray(SEGMENTATION)
    return LLMIndexedBatch(
        inputs=tokens,
        targets=tokens + 1,
        inputs_position=tokens + 2,
        inputs_segmentation=segmentation,
        targets_position=tokens + 3,
        targets_segmentation=segmentation,
        document_idx=numpy.array([3, 4]),
        sequence_idx=numpy.array([0, 1]),
        **changes,
    )


@pytest.mark.parametrize("numpy", [np, jnp], ids=["numpy", "jax"])
def test_borders_are_at_the_first_column_and_where_the_segmentation_changes(numpy):
    borders = packed(numpy).get_document_borders()
    np.testing.assert_array_equal(borders, BORDERS)
    assert borders.dtype == bool
    assert isinstance(borders, np.ndarray if numpy is np else jax.Array)


@pytest.mark.parametrize("numpy", [np, jnp], ids=["numpy", "jax"])
@pytest.mark.parametrize(
    ("key", "row_key"),
    [
        (slice(0, 1), slice(0, 1)),
        (1, 1),
        ((slice(None), slice(3, 6)), (slice(None),)),
        ((0, slice(2, None)), (0,)),
        ((slice(1, 2), 3), (slice(1, 2),)),
        (np.array([1, 0]), np.array([1, 0])),
    ],
)
def test_a_slice_takes_the_same_part_of_every_array(numpy, key, row_key):
    whole = packed(numpy)
    part = whole[key]
    assert type(part) is LLMIndexedBatch
    for name in ("inputs", "targets", "inputs_position", "inputs_segmentation", "targets_position"):
        np.testing.assert_array_equal(getattr(part, name), getattr(whole, name)[key])
    np.testing.assert_array_equal(part.get_document_borders(), BORDERS[key])
    np.testing.assert_array_equal(part.document_idx, whole.document_idx[row_key])
    np.testing.assert_array_equal(part.sequence_idx, whole.sequence_idx[row_key])


def test_a_slice_of_a_slice_keeps_the_borders_of_the_whole():
    assert not packed()[:, 1:][:, 1:].get_document_borders()[:, 0].any()


def test_a_plain_batch_slices_both_arrays():
    part = Batch(jnp.arange(6).reshape(3, 2), jnp.arange(3))[1:, 1]
    np.testing.assert_array_equal(part.inputs, [3, 5])
    np.testing.assert_array_equal(part.targets, [1, 2])


def test_given_borders_go_before_those_of_the_segmentation():
    given = ~BORDERS
    assert packed(_document_borders=given).get_document_borders() is given


@pytest.mark.parametrize("numpy", [np, jnp], ids=["numpy", "jax"])
def test_without_targets_the_inputs_are_shifted_right(numpy):
    tokens = numpy.array([[5, 6, 7], [8, 9, 10]])
    made = LLMBatch.from_inputs(tokens)
    np.testing.assert_array_equal(made.inputs, [[0, 5, 6], [0, 8, 9]])
    np.testing.assert_array_equal(made.targets, tokens)
    for position in (made.inputs_position, made.targets_position):
        np.testing.assert_array_equal(position, [[0, 1, 2], [0, 1, 2]])
    for segmentation in (made.inputs_segmentation, made.targets_segmentation):
        np.testing.assert_array_equal(segmentation, np.ones((2, 3)))
    np.testing.assert_array_equal(made.get_document_borders(), [[1, 0, 0], [1, 0, 0]])
    assert {leaf.dtype.name for leaf in jax.tree.leaves(made)} <= {"int32", tokens.dtype.name}
    assert all(isinstance(leaf, type(tokens)) for leaf in jax.tree.leaves(made))
    assert len(jax.tree.leaves(made)) == len({id(leaf) for leaf in jax.tree.leaves(made)}) == 6


def test_with_targets_the_inputs_stay_as_they_are():
    inputs, targets = jnp.array([[1, 2]]), jnp.array([[2, 3]])
    made = LLMIndexedBatch.from_inputs(inputs, jnp.array([4]), jnp.array([5]), targets=targets)
    assert type(made) is LLMIndexedBatch
    assert made.inputs is inputs
    assert made.targets is targets
    assert (made.document_idx, made.sequence_idx) == (4, 5)


@pytest.mark.parametrize(("cls", "num_rows_only"), [(LLMBatch, 0), (LLMIndexedBatch, 2)])
def test_a_sample_has_the_shapes_and_dtypes_that_were_announced(cls, num_rows_only):
    struct, sample = cls.get_dtype_struct(2, 5), cls.get_sample(2, 5)
    assert type(struct) is type(sample) is cls
    assert jax.eval_shape(lambda: sample) == struct
    shapes = [leaf.shape for leaf in jax.tree.leaves(struct)]
    assert sorted(shapes) == [(2,)] * num_rows_only + [(2, 5)] * 6
    assert all(leaf.dtype == jnp.int32 for leaf in jax.tree.leaves(struct))
    assert not sample.inputs.any()
    assert sample.targets_segmentation.all()


def test_shapes_alone_can_be_sliced_and_have_borders():
    struct = LLMIndexedBatch.get_dtype_struct(4, 6)
    assert struct.get_document_borders() == jax.ShapeDtypeStruct((4, 6), jnp.bool_)
    part = struct[1:3, :4]
    assert (part.inputs.shape, part.document_idx.shape, part.get_document_borders().shape) == ((2, 4), (2,), (2, 4))
    assert LLMBatch.from_inputs(struct.inputs) == LLMBatch.get_dtype_struct(4, 6)


def test_a_batch_travels_through_jit_and_scan():
    batch = packed(jnp)

    @jax.jit
    def borders_by_column(batch):
        columns = jax.tree.map(lambda x: x.T, batch[:, 2:])
        return jax.lax.scan(
            lambda carry, column: (carry, column.get_document_borders()),
            0,
            columns.replace(document_idx=jnp.zeros(6), sequence_idx=jnp.zeros(6)),
        )[1]

    np.testing.assert_array_equal(borders_by_column(batch).T, BORDERS[:, 2:])


def test_a_batch_travels_through_shard_map():
    mesh = jax.make_mesh((8,), ("dp",), axis_types=(jax.sharding.AxisType.Auto,))
    batch = LLMIndexedBatch.from_inputs(jnp.ones((8, 3), jnp.int32), jnp.arange(8), jnp.zeros(8))
    specs = jax.tree.map(lambda _: PartitionSpec("dp"), batch)
    sharded = jax.shard_map(
        lambda x: x.document_idx + x.get_document_borders().sum(),
        mesh=mesh,
        in_specs=(specs,),
        out_specs=PartitionSpec("dp"),
        check_vma=False,
    )
    np.testing.assert_array_equal(jax.jit(sharded)(batch), np.arange(8) + 1)


def test_further_fields_are_keyword_arguments():
    @batch_module.dataclass_kwonly
    class Weighted(Batch):
        weight: jax.Array

    assert len(jax.tree.leaves(Weighted(jnp.ones(1), jnp.ones(1), weight=jnp.ones(1)))) == 3
    with pytest.raises(TypeError):
        Weighted(jnp.ones(1), jnp.ones(1), jnp.ones(1))


def test_the_package_offers_its_names_lazily():
    for name in ("Batch", "LLMBatch", "LLMIndexedBatch"):
        assert getattr(xlstm_jax.dataset, name) is getattr(batch_module, name)
        assert name in dir(xlstm_jax.dataset)
    with pytest.raises(AttributeError, match="no attribute 'Bach'"):
        xlstm_jax.dataset.Bach  # noqa: B018


def test_importing_a_batch_imports_no_heavy_library():
    heavy = {"grain", "transformers", "orbax", "hydra", "wandb", "torch", "datasets", "tensorflow"}
    program = (
        "import sys, xlstm_jax.dataset\n"
        "assert 'xlstm_jax.dataset.batch' not in sys.modules\n"
        "from xlstm_jax.dataset import Batch\n"
        f"print(sorted({heavy!r} & set(sys.modules)))"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def token_batch(inputs, targets, inputs_segmentation, targets_segmentation):
    """Make a batch of one row on the host."""
    arrays = [np.array([row]) for row in (inputs, targets, inputs_segmentation, targets_segmentation)]
    positions = np.arange(len(inputs))[None]
    return LLMBatch(
        inputs=arrays[0],
        targets=arrays[1],
        inputs_segmentation=arrays[2],
        targets_segmentation=arrays[3],
        inputs_position=positions,
        targets_position=positions,
    )


def test_token_ids_count_where_the_segmentation_is_not_zero():
    batch = token_batch([7, 3, -5], [4, -100, 99], [1, 1, 0], [2, 0, 0])
    assert find_token_ranges(batch) == {"inputs": (3, 7), "targets": (4, 4)}
    assert find_token_ranges(jax.tree.map(jnp.asarray, batch)) == find_token_ranges(batch)
    batch = token_batch([7, 3, -5], [4, -100, 99], [1, 1, 2], [0, 0, 0])
    assert find_token_ranges(batch) == {"inputs": (-5, 7)}


def test_what_is_no_batch_of_tokens_has_no_token_ids():
    assert find_token_ranges(Batch(inputs=np.ones(3), targets=np.ones(3))) == {}
    assert find_token_ranges(LLMBatch.from_inputs(np.ones((1, 3)))) == {}
