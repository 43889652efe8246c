"""Settings become the configs of a run, and mistakes in them are told by the names that users have written."""

import re

import hydra
import pytest
from omegaconf import OmegaConf

from xlstm_jax.configs import ConfigError
from xlstm_jax.dataset.configs import FormalTaskDataConfig, GrainArrayRecordsDataConfig, TextFilesDataConfig
from xlstm_jax.dataset.prepare import prepare
from xlstm_jax.dataset.shards.manifest import read_manifest
from xlstm_jax.models.llama import LlamaConfig, LlamaTransformer
from xlstm_jax.models.xlstm import XLSTM, XLSTMConfig
from xlstm_jax.recipes.compose import ROOT, change, compose, groups, initialized, register_run_id, resolved
from xlstm_jax.recipes.run_config import RunConfig, build_run
from xlstm_jax.trainer.callbacks import ModelCheckpointConfig

pytestmark = pytest.mark.slow


def run_of(*overrides: str) -> RunConfig:
    return build_run(compose(overrides))


def mistake(*overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        run_of(*overrides)
    (line,) = str(caught.value).splitlines()
    return line


def test_the_packaged_settings_are_a_run():
    run = run_of()
    assert run.model.model_class is XLSTM
    assert isinstance(run.model.model_config, XLSTMConfig)
    assert run.optimizer.scheduler.decay_steps == run.num_train_steps
    assert run.data.first.global_batch_size == run.batch_size
    assert any(isinstance(callback, ModelCheckpointConfig) for callback in run.trainer.callbacks)


def test_a_setting_changes_all_that_refers_to_it():
    run = run_of("num_train_steps=7_000", "batch_size=24", "context_length=96")
    assert run.optimizer.scheduler.decay_steps == 7000
    assert (run.data.first.global_batch_size, run.data.first.max_target_length) == (24, 96)
    assert run.data.validation["validation"].global_batch_size == 24


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["experiment=demo"], (48, 0)),
        (["experiment=demo", "num_train_steps=60"], (3, 0)),
        (["experiment=demo", "num_train_steps=1900"], (48, 0)),
        (["experiment=demo", "num_train_steps=60", "scheduler.decay_steps=950"], (48, 0)),
        (["experiment=demo", "num_train_steps=60", "scheduler.warmup_steps=20"], (20, 0)),
        (["experiment=xlstm_2_7b", "num_train_steps=305"], (74, 99)),
        (["scheduler=wsd", "num_train_steps=1"], (0, 1)),
        (["scheduler=constant", "num_train_steps=50"], (5, 0)),
        (["scheduler=constant", "num_train_steps=null", "num_epochs=2"], (100, 0)),
    ],
)
def test_a_shorter_run_warms_up_and_cools_down_in_proportion_unless_that_is_set(overrides, expected):
    schedule = run_of(*overrides).optimizer.scheduler
    assert (schedule.warmup_steps, schedule.cooldown_steps) == expected


def test_a_resumed_run_that_is_longer_has_the_warm_up_of_a_run_of_that_length():
    with initialized():
        composed = OmegaConf.to_container(hydra.compose(ROOT, overrides=["experiment=demo", "++num_train_steps=60"]))
    schedules = [
        build_run(resolved(change(composed, [f"num_train_steps={steps}"]))).optimizer.scheduler
        for steps in (60, 950, 1900)
    ]
    assert [(each.warmup_steps, each.decay_steps) for each in schedules] == [(3, 60), (48, 950), (48, 1900)]


def test_settings_with_a_scaled_warm_up_can_be_changed_first_of_all():
    OmegaConf.clear_resolver("scaled")
    settings = {"num_train_steps": 10, "scheduler": {"warmup_steps": "${scaled:4,20}"}}
    assert resolved(change(settings, ["num_train_steps=15"]))["scheduler"]["warmup_steps"] == 3


def test_samples_can_have_a_tokenizer_of_their_own():
    run = run_of("callbacks=[default,samples]", "callbacks.samples.tokenizer=byte")
    assert [each.tokenizer for each in run.trainer.callbacks if hasattr(each, "tokenizer")] == ["byte"]


def test_fields_that_no_file_mentions_can_be_set():
    assert run_of("model.qk_norm=true").model.model_config.qk_norm


def test_a_parallel_group_reaches_the_model():
    run = run_of("parallel=fsdp", "parallel.fsdp_min_weight_size=5")
    assert run.model.parallel == run.model.model_config.parallel
    assert (run.model.parallel.fsdp_axis_size, run.model.parallel.fsdp_min_weight_size) == (-1, 5)


@pytest.mark.parametrize("group", groups())
def test_every_choice_of_a_group_has_a_comment_that_says_what_it_is(group):
    assert all(comment.endswith((".", ":")) or len(comment) > 20 for comment in groups()[group].values())


@pytest.mark.parametrize(
    ("group", "choice"),
    [(g, c) for g, choices in groups().items() for c in choices if g not in ("experiment", "launcher", "data")],
)
def test_every_choice_of_a_group_makes_a_run(group, choice):
    more = {"callbacks": [f"callbacks=[default,{choice}]"]}.get(group, [f"{group}={choice}"])
    assert run_of(*(more if choice != "default" else [f"{group}=[default]" if group == "callbacks" else "name=x"]))


def test_a_model_of_another_class_takes_its_own_config():
    run = run_of("model.model_class=xlstm_jax.models.llama.LlamaTransformer", "~model.num_heads", "model.head_dim=32")
    assert run.model.model_class is LlamaTransformer
    assert isinstance(run.model.model_config, LlamaConfig)


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("model.embeding_dim=3", "model.embeding_dim: XLSTMConfig has no such field. Did you mean 'embedding_dim'?"),
        ("scheduler.lr=fast", "scheduler.lr: a number is needed, not 'fast'."),
        ("parallel.remat=3", "parallel.remat: a list is needed, not 3."),
        ("callbacks.checkpoint.every_n_step=3", "callbacks.checkpoint.every_n_step: ModelCheckpointConfig has no such"),
        ("logger.log_every_n_steps=0", "logger: log_every_n_steps is 0"),
        ("optimizer.scheduler.lr=1", "optimizer.scheduler: this has a group of its own. Set it under 'scheduler'"),
        ("experimnt=demo", "experimnt: there is no such setting or group. Did you mean 'experiment'?"),
        ("lr=1e-3", "lr: there is no such setting or group. Did you mean 'scheduler.lr'?"),
        ("experiment=dem", "experiment: there is no 'dem', only "),
        ("model=xlstm_16m", "model: there is no 'xlstm_16m', only "),
        ("data=text", "data.prepare.sources is not set: add data.prepare.sources=... to the command."),
        ("data.packng=none", "data.packng: GrainArrayRecordsDataConfig has no such field. Did you mean 'packing'?"),
        ("data.data_config_type=text", "data.data_config_type: 'text' is none of "),
        ("data.train.packing=strem", "data.packing: 'strem' is none of 'stream', 'first_fit', 'none'."),
        ("num_epochs=3", "num_train_steps is 1000 and num_epochs is 3: set exactly one of them"),
        ("batch_size=0", "batch_size is 0, but must be at least 1."),
        ("num_train_steps=0", "num_train_steps is 0, but must be at least 1."),
        ("num_train_steps=1.5", "num_train_steps: a whole number is needed, not 1.5."),
        ("num_train_steps=null", "num_train_steps is None and num_epochs is None: set exactly one of them"),
        ("scheduler.warmup_steps=1001", "scheduler: warmup_steps 1001 plus cooldown_steps 0 are more than decay_steps"),
        ("init_optimizer=true", "init_optimizer is True, but has no effect without init_from: leave it out,"),
        ("data.global_batch_size=8", "batch_size is 16, but data.global_batch_size is 8: set batch_size alone."),
        ("model.model_class=math.pi", "model.model_class: 'math.pi' is no class or function."),
        ("callbacks.mine={}", "callbacks.mine: _target_ is not set: name the class, such as xlstm_jax.trainer.callb"),
        ("callbacks.mine.every_n_steps=3", "callbacks.mine: _target_ is not set: name the class"),
        ("logger.log_tools=[{}]", "logger.log_tools.0: _target_ is not set: name the class, such as xlstm_jax.trainer"),
        (
            "trainer.seed=1180591620717411303424",
            "trainer: seed is 1180591620717411303424, but must be from -2147483648",
        ),
        ("trainer.seed_eval=4294967296", "trainer: seed_eval is 4294967296, but must be from"),
        ("name=", "name is '', but must be the name of a folder in outputs."),
        ("name=../there", "name is '../there', but must be the name of a folder in outputs."),
        ("scheduler.lr=1,2", "Ambiguous value for argument 'scheduler.lr=1,2'"),
        ("=", "'=' is no key=value or group=choice:"),
    ],
)
def test_a_mistake_is_one_line_in_the_words_of_the_user(override, line):
    assert mistake(override).startswith(line)


def test_text_of_ones_own_is_prepared_in_the_folder_of_the_run(tmp_path):
    data = run_of("data=text", "data.prepare.sources=[a.txt,b.txt]").data.in_folder(tmp_path)
    assert data.prepare is not None
    assert data.prepare.sources == ["a.txt", "b.txt"]
    for config in (data.first, data.validation["validation"]):
        assert isinstance(config, GrainArrayRecordsDataConfig)
        assert config.data_path == tmp_path / "data"
    assert data.tokenizer_path == str(tmp_path / "data/tokenizer")
    assert (data.first.shuffle_data, data.validation["validation"].shuffle_data) == (True, False)


def test_a_folder_for_prepared_data_is_shared_by_runs(tmp_path):
    data = run_of("data.prepare.output=shared").data.in_folder(tmp_path)
    assert str(data.first.data_path) == "shared"


def test_several_sets_are_mixed_by_weight():
    mix = "data.mix={web: {weight: 3, data_path: a}, code: {data_path: b}}"
    data = run_of("data=text_files", "data.data_path=null", mix, "data.mix_at_steps={100: {code: 1}}").data
    assert [(config.name, str(config.data_path)) for config in data.train] == [("web", "a"), ("code", "b")]
    assert data.weights == [3.0, 1.0]
    assert data.weights_at_steps == {100: [0.0, 1.0]}
    assert data.validation == {}


def test_a_weight_of_an_unknown_set_is_a_mistake():
    mix = "data.mix={web: {data_path: a}}"
    line = mistake("data=text_files", "data.data_path=x", mix, "data.mix_at_steps={9: {wib: 1}}")
    assert line == "data.mix_at_steps.9.wib: there is no such set in data.mix. Did you mean 'web'?"


def test_several_sets_are_validated_on_by_name():
    validation = "data.validation={a: {data_path: x}, b: {data_path: y}}"
    data = run_of("data=text_files", "data.data_path=t", validation).data
    assert {name: str(config.data_path) for name, config in data.validation.items()} == {"a": "x", "b": "y"}
    assert all(isinstance(config, TextFilesDataConfig) for config in data.validation.values())


def test_the_vocabulary_follows_from_the_data():
    assert run_of("data.prepare.train_vocab_size=1000").model.model_config.vocab_size == 1024
    assert run_of("data.prepare.train_vocab_size=null").model.model_config.vocab_size == 320
    run = run_of("data=formal_task")
    assert isinstance(run.data.first, FormalTaskDataConfig)
    assert run.model.model_config.vocab_size == 64
    assert run_of("model.vocab_size=4096").model.model_config.vocab_size == 4096


def test_settings_that_were_composed_can_be_changed_with_what_refers_to_them():
    settings = {"steps": 10, "scheduler": {"decay_steps": "${steps}"}}
    assert resolved(change(settings, ["steps=20"])) == {"steps": 20, "scheduler": {"decay_steps": 20}}
    with pytest.raises(ConfigError, match="is no key=value"):
        change(settings, ["steps"])


def test_a_run_is_called_by_its_time_or_by_its_slurm_step(monkeypatch):
    register_run_id()
    assert re.fullmatch(r"\d{4}-\d\d-\d\d_\d\d-\d\d-\d\d", OmegaConf.create({"a": "${run_id:}"}).a)
    monkeypatch.setenv("SLURM_JOB_ID", "12")
    monkeypatch.setenv("SLURM_STEP_ID", "0")
    register_run_id()
    assert OmegaConf.create({"a": "${run_id:}"}).a == "slurm_12_0"


def test_a_folder_of_the_user_adds_choices(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model/mine.yaml").write_text(
        "model_class: xlstm_jax.models.xlstm.XLSTM\nembedding_dim: 8\nnum_heads: 2\nnum_blocks: 1\n"
    )
    assert build_run(compose(["model=mine"], tmp_path)).model.model_config.embedding_dim == 8
    with pytest.raises(ConfigError, match="there is no folder"):
        compose([], tmp_path / "none")


def test_synthetic_tokens_are_those_of_the_model():
    run = run_of("data=synthetic", "model=xlstm_160m")
    assert run.data.first.vocab_size == run.model.model_config.vocab_size == 50304


def test_a_model_without_a_vocabulary_gets_that_of_synthetic_tokens():
    assert run_of("data=synthetic", "data.vocab_size=1000").model.model_config.vocab_size == 1024


def test_more_synthetic_tokens_than_a_model_has_are_refused():
    line = mistake("data=synthetic", "model.vocab_size=64", "data.vocab_size=65")
    assert line == "data.vocab_size is 65, but model.vocab_size is 64: set model.vocab_size alone."


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    """A folder with texts as shards: of a tokenizer that was trained on them (trained), and of bytes (bytes)."""
    folder = tmp_path_factory.mktemp("prepared")
    words = [f"{number**5:x}" for number in range(200)]
    (folder / "texts.txt").write_text("".join(f"{word} and {word} and {word} again.\n" for word in words))
    options = {"validation_share": 0.4, "max_document_bytes": 64, "num_workers": 0}
    prepare(folder / "texts.txt", folder / "trained", train_vocab_size=330, **options)
    prepare(folder / "texts.txt", folder / "bytes", **options)
    return folder


def test_the_vocabulary_of_shards_is_that_of_their_manifest(prepared):
    size = read_manifest(prepared / "trained/train").vocab_size
    assert size > 320
    run = run_of("data=prepared", f"data.data_path={prepared}/trained")
    assert run.model.model_config.vocab_size == 384
    assert run_of("data=prepared", f"data.data_path={prepared}/trained", f"model.vocab_size={size}")
    assert run_of("data=prepared", f"data.data_path={prepared}/bytes").model.model_config.vocab_size == 320


def test_a_model_with_fewer_ids_than_its_data_is_a_mistake_with_both_numbers(prepared):
    line = mistake("data=prepared", f"data.data_path={prepared}/trained", "model.vocab_size=320")
    assert re.match(
        r"data: there are 3\d\d token ids \(.*manifest\.json.*\), but the model's vocab_size is 320: set", line
    )


@pytest.mark.parametrize(
    ("data", "where", "number"),
    [
        (["data=text_files", "data.data_path=unread.txt"], "data", 257),
        (["data.prepare.train_vocab_size=null"], "data.prepare", 257),
        (["data.prepare.train_vocab_size=512"], "data.prepare", 512),
        (["data=formal_task", "data.task=majority_count"], "data", 18),
    ],
    ids=["texts", "bytes to prepare", "a tokenizer to train", "a formal task"],
)
def test_ten_ids_are_too_few_for_any_data(data, where, number):
    line = mistake(*data, "model.vocab_size=10")
    assert re.match(rf"{where}: there are {number} token ids \(.*\), but the model's vocab_size is 10: set", line)


def test_another_tokenizer_than_that_of_the_shards_is_a_mistake_with_both_names(prepared):
    line = mistake("data=prepared", f"data.data_path={prepared}/trained", "data.tokenizer_path=byte")
    assert line.startswith("data.tokenizer_path: tokenizer 'byte', digest ")
    assert f"is another tokenizer than {prepared}/trained/train/manifest.json of tokenizer" in line
    run_of("data=prepared", f"data.data_path={prepared}/trained", f"data.tokenizer_path={prepared}/trained/tokenizer")


@pytest.mark.parametrize(("section", "split"), [("validation", "validation"), ("mix", "train")])
def test_every_set_has_to_be_of_one_tokenizer(section, split, prepared):
    settings = compose(["data=prepared", f"data.data_path={prepared}/trained"])
    settings["data"] |= {"validation": None, section: {"a": {}, "b": {"data_path": f"{prepared}/bytes"}}}
    with pytest.raises(ConfigError) as caught:
        build_run(settings)
    assert str(caught.value).startswith(f"data.{section}.b: {prepared}/bytes/{split}/manifest.json of tokenizer 'byte'")
    assert "is another tokenizer than" in str(caught.value)


def test_shards_without_a_manifest_do_not_tell_a_vocabulary(tmp_path):
    line = mistake("data=prepared", f"data.data_path={tmp_path}")
    assert line.startswith("model.vocab_size is not set, and the data has neither a manifest nor a tokenizer")


def test_a_manifest_that_cannot_be_read_is_a_line(tmp_path):
    (tmp_path / "train").mkdir()
    (tmp_path / "train/manifest.json").write_text("{")
    assert mistake("data=prepared", f"data.data_path={tmp_path}").startswith(
        f"data: {tmp_path}/train/manifest.json is no"
    )


def test_shards_elsewhere_say_nothing_about_those_that_a_run_prepares(prepared, monkeypatch):
    (prepared / "here").mkdir()
    (prepared / "here/data").symlink_to(prepared / "trained")
    monkeypatch.chdir(prepared / "here")
    assert run_of("data.prepare.train_vocab_size=null").model.model_config.vocab_size == 320
