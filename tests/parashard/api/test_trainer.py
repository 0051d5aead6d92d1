"""What a trainer makes of its arguments, before any process is started."""

from __future__ import annotations

import re
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import parashard as ps
from parashard.api.jobs import check_same_model
from parashard.data.base import Batch, DataSpec
from parashard.errors import ConfigurationError, JobFailed, WrongModel
from parashard.models.declaration import declare, read_declaration, write_declaration
from support.played_fits import Line, Runs, X, Y, played_runs  # noqa: F401  # a fixture


def test_arguments_become_a_job(runs: Runs) -> None:
    strategy = ps.ParameterServerStrategy(3, 5, "ssp:4", transport="tcp")
    trainer = ps.Trainer(Line(), ps.Adam(0.5, beta1=0.8), strategy, seed=7, settings={"checkpoint.every_s": 2})
    trainer.fit((X, Y), epochs=4, batch_size=2, validation_split=0.5, verbose=0)
    [run] = runs.jobs
    job = run.job
    assert (job.job.name, job.job.seed, job.job.epochs, job.job.batch_size) == ("train", 7, 4, 2)
    assert (job.optimizer.kind, job.optimizer.learning_rate, job.optimizer.beta1) == ("adam", 0.5, 0.8)  # type: ignore[union-attr]
    assert (job.cluster.shards, job.cluster.workers, job.cluster.transport) == (3, 5, "tcp")
    assert (str(job.consistency.policy), job.checkpoint.every_s) == ("ssp:4", 2)
    assert run.folder.parent.name == "runs"
    assert (run.folder / "declaration.json").exists()


def test_data_and_sizes_become_a_job(runs: Runs) -> None:
    trainer = ps.Trainer(Line(), strategy=ps.ParameterServerStrategy(consistency="sync:2"))
    trainer.fit(list(zip(X, Y, strict=True)), epochs=5, initial_epoch=2, global_batch_size=4, verbose=0)
    trainer.fit((X, Y), batch_size=2, gradient_accumulation=3, verbose=0)
    jobs = [run.job.job for run in runs.jobs]
    assert [(job.epochs, job.first_epoch, job.batch_size) for job in jobs] == [(3, 2, 2), (1, None, 6)]


def test_weights_need_a_model_that_uses_them(runs: Runs) -> None:
    trainer = ps.Trainer(Line())
    for arguments in ({"sample_weight": np.ones(6)}, {"validation_data": (X, Y, Y)}):
        with pytest.raises(
            ConfigurationError, match=r"a model of your own reads batch\.weights and has weighted = True"
        ):
            trainer.fit((X, Y), verbose=0, **arguments)
    assert runs.jobs == []

    class Weighted(Line):
        weighted = True

        def evaluate(self, variables: Any, batch: Any, xp: Any) -> Mapping[str, float]:
            return {"loss": float((batch.weights * batch.targets).sum() / len(batch.targets))}

    ps.Trainer(Weighted()).fit((X, Y), sample_weight=np.ones(6), verbose=0)
    assert len(runs.jobs) == 1
    metrics = ps.Trainer(Weighted()).evaluate((X, Y, np.arange(6)), batch_size=4)
    assert metrics == ps.Trainer(Weighted()).evaluate(X, Y, sample_weight=np.arange(6), batch_size=4)
    assert metrics["loss"] == pytest.approx((np.arange(6) * Y).mean()), "the mean is over examples"


def test_a_history_has_the_validation_of_each_epoch(runs: Runs) -> None:
    history = ps.Trainer(Line()).fit((X, Y), validation_data=(X, Y), verbose=0)
    assert history.history == {"loss": [0.25], "val_loss": [0.5, 0.4]}
    assert repr(history).startswith("History(loss 0.25, val_loss 0.4; ")


def test_a_figure_that_is_not_finite_is_nan_in_a_history(tmp_path: Path) -> None:
    report = {"training_loss": None, "evaluations": [{"steps": 3, "loss": 0.5}, {"steps": 6, "loss": None}]}
    history = ps.History(report, tmp_path)
    found = {name: [repr(value) for value in values] for name, values in history.history.items()}
    assert found == {"loss": ["nan"], "val_loss": ["0.5", "nan"]}
    assert repr(history).startswith("History(loss nan, val_loss nan; ")
    assert ps.History(report, tmp_path, first_epoch=3).epoch == [3, 4]
    assert repr(ps.History(report, tmp_path, {"mine": [None]}).history["mine"]) == "[nan]"  # type: ignore[list-item]


@pytest.mark.parametrize("seed", [3, np.int64(3), np.uint8(3), 2**63 - 1])
def test_a_seed_is_a_whole_number_of_python_or_numpy(runs: Runs, seed: Any) -> None:
    ps.Trainer(Line(), seed=seed).fit((X, Y), verbose=0)
    [run] = runs.jobs
    assert (run.job.job.seed, type(run.job.job.seed)) == (int(seed), int)


@pytest.mark.parametrize("seed", [2**70, 2**63, -1, None, True, 3.0, "3", np.float32(3), np.True_])
def test_any_other_seed_is_refused_at_once(seed: Any) -> None:
    with pytest.raises(ConfigurationError) as refused:
        ps.Trainer(Line(), seed=seed)
    assert refused.value.message == (
        "ps.Trainer: seed is a whole number from 0 to 9223372036854775807, by which what is random comes again in each "
        f"process; found {seed!r}"
    )


def test_one_line_stays_on_the_screen(runs: Runs, capsys: pytest.CaptureFixture[str]) -> None:
    history = ps.Trainer(Line()).fit((X, Y))
    place = history.run_dir.relative_to(Path.cwd())
    assert capsys.readouterr().out == f"done in 2.0 s: loss 0.25, val_loss 0.4; {place}\n"
    ps.Trainer(Line()).fit((X, Y), verbose=0)
    assert capsys.readouterr().out == ""


def test_an_evaluation_is_of_the_first_values_and_then_of_the_trained_ones(runs: Runs) -> None:
    trainer = ps.Trainer(Line())
    outputs = X @ [[1.0], [2.0]]
    metrics = trainer.evaluate((X, Y), batch_size=4)
    assert metrics["loss"] == pytest.approx(float(np.mean((outputs[:, 0] - Y) ** 2)), rel=1e-6)
    assert metrics["examples"] == pytest.approx((4 * 4 + 2 * 2) / 6), "each batch counts by its examples"
    trainer.fit((X, Y), verbose=0)
    outputs = X @ [[3.0], [3.0]] + 1
    assert trainer.evaluate((X, Y))["loss"] == pytest.approx(float(np.mean((outputs[:, 0] - Y) ** 2)), rel=1e-6)


def test_a_second_fit_goes_on_from_the_weights(runs: Runs) -> None:
    trainer = ps.Trainer(Line())
    trainer.fit((X, Y), verbose=0)
    trainer.fit((X, Y), verbose=0)
    declared = [run.declared for run in runs.jobs if run.declared is not None]
    assert [found.arrays["w"].ravel().tolist() for found in declared] == [[1, 2], [3, 3]]
    assert [sorted(found.arrays) for found in declared] == [["w"], ["b", "w"]]


def test_an_end_that_is_not_well_is_an_exception(runs: Runs) -> None:
    trainer = ps.Trainer(Line())
    for exit_code, accepted, kind, says in (
        (1, True, JobFailed, r"^why \(logs: .*runs/.*/logs\)$"),
        (2, False, ConfigurationError, "^why$"),
        (130, True, KeyboardInterrupt, "^why$"),
    ):
        runs.exit_code, runs.accepted = exit_code, accepted
        with pytest.raises(kind, match=says):
            trainer.fit((X, Y), verbose=0)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (
            {"model": object()},
            "a trainer's model is ps.torch.Model(Net, loss=...), ps.jax.Model, ps.keras.Model, ",
        ),
        ({"model": Line}, "found Line"),
        ({"optimizer": "adam"}, "it is one of parashard's, such as ps.Adam(1e-3), or one of PyTorch, Keras or"),
        ({"strategy": ps.ParameterServerStrategy(0)}, "ps.ParameterServerStrategy: shards: found 0; allowed: >= 1"),
        (
            {"strategy": ps.ParameterServerStrategy(consistency="bsp")},
            'ps.ParameterServerStrategy: consistency: found "bsp"; allowed: auto, async, ',
        ),
        ({"settings": [5]}, 'settings is a dict such as {"checkpoint.every_s": 5}, found [5]'),
        ({"settings": {5: 5}}, "settings: 5; allowed: TABLE.KEY"),
        ({"settings": {"checkpoint.evry_s": 2}}, "did you mean checkpoint.every_s?"),
        (
            {"settings": {"job.seed": 2}},
            "settings: 'job.seed' is an argument of the trainer, of fit or",
        ),
        ({"settings": {"optimizer.kind": "sgd"}}, "settings: 'optimizer.kind' is an argument"),
        ({"strategy": "async"}, "strategy is one of parashard's, such as ps.OneDeviceStrategy(), found str"),
        ({"settings": {"every_s": 2}}, "settings: 'every_s'; allowed: TABLE.KEY of a job file"),
    ],
)
def test_what_cannot_be_used_is_named(runs: Runs, arguments: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigurationError) as refused:
        ps.Trainer(**{"model": Line(), **arguments}).fit((X, Y), verbose=0)
    assert says in refused.value.message
    assert runs.jobs == []


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (
            lambda: ps.Adam(lr=0.1),
            "ps.Adam has no lr=; it is learning_rate here; allowed: learning_rate, weight_decay, ",
        ),
        (lambda: ps.Adam(betas=(0.9, 0.99)), "ps.Adam has no betas=; it is beta1 and beta2 here; allowed: "),
        (lambda: ps.SGD(0.1, momentum=0.9), "ps.SGD has no momentum=; ps.Momentum has it; allowed: "),
        (lambda: ps.SGD(0.1, speed=1), "ps.SGD has no speed=; allowed: learning_rate, "),
        (lambda: ps.Adam(-1.0), "ps.Adam: learning_rate: found -1.0; allowed: 0, or between"),
        (lambda: ps.Adam(schedule={"kind": "x"}), 'ps.Adam: schedule: found {"kind": "x"}; allowed: \'constant\', '),
        (lambda: ps.Adam(1e-3, 0.9, 0.99), "ps.Adam takes its learning rate first and all else by name; allowed: "),
    ],
)
def test_a_setting_that_an_optimizer_lacks_or_refuses_is_named(make: Callable[[], object], says: str) -> None:
    with pytest.raises(ConfigurationError) as refused:
        make()
    assert refused.value.message.startswith(says)


class Drawn(Line):
    """A model whose first values are given."""

    def __init__(self, **values: Any) -> None:
        self._first = values

    def initial_variables(self) -> Mapping[str, Any]:
        return self._first


@pytest.mark.parametrize(
    ("mine", "says"),
    [
        ({"w": [1.0, 2.0]}, ""),
        ({"w": [1.0, 2.5]}, "variable 'w' of the model has other first values in this worker than in the process that"),
        (
            {"w": [1.0]},
            "variable 'w' of the model has another shape in this worker than in the process",
        ),
        (
            {"w": [1.0, 2.0], "b": [0.0]},
            "the model has other variables in this worker than in the process that",
        ),
    ],
)
def test_a_model_that_differs_in_a_worker_is_refused_by_its_variable(
    tmp_path: Path, mine: dict[str, Any], says: str
) -> None:
    spec = DataSpec(8, 0, (2,), 0, "x")
    write_declaration(tmp_path, declare(spec, Drawn(w=[1.0, 2.0])))
    here = declare(spec, Drawn(**mine))
    if not says:
        check_same_model(here, tmp_path)
        return
    with pytest.raises(ConfigurationError) as refused:
        check_same_model(here, tmp_path)
    assert refused.value.message.startswith(says)


@pytest.mark.parametrize(
    ("data", "more", "says"),
    [
        ({"x": X, "y": Y}, {"targets": 5}, "targets= is the name of a field, or a list of names, found 5"),
        ((X, Y), {"validation_split": "0.2"}, "validation_split must be at least 0 and less than 1, found '0.2'"),
        ((X, Y), {"resume": "x"}, "ps.Trainer.fit: resume is True or False, found 'x'"),
        ((X, Y), {"wait_for_callbacks": "x"}, "ps.Trainer.fit: wait_for_callbacks is True, False or None, found 'x'"),
        ((X, Y), {"resume": None}, "ps.Trainer.fit: resume is True or False, found None"),
    ],
)
def test_an_argument_of_another_type_is_refused(data: Any, more: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigurationError) as refused:
        ps.Trainer(Line(), strategy=ps.OneDeviceStrategy()).fit(data, **more)
    assert refused.value.message == says


def test_examples_that_the_model_cannot_compute_are_named_with_their_shapes() -> None:
    with pytest.raises(ConfigurationError) as refused:
        ps.Trainer(Line()).evaluate((np.zeros((6, 5)), Y))
    assert refused.value.message.startswith(
        "evaluate: the model cannot compute these examples, each of which has inputs (5) float"
    )
    assert "ValueError: matmul" in refused.value.message


@pytest.mark.parametrize("run", ["", 5, None])
def test_what_is_no_run_is_refused_at_once(run: Any) -> None:
    with pytest.raises(ConfigurationError, match="takes a run directory, a name under runs/ or the coordinator's"):
        ps.connect(run)


def test_no_examples_are_refused(runs: Runs) -> None:
    with pytest.raises(ConfigurationError, match="data has no examples"):
        ps.Trainer(Line()).evaluate((X[:0], Y[:0]))


@pytest.mark.parametrize("size", [0, -1, 2.5])
def test_as_many_examples_at_once_as_there_can_be(runs: Runs, size: Any) -> None:
    with pytest.raises(ConfigurationError, match=f"batch_size must be a whole number of at least 1, found {size}"):
        ps.Trainer(Line()).evaluate((X, Y), batch_size=size)


def test_a_model_without_a_framework_neither_predicts_nor_is_given_back(runs: Runs) -> None:
    with pytest.raises(ConfigurationError, match="Line has no method 'predict'"):
        ps.Trainer(Line()).predict(X)
    with pytest.raises(ConfigurationError, match="Line has no method 'to_user_object'"):
        ps.Trainer(Line()).model()


class Checked(Line):
    """A model that is tried before a job begins."""

    def __init__(self, wrong: Exception | None) -> None:
        self.wrong = wrong
        self.tried: list[Batch] = []

    def check(self, batch: Batch) -> None:
        self.tried.append(batch)
        if self.wrong is not None:
            raise self.wrong


@pytest.mark.parametrize(
    ("sizes", "tried"),
    [
        ({"batch_size": 3}, [3]),
        ({"batch_size": 100}, [6]),
        ({"batch_size": 4}, [4, 2]),
        ({"batch_size": 4, "drop_last": True}, [4]),
        ({"batch_size": 2, "gradient_accumulation": 2}, [2, 1]),
    ],
)
def test_a_model_is_tried_on_a_batch_of_its_own_size_before_a_job_begins(runs: Runs, sizes: Any, tried: Any) -> None:
    model = Checked(None)
    ps.Trainer(model).fit((X, Y), verbose=0, **sizes)
    assert [batch.inputs.tolist() for batch in model.tried] == [X[:size].tolist() for size in tried]
    assert len(runs.jobs) == 1


def test_a_last_step_that_cannot_be_computed_is_refused_before_the_first(runs: Runs) -> None:
    class Even(Checked):
        def check(self, batch: Batch) -> None:
            if len(batch.indices) % 4:
                raise ValueError("not in fours")

    says = (
        "the last step of a pass has 2 examples, where others have 4, and the model cannot compute it: ValueError: not"
    )
    with pytest.raises(
        ConfigurationError, match=f"{says}.*allowed: drop_last=True, which leaves a shorter last step out"
    ):
        ps.Trainer(Even(None)).fit((X, Y), batch_size=4, verbose=0)
    assert runs.jobs == []
    ps.Trainer(Even(None)).fit((X, Y), batch_size=4, drop_last=True, verbose=0)


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (WrongModel("the loss must be a scalar"), "the loss must be a scalar"),
        (KeyError("w"), "the model cannot compute a step: KeyError: 'w' (test_trainer.py:"),
    ],
)
def test_what_no_worker_could_compute_starts_none(runs: Runs, wrong: Exception, says: str) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(says.partition("(")[0])) as refused:
        ps.Trainer(Checked(wrong)).fit((X, Y), verbose=0)
    assert says.partition("(")[2] in str(refused.value)
    assert runs.jobs == []


def test_names_are_imported_when_they_are_used() -> None:
    assert {"Trainer", "Adam", "ParameterServerStrategy", "torch", "is_worker"} <= set(dir(ps))
    assert (ps.JobFailed, ps.ConfigurationError) == (JobFailed, ConfigurationError)
    with pytest.raises(AttributeError, match="no attribute 'Trainner'"):
        ps.Trainner  # noqa: B018


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("max_epochs", "it is epochs= of fit"),
        ("gradient_clip_val", "it is clip_norm= of the optimizer"),
        ("validation_batch_size", "an evaluation's figures do not depend on it"),
        ("bath_size", "allowed: data, y, epochs, "),
    ],
)
def test_an_argument_that_fit_has_not_is_a_sentence(runs: Runs, name: str, says: str) -> None:
    with pytest.raises(ConfigurationError, match=f"fit has no {name}=; .*{says}|fit has no {name}=; {says}"):
        ps.Trainer(Line()).fit((X, Y), **{name: 1})


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("epochs", "Trainer has no epochs=; fit has it; allowed: model, optimizer, strategy, clip_norm"),
        ("accumulate_grad_batches", "Trainer has no accumulate_grad_batches=; it is gradient_accumulation= of fit"),
        ("val_check_interval", "the Trainer has settings="),
        ("colour", "Trainer has no colour=; allowed: model, "),
    ],
)
def test_an_argument_that_a_trainer_has_not_is_a_sentence(name: str, says: str) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(says)):
        ps.Trainer(Line(), **{name: 1})  # type: ignore[arg-type]


def test_a_mistake_has_no_traceback_of_what_is_beneath_and_its_cause_the_users_lines(runs: Runs) -> None:
    class Wrong(Line):
        def evaluate(self, variables: Any, batch: Any, xp: Any) -> Mapping[str, float]:
            raise KeyError("mine")

    with pytest.raises(ConfigurationError) as caught:
        ps.Trainer(Wrong()).evaluate((X, Y))
    cause = caught.value.__cause__
    assert isinstance(cause, KeyError)
    for error in (caught.value, cause):
        files = {Path(frame.filename).name for frame in traceback.extract_tb(error.__traceback__)}
        assert files <= {"test_trainer.py", "user_errors.py"}
    assert "test_trainer.py" in {Path(frame.filename).name for frame in traceback.extract_tb(cause.__traceback__)}


@pytest.mark.parametrize("verbose", [0, 1])
def test_inputs_and_targets_may_be_two_arguments(runs: Runs, verbose: int) -> None:
    trainer = ps.Trainer(Line())
    due = trainer.evaluate((X, Y))
    assert due == trainer.evaluate(X, Y, verbose=verbose) == trainer.evaluate(x=X, y=Y)
    for given in ({"data": (X, Y)}, {"data": X, "y": Y}, {"x": X, "y": Y}):
        trainer.fit(**given, verbose=0)
    assert len({read_declaration(run.folder).spec.fingerprint for run in runs.jobs}) == 1


@pytest.mark.parametrize(
    ("call", "given", "named", "says"),
    [
        ("fit", (X, Y, 32), {}, r"fit takes the data as fit\(x, y\) or fit\(\(x, y\)\), and all else by name"),
        ("evaluate", (X, Y, 32), {}, r"evaluate takes the data as evaluate\(x, y\)"),
        ("fit", (X,), {"x": X}, "fit was given its data twice"),
        ("fit", (), {}, "fit needs data"),
        ("evaluate", (X, Y), {"steps": 3}, "evaluate has no steps=; all examples are judged"),
        ("predict", (X,), {"callbacks": []}, "predict has no callbacks=; fit has them"),
        ("fit", (X, Y), {"drop_last": 1.5}, "drop_last is True or False, found 1.5"),
        ("fit", (X, Y), {"shuffle": "batch"}, "shuffle is True or False, found 'batch'"),
        ("fit", (X, Y), {"steps_per_epoch": 0}, "steps_per_epoch must be a whole number of at least 1, found 0"),
        ("fit", (X, Y), {"validation_steps": 1}, "validation_steps needs validation_data or validation_split"),
    ],
)
def test_what_cannot_be_data_or_order_is_a_sentence(runs: Runs, call: str, given: Any, named: Any, says: str) -> None:
    with pytest.raises(ConfigurationError, match=says):
        getattr(ps.Trainer(Line()), call)(*given, **named)


def test_the_order_of_the_examples_is_the_job_s(runs: Runs) -> None:
    ps.Trainer(Line()).fit(X, Y, batch_size=4, verbose=0, steps_per_epoch=5, drop_last=True, shuffle=False)
    ps.Trainer(Line()).fit(X, Y, batch_size=4, verbose=0)
    chosen, default = (run.job.job for run in runs.jobs)
    assert (chosen.steps_per_epoch, chosen.drop_last, chosen.shuffle) == (5, True, False)
    assert (default.steps_per_epoch, default.drop_last, default.shuffle) == (None, None, None)
