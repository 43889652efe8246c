"""Evaluations of a small model: when they run, what they are given, and the errors of wrong ones."""

import json
import logging

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from meshes import make_mesh
from trainer.callbacks.evaluations import TOLERANCE, placed
from trainer.runs import ROWS

from xlstm_jax.common_types import TrainState
from xlstm_jax.configs import ConfigError
from xlstm_jax.dataset.batch import Batch
from xlstm_jax.distributed.mesh_utils import ParallelConfig
from xlstm_jax.models.configs import ModelConfig
from xlstm_jax.trainer.base.config import TrainerConfig
from xlstm_jax.trainer.base.trainer import TrainerModule
from xlstm_jax.trainer.callbacks.extended_evaluation import (
    EvalState,
    ExtendedEvaluation,
    ExtendedEvaluationConfig,
)
from xlstm_jax.trainer.data_module import DataloaderModule
from xlstm_jax.trainer.logger.base_logger import LoggerConfig
from xlstm_jax.trainer.optimizer.optimizer import OptimizerConfig

pytestmark = pytest.mark.slow


class Regression(nn.Module):
    """A layer beside a variable that is no parameter."""

    config: ModelConfig

    @nn.compact
    def __call__(self, x, train=False):
        scale = self.variable("statistics", "scale", lambda: 2 * jnp.ones(()))
        return scale.value * nn.Dense(1, name="layer")(x)


class RegressionTrainer(TrainerModule):
    """Trains it."""

    def loss_function(self, params, apply_fn, batch, rng, train=True, mutable_variables=None):
        errors = apply_fn({"params": params, **mutable_variables}, batch.inputs) - batch.targets
        loss = jnp.mean(jnp.square(errors))
        return loss, ({"loss": loss}, mutable_variables)


class Errors(ExtendedEvaluation):
    """Reports the errors of rows and their mean, and keeps what its hooks are told."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.calls = []

    def eval_function(self, params, apply_fn, batch, rng, mutable_variables=None):
        errors = apply_fn({"params": params, **mutable_variables}, batch.inputs) - batch.targets
        metrics = {
            "error": {"value": jnp.sum(errors), "count": errors.size},
            "rows": {"value": errors[:, 0], "log_modes": ["single_noreduce"]},
            "scale": mutable_variables["statistics"]["scale"],
            "draw": jax.random.uniform(rng),
        }
        return metrics, None

    def on_extended_evaluation_start(self):
        self.calls.append("start")

    def on_extended_evaluation_end(self, final_metrics):
        self.calls.append(final_metrics)


def regression_batch(seed, rows=ROWS):
    inputs, targets = np.random.default_rng(seed).normal(size=(2, rows, 1)).astype(np.float32)
    return Batch(inputs=inputs, targets=targets)


def regression_trainer(sizes=None, *, path=None, **options):
    """Build a trainer of the small model; it has no callbacks."""
    return RegressionTrainer(
        TrainerConfig(enable_progress_bar=False, logger=LoggerConfig(log_path=path), **options),
        ModelConfig(model_class=Regression, parallel=ParallelConfig()),
        OptimizerConfig(name="adam"),
        regression_batch(0),
        mesh=make_mesh(**(sizes or {})),
    )


def evaluation_of(trainer, kind=Errors, **options):
    """Add an evaluation to a trainer."""
    evaluation = kind(ExtendedEvaluationConfig(**options), trainer)
    trainer.callbacks.append(evaluation)
    return evaluation


def expected_errors(trainer, batches):
    layer = jax.tree.map(lambda x: np.array(x, np.float64), trainer.state.params)["layer"]
    return np.concatenate([2 * (x.inputs @ layer["kernel"] + layer["bias"]) - x.targets for x in batches])[:, 0]


def read_rows(path, mode):
    return [json.loads(line) for line in (path / f"file_logs/metrics_{mode}.jsonl").read_text().splitlines()]


BATCHES = [regression_batch(seed) for seed in (1, 2, 3)]


def test_a_run_evaluates_before_validations_and_tests_and_logs_the_results(tmp_path):
    trainer = regression_trainer({"dp": 2}, path=tmp_path)
    evaluation_of(trainer, log_mode="errors")
    evaluation_of(trainer, log_mode="never", every_n_epochs=-1)
    evaluation_of(trainer, log_mode="second", every_n_epochs=2)
    trainer.train_model(BATCHES, BATCHES[:2], BATCHES[2:], num_epochs=2)
    logged = read_rows(tmp_path, "val_errors")
    assert [(row["log_step"], row["log_epoch"]) for row in logged] == [(3, 1), (6, 2)]
    np.testing.assert_allclose(logged[1]["rows_single_noreduce"], expected_errors(trainer, BATCHES[:2]), **TOLERANCE)
    np.testing.assert_allclose(logged[1]["error"], expected_errors(trainer, BATCHES[:2]).mean(), **TOLERANCE)
    assert logged[1]["epoch_time"] > 0
    (tested,) = read_rows(tmp_path, "test_errors")
    np.testing.assert_allclose(tested["error"], expected_errors(trainer, BATCHES[2:]).mean(), **TOLERANCE)
    assert [row["log_epoch"] for row in read_rows(tmp_path, "val_second")] == [2]
    assert not list(tmp_path.rglob("*never*"))


def test_all_evaluations_of_a_run_are_one_program(tmp_path):
    trainer = regression_trainer({"dp": 2}, path=tmp_path, check_val_every_n_steps=1)
    evaluation = evaluation_of(trainer)
    batches = placed(BATCHES, trainer)
    evaluation.eval_model(batches)
    trainer.train_model(batches, batches, num_epochs=1)
    assert len({row["error"] for row in read_rows(tmp_path, "val_extended")}) == len(BATCHES)
    assert evaluation.eval_step._cache_size() == 1


def test_data_sets_by_name_have_their_names_in_front(tmp_path):
    trainer = regression_trainer(path=tmp_path)
    evaluation = evaluation_of(trainer)
    trainer.train_model(BATCHES, {"a": BATCHES[:1], "b": BATCHES[1:]}, num_epochs=1)
    (row,) = read_rows(tmp_path, "val_extended")
    for name, batches in {"a": BATCHES[:1], "b": BATCHES[1:]}.items():
        np.testing.assert_allclose(row[f"{name}_error"], expected_errors(trainer, batches).mean(), **TOLERANCE)
        assert len(row[f"{name}_rows_single_noreduce"]) == ROWS * len(batches)
    assert evaluation.calls == ["start", evaluation.calls[1]]


def test_hooks_are_called_with_what_an_evaluation_returns():
    evaluation = evaluation_of(regression_trainer())
    metrics = evaluation.eval_model(iter(BATCHES), mode="test", epoch_idx=3)
    assert evaluation.calls[0] == "start"
    assert evaluation.calls[1] is metrics


class Counting:
    """A loader that continues through its data: its batches depend on its position."""

    def __init__(self):
        self.position = 0

    def __iter__(self):
        for _ in range(2):
            self.position += 1
            yield regression_batch(self.position)

    def get_state(self):
        return {"position": self.position}

    def set_state(self, state):
        self.position = state["position"]


@pytest.mark.parametrize("named", [False, True])
def test_a_validation_sees_the_same_data_with_and_without_an_evaluation_before_it(named):
    results = []
    for has_evaluation in (False, True):
        trainer = regression_trainer()
        if has_evaluation:
            evaluation_of(trainer)
        loader = {"a": Counting(), "b": BATCHES} if named else Counting()
        results.append(trainer.train_model(BATCHES, loader, num_epochs=2))
    name = "a_loss" if named else "loss"
    assert [x[name] for x in results[0].values()] == [x[name] for x in results[1].values()]


def test_variables_that_are_no_parameters_are_given_where_they_are_asked_for():
    metrics = evaluation_of(regression_trainer()).eval_model(BATCHES)
    assert metrics["scale"] == 2


def test_a_debugging_run_compiles_nothing_and_finds_the_same_numbers():
    expected, found = (evaluation_of(regression_trainer({"dp": 2}, debug=debug)) for debug in (False, True))
    assert not hasattr(found.eval_step, "lower")
    assert expected.eval_model(BATCHES[:2]).keys() == found.eval_model(BATCHES[:2]).keys()
    for name, value in expected.calls[1].items():
        np.testing.assert_allclose(found.calls[1][name], value, rtol=1e-6)


def test_all_batches_get_the_key_of_the_seed():
    evaluation = evaluation_of(regression_trainer({"dp": 2}, seed_eval=5))
    np.testing.assert_allclose(evaluation.eval_model(BATCHES)["draw"], jax.random.uniform(jax.random.PRNGKey(5)))


def test_a_program_of_an_evaluation_has_no_optimizer_state():
    trainer = regression_trainer()
    evaluation = evaluation_of(trainer)
    step, states = evaluation.eval_step, []

    def spy(state, *others):
        states.append(state)
        return step(state, *others)

    evaluation.eval_step = spy
    whole = evaluation.eval_model(BATCHES)
    assert all(isinstance(state, EvalState) for state in states)
    names = {jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_flatten_with_path(states[0])[0]}
    variables = {".mutable_variables['statistics']['scale']"}
    assert names == {".step", ".rng", ".params['layer']['kernel']", ".params['layer']['bias']"} | variables
    trainer.state = trainer.state.replace(opt_state=None)
    assert evaluation.eval_model(BATCHES)["error"] == whole["error"]


def test_a_step_takes_train_states_too():
    trainer = regression_trainer()
    evaluation = evaluation_of(trainer)
    metrics = evaluation.eval_step(trainer.state, BATCHES[0], None)
    expected = expected_errors(trainer, BATCHES[:1]).mean()
    np.testing.assert_allclose(evaluation.finalize_metrics(metrics)["error"], expected, **TOLERANCE)


def test_an_eval_state_is_made_of_a_train_state_or_of_its_parts():
    state = TrainState.create(apply_fn=len, params={"w": jnp.ones(2)}, tx=optax.adam(0.1), rng=jax.random.key(0))
    made = EvalState.from_train_state(train_state=state.replace(mutable_variables={"a": 1}))
    assert made.params is state.params
    assert (made.step, made.apply_fn, made.mutable_variables) == (0, len, {"a": 1})
    assert made == EvalState.create(apply_fn=len, params=state.params, rng=state.rng, mutable_variables={"a": 1})
    assert EvalState.create(apply_fn=len, params={}, rng=state.rng, step=7).step == 7


def test_metrics_before_the_first_batch_are_zeros_of_the_shapes_of_any_batch():
    evaluation = evaluation_of(regression_trainer({"dp": 2}))
    assert evaluation.init_eval_metrics()["rows"]["single_noreduce"]["value"].shape == (ROWS,)
    metrics = evaluation.init_eval_metrics(regression_batch(0, rows=6))
    assert metrics["rows"]["single_noreduce"]["value"].tolist() == [0] * 6
    assert evaluation.eval_step._cache_size() == 0


def test_shapes_can_be_those_of_another_step():
    evaluation = evaluation_of(regression_trainer())
    metrics = evaluation.init_eval_metrics(BATCHES[0], lambda state, batch, metrics: {"x": {"y": batch.inputs}})
    assert jax.tree.map(jnp.shape, metrics) == {"x": {"y": (ROWS, 1)}}
    assert "error" in evaluation.init_eval_metrics(BATCHES[0])


def test_the_example_batch_can_be_changed():
    class Larger(Errors):
        def create_modified_exemplary_batch(self, exmp_batch):
            return regression_batch(0, rows=2 * exmp_batch.inputs.shape[0])

    evaluation = evaluation_of(regression_trainer(), Larger)
    assert evaluation.init_eval_metrics()["rows"]["single_noreduce"]["value"].shape == (2 * ROWS,)


def returning(result):
    """Make an evaluation whose function returns something."""

    class Returning(ExtendedEvaluation):
        def eval_function(self, params, apply_fn, batch, rng):
            return result(batch) if callable(result) else result

    return Returning


KEPT = ["single_noreduce"]


WRONG = {
    "no tuple": ({"error": 1.0, "rows": 2.0}, r"\(metrics, mutable_variables\).*It returned a dict"),
    "a loss too": ((1.0, ({}, None)), r"It returned \(a float, \(a dict, a NoneType\)\)"),
    "rows without a count": (lambda batch: ({"error": batch.inputs[:, 0]}, None), "'error' has a value of shape .16,."),
    "one count for rows": (lambda batch: ({"error": {"value": batch.inputs, "count": 16}}, None), "single_noreduce"),
    "no value": (lambda batch: ({"error": {"count": 1}}, None), "value is needed"),
    "no rows": (lambda batch: ({"error": {"log_modes": KEPT}}, None), "value is needed"),
    "unknown mode": (lambda batch: ({"error": {"value": 1, "log_modes": ["median"]}}, None), "'median'"),
    "two modes": (
        lambda batch: ({"error": {"value": batch.inputs, "log_modes": [*KEPT, "mean"]}}, None),
        "under two names",
    ),
    "counts of other rows": (
        lambda batch: (
            {"error": {"value": batch.inputs, "count": jnp.ones(3), "log_modes": ["single_noreduce_wcount"]}},
            None,
        ),
        r"'error' has values of shape \(16, 1\) and counts of shape \(3,\)",
    ),
}


@pytest.mark.parametrize(("result", "message"), WRONG.values(), ids=WRONG)
def test_a_wrong_result_of_an_eval_function_is_explained(result, message):
    with pytest.raises(ValueError, match=message):
        evaluation_of(regression_trainer(), returning(result)).eval_model(BATCHES)


def test_rows_that_cannot_be_shared_out_are_refused():
    evaluation = evaluation_of(regression_trainer({"dp": 8}))
    with pytest.raises(ValueError, match=r"12 rows cannot be split over 8 devices.*Fill the last batch"):
        evaluation.eval_model([BATCHES[0], regression_batch(0, rows=12)])


def test_an_empty_loader_is_refused():
    with pytest.raises(ValueError, match="'val' gave no batch"):
        evaluation_of(regression_trainer()).eval_model([], mode="val")


def test_an_evaluation_without_a_function_runs_only_when_asked_to():
    trainer = regression_trainer()
    evaluation = ExtendedEvaluationConfig().create(trainer, DataloaderModule(val_dataloader=BATCHES))
    assert type(evaluation) is ExtendedEvaluation
    evaluation.on_validation_epoch_start(1, 1)
    with pytest.raises(NotImplementedError, match="eval_function"):
        evaluation.eval_model(BATCHES)


def test_an_evaluation_without_data_says_so(caplog):
    evaluation = evaluation_of(regression_trainer())
    with caplog.at_level(logging.WARNING, logger="xlstm_jax.trainer.callbacks.extended_evaluation"):
        evaluation.on_test_epoch_start(1)
    assert "set_dataset" in caplog.text
    assert evaluation.calls == []


def test_all_processes_take_part():
    with pytest.raises(ConfigError, match="main_process_only"):
        ExtendedEvaluationConfig(main_process_only=True)
