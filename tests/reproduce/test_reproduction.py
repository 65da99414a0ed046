"""Whole reproductions: their runs are found, continued and reported, also if some fail."""

import contextlib
import html
import io
import json
import os
import re
import shlex
import shutil
import signal
import threading
import time
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace

import pytest

from meanshift.cli import main, parse_arguments
from meanshift.cli.settings import configure, typed_settings
from meanshift.reproduce import jobs
from meanshift.reproduce.claims import Measurement
from meanshift.reproduce.experiment import Experiment
from meanshift.reproduce.results import metric_of, protocols
from meanshift.reproduce.studies import STUDIES
from meanshift.runtime import checkpoint, signals
from tests.support.exact import assert_same
from tests.support.processes import outcome, read_lines, start_processes, wait_for_lines
from tests.support.reproductions import (
    make_reproduction,
    read_files,
    read_table,
    reproduce_command,
    run_command,
)

pytestmark = pytest.mark.slow

BASELINE = [
    *("BYOL-asym s/s", "MSF s/s", "BYOL-asym w/s"),
    *("MSF w/s", "BYOL-asym w/w", "MSF w/w"),
]
SAME_VIEW = ["MSF w/s", "MSF, the same weak view"]
FIRST, SECOND = "msf-w-s-seed0", "msf-the-same-weak-view-seed0"


@pytest.fixture(scope="module")
def finished(dataset, tmp_path_factory):
    """Two studies whose runs were trained by hand, with the commands of the plan."""
    out = tmp_path_factory.mktemp("finished") / "out"
    words = reproduce_command("baseline same-view", dataset, out)
    plan = run_command([*words, "--plan"])
    plan_wrote_nothing = not out.exists()
    for line in plan.splitlines():
        if not line.startswith("#"):
            run_command(shlex.split(line)[1:])
    tables = run_command(words)
    return SimpleNamespace(
        out=out, words=words, plan=plan, plan_wrote_nothing=plan_wrote_nothing, tables=tables
    )


@pytest.fixture
def copied(finished, tmp_path):
    """A copy of the runs of one study, to be damaged."""
    out = tmp_path / "out"
    for name in (FIRST, SECOND):
        shutil.copytree(finished.out / "runs" / name, out / "runs" / name)
    return out


def test_the_plan_has_a_command_per_run_with_exactly_its_settings(finished, dataset):
    assert finished.plan_wrote_nothing
    lines = [line for line in finished.plan.splitlines() if not line.startswith("#")]
    commands = [shlex.split(line) for line in lines]
    training = [words for words in commands if words[1] == "pretrain"]
    reproduction = make_reproduction("baseline same-view", dataset, finished.out)
    assert len(training) == len(reproduction.jobs) == 7
    for words, job in zip(training, reproduction.jobs, strict=True):
        args = parse_arguments(words[1:])
        assert configure(args) == job.config
        assert args.out == job.folder
    assert len(commands) == 14 and {words[0] for words in commands} == {"meanshift"}


def test_the_runs_of_both_studies_are_trained_once(finished, dataset):
    reproduction = make_reproduction("baseline same-view", dataset, finished.out)
    titles = [f"{title}, seed 0" for title in [*BASELINE, SAME_VIEW[1]]]
    assert [job.title for job in reproduction.jobs] == titles
    assert len(list((finished.out / "runs").iterdir())) == 7
    assert all(job.trained and not list(job.commands()) for job in reproduction.jobs)
    one, other = (read_table(finished.out / f"{name}.csv") for name in ("baseline", "same-view"))
    assert one["MSF w/s", "20-NN"] == other["MSF w/s", "20-NN"] != ""


def test_every_column_of_a_study_is_found_in_a_run(finished, dataset):
    job = make_reproduction("baseline", dataset, finished.out).jobs[3]
    for make in STUDIES.values():
        study = make((128_000, 1_024_000))
        for column in study.columns if study.trains else []:
            value = metric_of(job, column)
            assert isinstance(value, float) or protocols([column]) == ["semi"], column


def test_the_tables_contain_the_metrics_of_the_runs(finished):
    means = read_table(finished.out / "baseline.csv")
    assert [title for title, column in means if column == "linear"] == BASELINE
    results = {
        "1-NN": ("knn-test", "1-NN"),
        "20-NN": ("knn-test", "20-NN"),
        "linear": ("linear-cached-test", "top-1"),
    }
    for title in BASELINE:
        run = finished.out / "runs" / (re.sub("[ /]", "-", title.lower()) + "-seed0")
        for column, (name, metric) in results.items():
            result = json.loads((run / "results" / f"{name}.json").read_text())
            expected = result["metrics"][metric]
            assert float(means[title, column]) == pytest.approx(expected, rel=1e-5)
    records = read_lines(finished.out / "runs" / SECOND)
    last = [each["agreement"] for each in records if each["kind"] == "train" and each["epoch"] == 3]
    means = read_table(finished.out / "same-view.csv")
    agreement = float(means[SAME_VIEW[1], "agreement"])  # a line for each step of the last epoch
    assert agreement == pytest.approx(sum(last) / len(last), rel=1e-5)
    assert means[SAME_VIEW[1], "collapse at epoch"] == "inf"
    markdown = (finished.out / "baseline.md").read_text()
    assert "| MSF w/s | " in markdown and "(72.4)" in markdown
    assert "validation 20-NN" in markdown
    seconds = sum(each.get("cpu_seconds", 0) for each in read_lines(finished.out / "runs" / FIRST))
    head, row = (
        next(line.split(" | ") for line in markdown.splitlines() if line.startswith(start))
        for start in ("|  | 1-NN", "| MSF w/s")
    )
    assert row[head.index("CPU minutes")] == str(Measurement((seconds / 60,)))
    assert markdown in finished.tables
    assert (finished.out / "same-view.md").read_text() in finished.tables


def test_every_metric_is_in_its_own_column(finished, dataset, tmp_path):
    run = shutil.copytree(finished.out / "runs" / FIRST, tmp_path / "out" / "runs" / FIRST)
    changed = {"knn-test": {"1-NN": 1.5, "20-NN": 2.5}, "linear-cached-test": {"top-1": 3.5}}
    for name, metrics in changed.items():
        path = run / "results" / f"{name}.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"metrics": metrics}))
    job = make_reproduction("baseline", dataset, tmp_path / "out").jobs[3]
    assert [metric_of(job, column) for column in ("1-NN", "20-NN", "linear")] == [1.5, 2.5, 3.5]
    records = read_lines(run)
    train = [each for each in records if each["kind"] == "train" and each["epoch"] == 3]
    snapshot = [record for record in records if record["kind"] == "snapshot"][-1]
    for column, name in {"purity": "purity", "rank": "effective_rank"}.items():
        mean = sum(each[name] for each in train) / len(train)  # of lines of a step each
        assert metric_of(job, column) == pytest.approx(mean)
    assert metric_of(job, "purity, weak views") == snapshot["purity_weak"]
    assert metric_of(job, "purity, strong views") == snapshot["purity_strong"]


def test_everything_is_written(finished):
    names = {path.name for path in finished.out.iterdir() if path.is_file()} - {".lock"}
    studies = ("baseline", "same-view")
    ends = ("md", "csv", "png", "pdf", "svg", "txt")
    files = {f"{name}{time}.{end}" for name in studies for time in ("", "-time") for end in ends}
    files -= {f"{name}-time.{end}" for name in studies for end in ("md", "csv")}
    assert names == files | {"reproduce.html"}


def test_the_same_command_again_changes_nothing(finished, monkeypatch):
    monkeypatch.setattr(jobs.sys, "executable", "/bin/false")
    before = read_files(finished.out)
    assert run_command(finished.words) == finished.tables
    after = read_files(finished.out)
    assert {path: data for path, (_, data) in after.items()} == {
        path: data for path, (_, data) in before.items()
    }
    of_runs = [path for path in before if path.parts[0] == "runs"]
    assert len(of_runs) > 7 * 6 and all(before[path] == after[path] for path in of_runs)


def test_runs_of_an_archive_are_found_in_another_folder(finished, dataset, tmp_path, monkeypatch):
    monkeypatch.setattr(jobs.sys, "executable", "/bin/false")  # nothing can be trained
    archive = tmp_path / "archive"
    assert run_command([*finished.words, "--archive", archive]) == finished.tables
    assert len(list(archive.glob("*.json"))) == 7
    words = reproduce_command("baseline same-view", dataset, tmp_path / "other")
    tables = run_command([*words, "--archive", archive]).replace(str(tmp_path / "other"), "")
    assert tables == finished.tables.replace(str(finished.out), "")
    empty = reproduce_command("baseline", dataset, tmp_path / "empty", "--archive", "none")
    assert "Not run yet: BYOL-asym s/s, MSF s/s" in run_command([*empty, "--tables"])


def test_renamed_runs_are_found(copied, dataset):
    runs = copied / "runs"
    (runs / FIRST).rename(runs / "mine")
    (runs / SECOND).rename(runs / FIRST)
    reproduction = make_reproduction("same-view", dataset, copied)
    assert [job.folder.name for job in reproduction.jobs] == ["mine", FIRST]
    assert all(job.trained for job in reproduction.jobs)


def test_a_copy_of_a_run_is_not_another_seed(copied, dataset):
    shutil.copytree(copied / "runs" / FIRST, copied / "runs" / f"{FIRST}-copy")
    with pytest.warns(UserWarning, match=f"{FIRST}: has the same settings as {FIRST}-copy; only"):
        reproduction = make_reproduction("same-view", dataset, copied)
    assert [job.folder.name for job in reproduction.jobs] == [FIRST, SECOND]


def test_a_damaged_run_does_not_hide_the_others(copied, dataset):
    (copied / "runs" / FIRST / "config.json").write_text("{")
    reproduction = make_reproduction("same-view", dataset, copied)
    assert [job.folder.name for job in reproduction.jobs] == [f"{FIRST}-2", SECOND]


@pytest.mark.parametrize("changed", ["optim.lr", "data.source", "data.validation"])
def test_other_settings_and_images_make_new_runs_beside_the_old(copied, dataset, tmp_path, changed):
    data = dataset
    settings = {}
    if changed == "data.source":
        data = shutil.copy(dataset, tmp_path / "others.npz")
    else:
        settings = {changed: "0.2"}
    reproduction = make_reproduction("same-view", data, copied, **settings)
    names = [job.folder.name for job in reproduction.jobs]
    assert names == [f"{name}-2" for name in (FIRST, SECOND)]
    if changed == "optim.lr":
        words = reproduce_command("same-view", data, copied, "--optim.lr", "0.2", "--plan")
        plan = run_command(words).splitlines()
        run_command(shlex.split(plan[1])[1:])
        assert run_command(words).splitlines()[0] == "# MSF w/s, seed 0, trained"
        again = make_reproduction("same-view", data, copied, **settings)
        assert [job.trained for job in again.jobs] == [True, False]
    assert all(job.trained for job in make_reproduction("same-view", dataset, copied).jobs)


@pytest.mark.parametrize(
    ("name", "value"),
    [("train.save_every", "0.5"), ("train.log_every", "9"), ("data.workers", "2")],
)
def test_resume_safe_settings_make_no_new_runs(finished, dataset, name, value):
    reproduction = make_reproduction("same-view", dataset, finished.out, **{name: value})
    assert all(job.trained for job in reproduction.jobs)


def test_a_result_of_earlier_weights_is_evaluated_again(copied, dataset):
    path = copied / "runs" / FIRST / "results" / "knn-test.json"
    result = json.loads(path.read_text())
    encoder = result["card"]["encoder"]
    result["card"]["encoder"] = re.sub(r"step \d+$", "step 1", encoder)
    assert result["card"]["encoder"] != encoder
    path.write_text(json.dumps(result))
    reproduction = make_reproduction("same-view", dataset, copied)
    commands = [list(job.commands()) for job in reproduction.jobs]
    assert [len(each) for each in commands] == [1, 0]
    assert commands[0][0][:3] == ["evaluate", "knn", str(copied / "runs" / FIRST)]


def test_a_study_is_written_with_the_runs_that_are_finished(finished, dataset, tmp_path):
    out = tmp_path / "out"
    for name in (FIRST, "msf-s-s-seed0"):
        shutil.copytree(finished.out / "runs" / name, out / "runs" / name)
    reproduction = make_reproduction("purity", dataset, out)
    trained = [job.trained for job in reproduction.jobs]
    assert trained == [False, True, False, False, False, True]
    page = reproduction.write().read_text()
    means = read_table(out / "purity.csv")
    for column in ("purity", "purity, weak views", "purity, strong views"):
        assert 0 < float(means["w/s, k=5", column]) <= 1
        assert means["w/s, k=2", column] == ""
    assert "2 of 6 runs are trained" in page and "data:image/png" in page
    assert (out / "purity.png").exists()
    missing = "Not run yet: w/s, k=2, w/s, k=10, w/s, k=20, w/s, k=50."
    assert missing in reproduction.results()[0].markdown()


# The page


class Page(HTMLParser):
    """The addresses, tags and text of a page."""

    def __init__(self, text):
        super().__init__()
        self.addresses = []
        self.tags = set()
        self.text = ""
        self.feed(text)
        self.text = " ".join(self.text.split())

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        names = {"src", "href", "srcset", "data", "action", "poster"}
        self.addresses += [value for name, value in attrs if name in names]

    def handle_data(self, data):
        self.text += data


@pytest.fixture(scope="module")
def page(finished):
    return Page((finished.out / "reproduce.html").read_text())


def test_the_page_needs_no_other_file(finished, page):
    assert page.addresses
    assert all(address.startswith(("#", "data:image/png;")) for address in page.addresses)
    text = (finished.out / "reproduce.html").read_text()
    assert "url(http" not in text and "@import" not in text
    assert sum(address.startswith("data:") for address in page.addresses) == 4


def test_the_page_shows_every_claim_and_verdict(finished, dataset, page):
    for result in make_reproduction("baseline same-view", dataset, finished.out).results():
        assert result.verdicts()
        for claim, verdict in result.verdicts():
            assert f"{verdict.outcome}{claim.text}{verdict.reason}" in page.text
        for title, row in result.table.items():
            for measurement in row.values():
                paper = "" if measurement.paper is None else f"paper {measurement.paper}"
                assert f"{measurement}{paper}" in page.text and title in page.text


def test_a_path_with_markup_in_it_is_text_on_the_page(dataset, page):
    assert str(dataset) in page.text and "i" not in page.tags


def test_the_commands_on_the_page_give_the_same_again(finished, dataset):
    text = (finished.out / "reproduce.html").read_text()
    commands = [html.unescape(code) for code in re.findall("<code>(.*?)</code>", text)]
    again = [shlex.split(line) for line in commands if line.startswith("meanshift reproduce")]
    assert [words[2:4] for words in again[:2]] == [
        ["baseline", "--scale"],
        ["same-view", "--scale"],
    ]
    args = parse_arguments(again[-1][1:])
    assert (args.names, args.out, args.seeds) == (["baseline", "same-view"], finished.out, 1)
    experiment = Experiment.open(args.scale, data=args.data, overrides=typed_settings(args))
    expected = make_reproduction("baseline", dataset, finished.out).experiment
    assert vars(experiment) == vars(expected)
    assert sum(line.startswith("meanshift pretrain") for line in commands) == 7


# Killed, stopped and continued


def children(pid):
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def has_ended(pid, within=30.0):
    """Whether a process has ended, also if nobody has waited for it."""
    until = time.monotonic() + within
    while time.monotonic() < until:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX":
                return True
        except OSError:
            return True
        time.sleep(0.02)
    return False


def step_of(run):
    state, unreadable = checkpoint.latest(run / "checkpoints")
    assert not unreadable
    return state["step"]


def stop_when_longer(run, lines, ended):
    """Send SIGTERM to this process when the metrics of a run have so many lines.

    The run itself pauses until this process has passed the signal on, however busy the machine is.
    """
    while len(read_lines(run)) < lines and not ended.wait(0.01):
        pass
    if ended.is_set():
        return
    (child,) = (pid for pid in children(os.getpid()) if "pretrain" in command_of(pid))
    os.kill(child, signal.SIGSTOP)
    os.kill(os.getpid(), signal.SIGTERM)
    while not pending(child, signal.SIGTERM) and not ended.wait(0.01):
        pass
    os.kill(child, signal.SIGCONT)


def command_of(pid):
    return Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")


def pending(pid, number):
    """Whether a process has a signal that it has not handled yet."""
    status = Path(f"/proc/{pid}/status").read_text()
    mask = int(re.search(r"ShdPnd:\s*(\w+)", status).group(1), 16)
    return bool(mask >> (number - 1) & 1)


def signal_all(processes, number):
    for pid in processes:
        os.kill(pid, number)


@pytest.fixture(scope="module")
def interrupted(finished, dataset, tmp_path_factory):
    """A reproduction killed while it trains, then stopped by SIGTERM, and then finished."""
    folder = tmp_path_factory.mktemp("interrupted")
    out = folder / "out"
    run = out / "runs" / FIRST
    words = reproduce_command("same-view", dataset, out)
    seen = SimpleNamespace(out=out, run=run)
    shutil.copytree(finished.out / "runs" / SECOND, out / "runs" / SECOND)
    with start_processes(1, words, folder) as group:
        wait_for_lines(run, 6, group)
        seen.children = children(group.processes[0].pid)
        signal_all(seen.children, signal.SIGSTOP)  # it must not finish meanwhile
        with contextlib.redirect_stderr(io.StringIO()) as err:
            seen.second = main(words), err.getvalue()
        group.signal(signal.SIGKILL)
        signal_all(seen.children, signal.SIGCONT)
        group.wait()
        seen.ended = [has_ended(pid) for pid in seen.children]
    seen.killed_at = step_of(run)

    handler = signal.signal(signal.SIGTERM, lambda *_: pytest.fail("nobody caught the signal"))
    ended = threading.Event()
    lines = len(read_lines(run)) + 4
    stopper = threading.Thread(target=stop_when_longer, args=(run, lines, ended))
    try:
        with contextlib.redirect_stderr(io.StringIO()) as err:
            stopper.start()
            seen.code = main(words)
    finally:
        ended.set()
        stopper.join()
        signal.signal(signal.SIGTERM, handler)
    seen.messages = err.getvalue()
    seen.stopped_at = step_of(run)
    seen.page = (out / "reproduce.html").read_text()
    run_command(words)
    return seen


@pytest.mark.slow
def test_a_killed_reproduction_ends_its_run_too(interrupted):
    assert len(interrupted.children) == 1 and interrupted.ended == [True]
    assert 0 < interrupted.killed_at < 33


@pytest.mark.slow
def test_two_reproductions_in_one_folder_are_refused(interrupted):
    code, message = interrupted.second
    assert code == 2 and "is reproducing in it" in message and "another --out" in message


@pytest.mark.slow
def test_a_stopped_reproduction_saves_its_runs_and_says_how_to_continue(interrupted):
    assert interrupted.code == signals.REQUEUE == 75
    assert "the same command continues" in interrupted.messages
    assert "failed" not in interrupted.messages
    assert interrupted.killed_at < interrupted.stopped_at < 33
    assert f"step {interrupted.stopped_at} of 33" in interrupted.page
    assert "1 of 2 runs are trained" in interrupted.page


@pytest.mark.slow
def test_an_interrupted_reproduction_ends_in_the_same_bits(interrupted, finished):
    assert_same(outcome(interrupted.run), outcome(finished.out / "runs" / FIRST))
    environment = json.loads((interrupted.run / "environment.json").read_text())
    assert len(environment["earlier"]) == 2
    tables = [(each.out / "same-view.csv").read_text() for each in (interrupted, finished)]
    assert tables[0] == tables[1]
    tables = [(each.out / "same-view.md").read_text() for each in (interrupted, finished)]
    assert without_cpu_minutes(tables[0]) == without_cpu_minutes(tables[1])


def without_cpu_minutes(table):
    """The cells of a table in Markdown without the column that no run repeats."""
    rows = [line.split(" | ") for line in table.splitlines()]
    (head,) = [cells for cells in rows if "CPU minutes" in cells]
    place = head.index("CPU minutes")
    return [
        [*cells[:place], *cells[place + 1 :]] if len(cells) == len(head) else cells
        for cells in rows
    ]


# Failures


@pytest.fixture(scope="module")
def damaged(finished, dataset, tmp_path_factory):
    """Side by side: a run to be trained and evaluated, and one whose weights are damaged."""
    out = tmp_path_factory.mktemp("damaged") / "out"
    shutil.copytree(finished.out / "runs" / SECOND, out / "runs" / SECOND)
    shutil.rmtree(out / "runs" / SECOND / "results")
    for path in (out / "runs" / SECOND / "checkpoints").iterdir():
        path.write_bytes(b"garbage")
    shown = []
    show = jobs._ProgressBar.show

    def watched(self, running):
        shown.append([job.title for job in running])
        show(self, running)

    words = reproduce_command("same-view", dataset, out, "--devices", "cpu", "cpu")
    with (
        pytest.MonkeyPatch.context() as patch,
        contextlib.redirect_stdout(io.StringIO()) as output,
        contextlib.redirect_stderr(io.StringIO()) as err,
    ):
        patch.setattr(jobs._ProgressBar, "show", watched)
        code = main(words)
    return SimpleNamespace(
        out=out, code=code, output=output.getvalue(), err=err.getvalue(), shown=shown
    )


@pytest.mark.slow
def test_a_run_that_fails_is_named_with_its_log(damaged):
    assert damaged.code == 1
    message = damaged.err.rpartition("failed: ")[2]
    log = damaged.out / "logs" / f"{SECOND}.log"
    assert message.startswith(f"{SAME_VIEW[1]}, seed 0: ") and "\n" not in message.strip()
    assert str(log) in message and "checkpoints" in message and "Traceback" not in message
    assert f"\n$ meanshift evaluate knn rank {damaged.out}" in log.read_text()
    assert "step-000000033.pt" in log.read_text()
    page = Page((damaged.out / "reproduce.html").read_text())
    assert f"{SAME_VIEW[1]}, seed 0 failed: " in page.text and str(log) in page.text


@pytest.mark.slow
def test_the_other_runs_are_finished(damaged, finished):
    means = read_table(damaged.out / "same-view.csv")
    expected = {
        key: value
        for key, value in read_table(finished.out / "same-view.csv").items()
        if key[0] == SAME_VIEW[0]
    }
    assert expected == {key: means[key] for key in expected}
    assert "" not in expected.values()
    assert f"| {SAME_VIEW[1]} | – | – |" in damaged.output
    assert means[SAME_VIEW[1], "20-NN"] == ""


@pytest.mark.slow
def test_runs_side_by_side_give_the_bits_of_runs_one_after_another(damaged, finished):
    assert [f"{title}, seed 0" for title in SAME_VIEW] in damaged.shown
    assert_same(outcome(damaged.out / "runs" / FIRST), outcome(finished.out / "runs" / FIRST))


@pytest.fixture
def silent_failure(copied, dataset, monkeypatch, call):
    """The messages when a process ends silently, after one that reported an error."""
    monkeypatch.setattr(jobs.sys, "executable", "/bin/false")
    shutil.rmtree(copied / "runs" / FIRST / "results")
    (copied / "logs").mkdir()
    (copied / "logs" / f"{FIRST}.log").write_text("meanshift: an earlier error\n")
    code, _, err = call(*reproduce_command("same-view", dataset, copied))
    assert code == 1
    assert f"failed: {SAME_VIEW[0]}, seed 0: " in err and "(exit code 1;" in err
    return err


def test_a_failure_is_not_reported_with_an_earlier_error(silent_failure):
    assert "an earlier error" not in silent_failure


def test_a_failure_is_reported_on_a_line_of_its_own(silent_failure):
    assert f"\nfailed: {SAME_VIEW[0]}, seed 0: " in silent_failure
