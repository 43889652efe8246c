"""Settings of callbacks, observed in what their hooks do with a trainer that records what is asked of it."""

from types import SimpleNamespace

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from settings.cases import Beside, Recorder, World, cases

from xlstm_jax.dataset.batch import LLMBatch
from xlstm_jax.trainer.callbacks import ModelCheckpointConfig, checkpointing, run_report
from xlstm_jax.trainer.callbacks.callback import Callback, CallbackConfig
from xlstm_jax.trainer.callbacks.early_stopping import EarlyStoppingConfig
from xlstm_jax.trainer.callbacks.ema import ParameterEMAConfig
from xlstm_jax.trainer.callbacks.extended_evaluation import ExtendedEvaluation, ExtendedEvaluationConfig
from xlstm_jax.trainer.callbacks.lr_monitor import LearningRateMonitorConfig
from xlstm_jax.trainer.callbacks.profiler import JaxProfilerConfig
from xlstm_jax.trainer.callbacks.run_report import RunReportConfig
from xlstm_jax.trainer.callbacks.text_samples import TextSamplesConfig
from xlstm_jax.trainer.callbacks.watchdog import HangWatchdogConfig
from xlstm_jax.trainer.eval import lmeval_extended_evaluation as lmeval
from xlstm_jax.trainer.run.clock import Clock


class State(flax.struct.PyTreeNode):
    """What callbacks read of a train state."""

    step: jax.Array
    params: dict
    opt_state: tuple = ()


def trainer_in(world: World, **more):
    """Return a trainer that records what is asked of it."""
    params = {"kernel": jnp.ones(2)}
    answers = {
        "log_path": world.folder,
        "global_step": 4,
        "state": State(jnp.zeros(()), params),
        "lr_scheduler": lambda step: 0.5 * step,
        "state_is_good": lambda: True,
        "clock": Clock(),
        "exmp_batch": LLMBatch.get_dtype_struct(2, 8),
        "trainer_config": SimpleNamespace(debug=True, seed_eval=0),
    }
    return Recorder(answers=answers | more)


def run_hooks(config, world: World):
    """Record which hooks of a callback run, of those that it has, in the first process and in another."""
    created = type(config).create(config, trainer_in(world)) if type(config) is not CallbackConfig else None
    kind, ran = Callback if created is None else type(created), []
    names = [name for name in dir(Callback) if name.startswith("on_filtered_")]
    for process in (0, 1):
        world.monkeypatch.setattr(jax, "process_index", lambda process=process: process)
        callback = object.__new__(kind)
        Callback.__init__(callback, config, None)
        for name in names:
            if created is None or getattr(kind, name) is not getattr(Callback, name):
                setattr(callback, name, lambda *args, name=name, process=process: ran.append((process, name, args[1:])))
            else:
                setattr(callback, name, lambda *_: None)
        for index in range(1, 5):
            Callback.on_training_step(callback, {}, 1, index)
            Callback.on_training_epoch_end(callback, {}, index)
            Callback.on_validation_epoch_end(callback, {}, index, index)
            Callback.on_validation_epoch_start(callback, index, index)
    return ran


def save(config, world: World):
    """Record what a callback saves, where and when."""
    called = Recorder()
    parts = {"params": {"kernel": jnp.ones(2)}, "opt_state": ()}
    world.monkeypatch.setattr(checkpointing.saved_run, "state_arrays", lambda _: dict(parts))
    for name, value in (("run_documents", {}), ("data_document", "data"), ("callback_arrays", {})):
        world.monkeypatch.setattr(checkpointing.saved_run, name, lambda *_, value=value: value)
    world.monkeypatch.setattr(checkpointing, "CheckpointStore", called.store)
    world.monkeypatch.setattr(checkpointing, "CheckpointTimer", called.timer)
    callback = config.create(trainer_in(world))
    calls = list(called.calls)
    callback._timer = Recorder()
    callback.store = Recorder()
    callback.on_training_end()
    callback.save_state(9)
    return calls, callback.store.calls


def log_learning_rates(config, world: World):
    """Record what is logged as learning rate."""
    trainer = trainer_in(world)
    config.create(trainer).on_filtered_training_step({}, 1, 50)
    return trainer.calls


def trace_steps(config, world: World):
    """Record when traces start and end, with a minute for each step."""
    called = Recorder()
    world.monkeypatch.setattr(jax, "profiler", called)
    world.monkeypatch.setattr(
        "xlstm_jax.trainer.callbacks.profiler.time", SimpleNamespace(monotonic=lambda: 60 * now())
    )
    step = 0

    def now():
        return step

    for process in (0, 1):
        world.monkeypatch.setattr(jax, "process_index", lambda process=process: process)
        callback = config.create(trainer_in(world))
        for step in range(1, 80):
            callback.on_training_step({}, 1, step)
            called.calls.append(step)
    return called.calls


def stop_early(config, world: World):
    """Tell after which validations a run is stopped."""
    stopped = []
    for losses in ([3.0, 2.9, 2.9, 2.9, 2.9, 2.9], [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]):
        trainer = SimpleNamespace(should_stop=False)
        callback = config.create(trainer)
        for index, loss in enumerate(losses):
            callback.on_filtered_validation_epoch_end({"loss": loss, "other": -index}, 1, index)
            stopped.append(trainer.should_stop)
    return stopped


def average(config, world: World):
    """Average parameters, and record whether the average is evaluated."""
    trainer = trainer_in(world)
    callback = config.create(trainer, SimpleNamespace(val_dataloader=[1]))
    callback.on_training_start()
    changed = State(jnp.zeros(()), {"kernel": jnp.zeros(2)})
    trainer._answers["state"] = changed
    callback.on_filtered_training_step({}, 1, 1)
    world.monkeypatch.setattr(type(callback), "swapped", lambda _: Recorder())
    callback.on_filtered_validation_epoch_end({}, 1, 1)
    return str(callback.params), trainer.calls


def write_samples(config, world: World):
    """Return samples of a model that generates random tokens, and the arguments it was called with."""
    asked = []

    def generate(_, key, prefix, mask):
        asked.append((prefix.tolist(), None if mask is None else mask.tolist()))
        tokens = jax.random.randint(key, (len(prefix), 12), 97, 122)
        return np.asarray(tokens), np.ones(tokens.shape, bool)

    def get_generate_fn(**options):
        chosen = options.pop("token_sample_fn")
        asked.append((options, chosen.keywords))
        return generate

    world.monkeypatch.setattr(
        "xlstm_jax.trainer.callbacks.text_samples.multihost_utils.process_allgather", lambda x, **_: x
    )
    callback = config.create(trainer_in(world, get_generate_fn=get_generate_fn))
    return callback.generate(), asked


class UpperCase:
    """A tokenizer of capitals."""

    def encode(self, text):
        """Return the tokens of a text."""
        return [ord(letter) for letter in text.upper()]

    def decode(self, tokens):
        """Return the text of tokens."""
        return "".join(map(chr, tokens)).upper()


def watch(config, world: World):
    """Return the deadlines of a watchdog, one stage after the other."""
    callback = config.create(trainer_in(world))
    deadlines = [callback._deadline]
    for hook, args in (("on_training_step", ({}, 1, 1)), ("on_validation_epoch_start", (1, 1))):
        getattr(callback, hook)(*args)
        deadlines.append(callback._deadline)
    return deadlines


def report(config, world: World):
    """Record what a report is compared with."""
    called = Recorder()
    for name in ("record_start", "record_parameters"):
        world.monkeypatch.setattr(run_report, name, getattr(called, name))
    config.create(trainer_in(world)).on_training_start()
    return [str(call) for call in called.calls]


class Evaluation(ExtendedEvaluation):
    """An evaluation that finds one number."""

    def create_jitted_functions(self):
        """Compile nothing."""

    def eval_function(self, params, apply_fn, batch, rng):
        """Return nothing; it is not called."""
        raise AssertionError

    def eval_model(self, data_loader, mode="test", epoch_idx=0):
        """Return one number."""
        del data_loader, mode, epoch_idx
        return {}


def log_evaluation(config, world: World):
    """Record under what an evaluation is logged."""
    trainer = trainer_in(world)
    world.monkeypatch.setattr("time.perf_counter", lambda: 0.0)
    Evaluation(config, trainer, SimpleNamespace(val_dataloader=[1]))._run("val", 1, 1)
    return trainer.calls


def run_harness(config, world: World):
    """Record what the harness and the pipelines are asked for."""
    asked = []
    world.monkeypatch.setattr(lmeval, "create_lm", lambda *_: "lm")
    world.monkeypatch.setattr(lmeval, "harness", lambda name: getattr(Recorder(asked), name))
    tokenizer = SimpleNamespace(bos_token_id=1, eos_token_id=2, apply_chat_template=lambda *_, **o: asked.append(o))
    encoder = SimpleNamespace(tokenizer=tokenizer)
    world.monkeypatch.setattr(lmeval, "TextEncoder", lambda path: asked.append(path) or encoder)
    world.monkeypatch.setattr(lmeval, "Vocabulary", SimpleNamespace(of_tokenizer=lambda _: None))
    for name in ("lmeval_preprocessing_pipeline", "HFTokenizeLogLikelihoodRolling", "make_grain_llm_iterator"):
        world.monkeypatch.setattr(lmeval, name, getattr(Recorder(asked), name))
    world.monkeypatch.setattr(lmeval.LMEvalEvaluation, "create_jitted_functions", lambda _: None)
    trainer = trainer_in(world, mesh="mesh")
    callback = lmeval.LMEvalEvaluation(config, trainer)
    callback._load([])
    world.monkeypatch.setattr(callback, "_load", lambda _: None)
    world.monkeypatch.setattr(callback, "eval_model", lambda *_, **__: {})
    world.monkeypatch.setattr(lmeval, "fuse_document_results", lambda _: [(-1.0, True)])
    scores = callback.loglikelihood([])
    call = lmeval.harness
    world.monkeypatch.setattr(lmeval, "harness", lambda name: harness_of(call(name), name))
    results = callback.run_evaluate()
    world.monkeypatch.setattr(callback, "run_evaluate", lambda: {"task": {"acc": 1.0}})
    callback._log_results(1)
    callback.apply_chat_template([])
    return asked, scores, results, trainer.calls


def harness_of(recorder: Recorder, name: str):
    """Return a part of the harness that finds nothing."""
    if name != "evaluator":
        return recorder
    return SimpleNamespace(simple_evaluate=lambda **options: recorder.simple_evaluate(**options) and {"results": {}})


HOOKS = [
    *cases(CallbackConfig, run_hooks, {}, every_n_epochs=2, every_n_steps=2, main_process_only=True),
    *cases(ModelCheckpointConfig, run_hooks, {}, every_n_epochs=2, every_n_steps=2, main_process_only=True),
    *cases(
        LearningRateMonitorConfig,
        run_hooks,
        {"every_n_steps": 1},
        every_n_epochs=2,
        every_n_steps=2,
        main_process_only=False,
    ),
    *cases(
        EarlyStoppingConfig, run_hooks, {"monitor": "loss"}, every_n_epochs=2, every_n_steps=2, main_process_only=True
    ),
    *cases(ParameterEMAConfig, run_hooks, {}, every_n_epochs=2, every_n_steps=2, main_process_only=True),
    *cases(RunReportConfig, run_hooks, {}, every_n_epochs=2, every_n_steps=2, main_process_only=False),
    *cases(TextSamplesConfig, run_hooks, {"prompts": ["a"]}, every_n_epochs=2, every_n_steps=2, main_process_only=True),
    *cases(HangWatchdogConfig, run_hooks, {}, every_n_epochs=2, every_n_steps=2, main_process_only=True),
    *cases(JaxProfilerConfig, trace_steps, {}, every_n_epochs=2, every_n_steps=2, main_process_only=False),
]
PROMPTS = {"prompts": ["ab"]}
HARNESS = {"tokenizer_path": "byte", "evaluation_tasks": ["task"]}
CALLBACKS = [
    *cases(
        ModelCheckpointConfig,
        save,
        {},
        max_to_keep=3,
        monitor="loss",
        mode=Beside("max", {"monitor": "loss"}),
        keep_every=5,
        every_n_minutes=7.0,
        save_at_end=False,
        save_optimizer_state=False,
        save_dataloader_state=False,
        enable_async_checkpointing=False,
        checksums=False,
        log_path="elsewhere",
    ),
    *cases(LearningRateMonitorConfig, log_learning_rates, {}, log_lr_key="rate"),
    *cases(
        JaxProfilerConfig,
        trace_steps,
        {},
        profile_every_n_minutes=20,
        profile_first_step=3,
        profile_n_steps=2,
        profile_log_dir="traces",
    ),
    *cases(
        EarlyStoppingConfig, stop_early, {"monitor": "loss"}, monitor="other", mode="max", patience=2, min_delta=1.0
    ),
    *cases(ParameterEMAConfig, average, {}, decay=0.5, evaluate=False),
    *cases(
        TextSamplesConfig,
        write_samples,
        PROMPTS,
        prompts=["cd"],
        max_length=9,
        num_samples=2,
        temperature=0.5,
        eod_token_id=3,
        tokenizer=UpperCase(),
        seed=3,
    ),
    *cases(
        HangWatchdogConfig,
        watch,
        {},
        deadline_minutes=1.0,
        first_deadline_minutes=1.0,
        validation_deadline_minutes=1.0,
    ),
    *cases(RunReportConfig, report, {}, references={"xz": 1.0}),
    *cases(ExtendedEvaluationConfig, log_evaluation, {}, log_mode="mine"),
    *cases(
        lmeval.LMEvalEvaluationConfig,
        run_harness,
        HARNESS,
        tokenizer_path="other",
        evaluation_tasks=["other"],
        include_path="folder",
        include_defaults=False,
        log_mode="mine {task}",
        cache_requests=False,
        limit_requests=3,
        write_out=True,
        use_infinite_eval=False,
        infinite_eval_chunksize=3,
        context_length=Beside(5, {"use_infinite_eval": False}),
        batch_size=4,
        worker_buffer_size=3,
        worker_count=3,
        debug=True,
        system_instruction="Think.",
        num_fewshot=3,
        bootstrap_iters=3,
        apply_chat_template="chat",
        every_n_steps=2,
        main_process_only=True,
    ),
]
CASES = [*HOOKS, *CALLBACKS]
