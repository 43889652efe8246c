"""A trainer trains, validates and tests as documented, and says what is wrong with what it is given."""

import csv
import io
import json

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, Mesh
from meshes import AXES
from rich.console import Console
from trainer.base.user_trainer import REGRESSION_BATCHES, Regression, RegressionTrainer, make_regression
from trainer.runs import (
    ADAMW,
    LENGTH,
    ROWS,
    SizedTokenLoader,
    TokenLoader,
    losses,
    make_trainer,
    model_config,
    whole_state,
)

from xlstm_jax.configs import ConfigError
from xlstm_jax.distributed import split_array_over_mesh
from xlstm_jax.trainer import TrainerConfig
from xlstm_jax.trainer.base.evaluator import tracked
from xlstm_jax.trainer.logger import Logger, LoggerConfig
from xlstm_jax.trainer.logger.console import ConsoleLogger
from xlstm_jax.utils.startup import STARTUP

pytestmark = pytest.mark.slow

EIGHT = {"dp": 2, "fsdp": 2, "tp": 2}


def test_a_run_compiles_each_step_once(tmp_path):
    trainer = make_trainer(EIGHT, path=tmp_path, check_val_every_n_steps=2, log_every_n_steps=2)
    loaders = TokenLoader(trainer.mesh), SizedTokenLoader(trainer.mesh, seed=1, num_batches=2)
    trainer.train_model(*loaders, num_train_steps=5)
    trainer.train_model(*loaders, num_train_steps=7)
    assert (trainer.train_step._cache_size(), trainer.eval_step._cache_size()) == (1, 1)
    assert sorted(losses(tmp_path)) == [2, 4, 6]


def test_a_step_overwrites_its_state(tmp_path):
    trainer = make_trainer(EIGHT)
    batch = next(TokenLoader(trainer.mesh))
    program = trainer.train_step.lower(trainer.state, batch, trainer.init_train_metrics()).compile()
    memory = program.memory_analysis()
    state_bytes = sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(trainer.state))
    assert memory.alias_size_in_bytes >= state_bytes
    assert memory.output_size_in_bytes - memory.alias_size_in_bytes < 0.05 * state_bytes


def test_a_state_that_is_not_donated_stays():
    trainer = make_trainer(donate_train_state=False)
    before = trainer.state
    trainer.train_model(TokenLoader(trainer.mesh), num_train_steps=1)
    assert int(before.step) == 0
    assert not any(x.is_deleted() for x in jax.tree.leaves(before))


def test_steps_that_do_not_log_fetch_nothing(monkeypatch):
    fetched = []
    array_class = type(jnp.zeros(()))
    value = array_class._value
    monkeypatch.setattr(array_class, "_value", property(lambda x: fetched.append(x.shape) or value.fget(x)))
    trainer = make_trainer(log_every_n_steps=100)
    loader, counts = TokenLoader(trainer.mesh), []
    for num_steps in (2, 4, 12):
        fetched.clear()
        trainer.train_model(loader, num_train_steps=num_steps)
        counts.append(len(fetched))
    assert counts[0] > 0  # Where the run starts and ends, and
    assert counts[2] == counts[1]  # nothing for any step.


def test_every_row_of_a_run_has_the_documented_metrics(tmp_path):
    trainer = make_trainer(path=tmp_path, bytes_per_token=1.0)
    trainer.train_model(TokenLoader(trainer.mesh), num_train_steps=3)
    metrics, system = (
        list(csv.DictReader((tmp_path / f"file_logs/{name}_train.csv").read_text().splitlines()))
        for name in ("metrics", "system")
    )
    assert not metrics[0]["step_time"]  # as it was mostly compilation
    assert metrics[2].keys() & system[2].keys() == {"log_step", "log_epoch"}
    numbers = {name: float(value) for name, value in (metrics[2] | system[2]).items() if value}
    assert numbers["tokens_seen"] == 3 * ROWS * LENGTH
    np.testing.assert_allclose(numbers["tokens_per_second"] * numbers["step_time"], ROWS * LENGTH, rtol=1e-6)
    np.testing.assert_allclose(numbers["perplexity_mean"], np.exp(numbers["loss_mean"]), rtol=1e-6)
    np.testing.assert_allclose(numbers["bits_per_byte_mean"], numbers["loss_mean"] / np.log(2), rtol=1e-6)
    np.testing.assert_allclose(numbers["lr"], float(trainer.lr_scheduler(2)), rtol=1e-6)
    assert numbers["grad_norm_clipped_mean"] <= min(numbers["grad_norm_mean"], ADAMW.grad_clip_norm) * (1 + 1e-6)
    assert numbers["bad_steps"] == 0
    for name in ("accuracy_mean", "data_wait_time", "compile_time", "mfu", "device_memory_gib", "param_norm"):
        assert numbers[name] >= 0, name
    shares = [numbers[name] for name in numbers if name == "goodput" or name.startswith("lost_")]
    np.testing.assert_allclose(sum(shares), 1, rtol=1e-6)
    assert len(shares) == 6


def test_a_start_that_is_measured_ends_with_the_first_step(tmp_path):
    trainer = make_trainer(path=tmp_path)
    STARTUP.begin()
    trainer.compile_train_step()
    trainer.train_model(TokenLoader(trainer.mesh), num_train_steps=2)
    assert not STARTUP.is_running
    (row,) = (tmp_path / "file_logs/metrics_startup.jsonl").read_text().splitlines()
    assert {f"startup_{phase}" for phase in ("model", "trace", "lower", "compile", "first_step")} <= set(
        json.loads(row)
    )


def test_a_run_is_described(tmp_path):
    trainer = make_trainer(EIGHT, path=tmp_path)
    trainer.train_model(TokenLoader(trainer.mesh), num_train_steps=1)
    rows = {
        mode: json.loads((tmp_path / f"file_logs/metrics_{mode}.jsonl").read_text())
        for mode in ("model", "dataset", "parallel")
    }
    assert rows["model"]["num_params"] == trainer.get_num_params()
    assert (rows["dataset"]["global_batch_size"], rows["dataset"]["local_batch_size"]) == (ROWS, ROWS // 4)
    assert rows["dataset"]["num_train_steps"] == 1
    assert (rows["parallel"]["model_axis_size"], rows["parallel"]["num_devices"]) == (2, 8)
    assert (tmp_path / "output.log").read_text().count("Total number of global parameters") == 1


def test_sets_of_validation_have_names():
    trainer = make_trainer(logger=None)
    loaders = {name: SizedTokenLoader(trainer.mesh, seed=seed, num_batches=2) for seed, name in enumerate("ab")}
    metrics = trainer.eval_model(loaders, mode="val", epoch_idx=1)
    for name, loader in loaders.items():
        alone = trainer.eval_model(loader, mode="val", epoch_idx=1)
        assert metrics[f"{name}_loss"] == alone["loss"]
        assert metrics[f"{name}_perplexity"] == alone["perplexity"]


def test_a_bar_for_a_loader_that_does_not_know_its_length_has_no_end():
    class Loader:
        def __iter__(self):
            return iter(range(3))

        def __len__(self):
            raise TypeError

    tool = ConsoleLogger.__new__(ConsoleLogger)
    tool.console = Console(file=io.StringIO(), force_terminal=True)
    logger = Logger.__new__(Logger)
    logger.log_tools = [tool]
    assert list(tracked(Loader(), logger, "val 1")) == [0, 1, 2]


def test_validation_may_be_absent(caplog):
    trainer = make_trainer(logger=None)
    with caplog.at_level("INFO", logger="xlstm_jax"):
        assert trainer.train_model(TokenLoader(trainer.mesh), None, num_train_steps=1) == {}
    assert "no validation" in caplog.text


def test_a_run_goes_on_where_it_ended():
    whole, split = (make_trainer(logger=None) for _ in range(2))
    whole.train_model(TokenLoader(whole.mesh), num_train_steps=4)
    loader = TokenLoader(split.mesh)
    split.train_model(loader, num_train_steps=2)
    split.train_model(loader, num_train_steps=4)
    for name, expected in whole_state(whole).items():
        np.testing.assert_array_equal(whole_state(split)[name], expected, err_msg=name)


def test_a_trainer_with_nothing_but_a_loss_function_trains():
    trainer = make_regression()
    results = trainer.train_model(REGRESSION_BATCHES, REGRESSION_BATCHES, num_epochs=2)
    assert trainer.global_step == 6
    assert results["val_epoch_2"]["train"] == 0.0  # Dropout and the like are off in validation.


class RowSplitting(Regression):
    """A model whose tp devices share the rows."""

    @nn.compact
    def __call__(self, x, train=False):
        own = nn.Dense(1, name="layer")(split_array_over_mesh(x, "tp", 0))
        return jax.lax.all_gather(own, "tp", axis=0, tiled=True)


class Plain(Regression):
    """The same model without sharing."""

    @nn.compact
    def __call__(self, x, train=False):
        return nn.Dense(1, name="layer")(x)


def test_a_model_that_splits_rows_over_tp_is_built_and_trains_like_one_that_does_not():
    trainers = [make_regression(model_class=model, sizes={"dp": 2, "tp": 4}) for model in (RowSplitting, Plain)]
    for trainer in trainers:
        trainer.train_model(REGRESSION_BATCHES, num_train_steps=2)
    split, plain = map(whole_state, trainers)
    for name, expected in plain.items():
        np.testing.assert_allclose(split[name], expected, rtol=1e-5, err_msg=name)


def test_a_run_without_compilation_gives_the_same_numbers():
    states = []
    for debug in (False, True):
        # Without compilation every operation is a program, so there are as few of them as possible.
        few = {"log_grad_norm": False, "log_param_norm": False, "check_for_nan": False}
        trainer = make_regression(debug=debug, sizes={"dp": 2}, **few)
        trainer.train_model(REGRESSION_BATCHES, num_train_steps=2)
        states.append(whole_state(trainer))
    for name, expected in states[0].items():
        np.testing.assert_allclose(states[1][name], expected, rtol=1e-5, err_msg=name)


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (lambda loss: loss, r"has to return \(loss, \(metrics, mutable_variables\)\).*an array of shape \(\)"),
        (lambda loss: (loss, {"loss": loss}), "has to return"),
        (lambda loss: (jnp.ones(3) * loss, ({}, None)), r"a loss of shape \(3,\): it has to be one number"),
        (lambda loss: (loss, ([], None)), "as metrics: a dictionary is needed"),
        (lambda loss: (loss, ({"each": jnp.ones(3)}, None)), r"Metric 'each' has shape \(3,\).*give the number"),
    ],
    ids=["no pair", "no variables", "many losses", "no dictionary", "an array as a metric"],
)
def test_a_loss_function_with_a_wrong_result_is_explained(result, message):
    class Broken(RegressionTrainer):
        def loss_function(self, params, apply_fn, batch, rng, train=True):
            loss, _ = super().loss_function(params, apply_fn, batch, rng, train)
            return result(loss)

    with pytest.raises(ValueError, match=message):
        make_regression(Broken).train_model(REGRESSION_BATCHES, num_epochs=1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"val_loader": [], "num_epochs": 1}, "'val' for validation is empty.*Pass None"),
        ({"val_loader": {"a": []}, "num_epochs": 1}, "'a' for validation is empty"),
        ({}, "give exactly one of them"),
        ({"num_epochs": 1, "num_train_steps": 1}, "give exactly one of them"),
        ({"num_epochs": 0}, "num_epochs is 0, but must be a whole number of at least 1"),
        ({"num_train_steps": 1.5}, r"num_train_steps is 1\.5, but must be a whole number"),
        ({"num_train_steps": "3"}, "num_train_steps is '3', but must be a whole number"),
        ({"train_loader": None, "num_train_steps": 1}, "train_loader is None"),
        ({"train_loader": [], "num_train_steps": 1}, "The train loader is empty"),
        ({"train_loader": iter([]), "num_train_steps": 1}, "gave no batch in a whole epoch"),
        ({"train_loader": iter([]), "num_epochs": 1}, "pass steps_per_epoch"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_data_that_a_run_cannot_use_are_named(arguments, message, unchecked_shapes):
    trainer = make_regression()
    with pytest.raises(ValueError, match=message):
        trainer.train_model(**{"train_loader": REGRESSION_BATCHES, **arguments})


@pytest.mark.parametrize(
    ("mesh", "message"),
    [
        (AbstractMesh((1, 1, 1, 1), AXES), "mesh dp, fsdp, pp, tp has no devices.*pass a jax.sharding.Mesh"),
        (Mesh(np.zeros((0, 1, 1, 1), object), AXES), "mesh dp, fsdp, pp, tp has no devices"),
        (Mesh(np.array(jax.devices()[:1]), ("dp",)), "mesh has the axes dp, but a trainer needs four"),
    ],
    ids=["abstract", "empty", "one axis"],
)
def test_a_mesh_that_a_trainer_cannot_run_on_is_refused(mesh, message):
    with pytest.raises(ValueError, match=message):
        make_regression(mesh=mesh)


def test_a_batch_that_cannot_be_split_is_refused():
    with pytest.raises(ValueError, match="12 rows cannot be split over 8 devices"):
        make_trainer({"dp": 8}, rows=12)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"gradient_accumulate_steps": 0}, "gradient_accumulate_steps is 0"),
        ({"default_train_log_modes": ["median"]}, "default_train_log_modes has 'median'"),
    ],
)
def test_a_bad_config_is_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        TrainerConfig(**options)


def test_configs_are_left_as_they_were(tmp_path):
    logger = LoggerConfig(log_path=tmp_path)
    config, model = TrainerConfig(logger=logger), model_config()
    before = config.to_dict(), model.to_dict(), ADAMW.to_dict()
    make_trainer(logger=logger, model=model)
    assert (config.to_dict(), model.to_dict(), ADAMW.to_dict()) == before
    assert logger.log_tools == []


OVERRIDES = (
    "_eval_model_in_train_loop",
    "_run_model_eval",
    "count_targets",
    "create_evaluation_step_function",
    "create_training_step_function",
    "eval_model",
    "get_metric_postprocess_fn",
    "init_callbacks",
    "init_eval_metrics",
    "init_logger",
    "init_model",
    "init_state",
    "init_train_metrics",
    "log_training_info",
    "loss_function",
    "on_training_epoch_end",
    "on_training_step",
    "on_validation_epoch_end",
    "run_model_init",
    "test_eval_function",
    "tracker",
)


def test_all_methods_that_a_subclass_overrides_take_effect():
    called = set()

    def recorded(name):
        def method(self, *args, **options):
            called.add(name)
            return getattr(super(Overriding, self), name)(*args, **options)

        return method

    methods = {name: recorded(name) for name in OVERRIDES}
    methods["loss_function"] = lambda self, params, apply_fn, batch, rng, train=True: recorded("loss_function")(
        self, params, apply_fn, batch, rng, train
    )
    Overriding = type("Overriding", (RegressionTrainer,), methods)
    make_regression(Overriding).train_model(REGRESSION_BATCHES, REGRESSION_BATCHES, num_epochs=1)
    assert called == set(OVERRIDES)
