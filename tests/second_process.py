"""The whole suite in two processes, for two cores: the second runs what mostly waits for processes.

It is a pytest of its own that runs the files of SECOND and writes its reports down, in pytest's own
form. The first one tells them at its end, as if those tests had run there: one count, one status.
Only `pytest` without arguments does this.
"""
import json
import os
import subprocess
import sys
import tempfile

import pytest

SECOND = ("test_ranks.py", "test_readme.py", "test_resume.py", "test_study.py", "test_turns.py")
REPORTS = "SECOND_PROCESS_REPORTS"                        # tells the second one where they belong


def pytest_configure(config):
    path = os.environ.pop(REPORTS, None)
    if path:
        config.pluginmanager.register(Writer(config, path))


class Writer:
    """In the second process: every report is a line of JSON."""

    def __init__(self, config, path):
        self.config = config
        self.file = open(path, "w", encoding="utf-8")

    def pytest_runtest_logreport(self, report):
        data = self.config.hook.pytest_report_to_serializable(config=self.config, report=report)
        print(json.dumps(data), file=self.file, flush=True)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config, items):
    """In the first process: leave the tests of SECOND to the other one."""
    there = [item for item in items if item.path.name in SECOND]
    named = config.args_source == pytest.Config.ArgsSource.ARGS
    if named or config.option.collectonly or len(items) < 1000:   # so also with -k
        return
    items[:] = [item for item in items if item not in set(there)]
    config.pluginmanager.register(Second(config, there))


class Second:
    """In the first process: starts the second one, waits for it, tells its reports."""

    def __init__(self, config, items):
        self.config = config
        self.items = items
        self.folder = tempfile.TemporaryDirectory()
        self.reports = os.path.join(self.folder.name, "reports")
        self.printed = open(os.path.join(self.folder.name, "printed"), "w+", encoding="utf-8")
        files = sorted({str(item.path) for item in items})
        command = [sys.executable, "-m", "pytest", "-q", *files]
        self.process = subprocess.Popen(command, cwd=config.rootpath, stdout=self.printed,
                                        stderr=subprocess.STDOUT,
                                        env={**os.environ, REPORTS: self.reports})

    @pytest.hookimpl(wrapper=True)
    def pytest_runtestloop(self, session):
        session.testscollected += len(self.items)         # for the percentages
        try:
            result = yield
            self.process.wait()
        finally:
            self.process.kill()                           # after -x or Ctrl-C nobody waits for it
        ended = set()
        hook = self.config.hook
        with open(self.reports, encoding="utf-8") as file:
            for line in file:
                report = hook.pytest_report_from_serializable(
                    config=self.config, data=json.loads(line))
                hook.pytest_runtest_logreport(report=report)
                if report.when == "teardown":
                    ended.add(report.nodeid)
        lacking = {item.nodeid for item in self.items} - ended
        if lacking:
            self.printed.seek(0)
            pytest.exit(f"{len(lacking)} tests of the second process did not end, {min(lacking)} "
                        f"for one:\n{self.printed.read()}", returncode=3)
        return result
