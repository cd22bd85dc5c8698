"""Clocks: nothing is read while the device is busy, and every cell of a measurement is there."""

import queue
import threading
import time

import pytest
import torch
from kit import GREEDY, Table, random_law, tiny

from specdec import AdaptiveK, ModelDraft, PromptLookup, TorchModel, devices, latency, speculative


class Asynchronous:
    """A device that takes work and returns at once, as a GPU does; a thread gets it done. A mark is work too."""

    def __init__(self):
        self.work = queue.Queue()
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self):
        while True:
            self.work.get()()
            self.work.task_done()

    def launch(self, seconds):
        self.work.put(lambda: time.sleep(seconds))

    def synchronise(self, _):
        self.work.join()

    def mark(self, _):
        reached = []
        self.work.put(lambda: reached.append(time.perf_counter()))
        return reached

    def seconds_between(self, begin, end):
        self.work.join()  # as reading what a GPU has computed waits for it
        return end[0] - begin[0]


@pytest.fixture
def device(monkeypatch):
    device = Asynchronous()
    for name in ("synchronise", "mark", "seconds_between"):
        monkeypatch.setattr(devices, name, getattr(device, name))
    return device


def test_a35_the_clock_waits_before_and_after(device):
    device.launch(0.5)  # left over from before: not part of what is timed
    _, seconds = latency.timed(lambda: device.launch(0.1))
    assert 0.1 <= seconds < 0.4


def test_a35_timed_gives_the_result_and_the_device_is_idle(device):
    result, _ = latency.timed(lambda: device.launch(0.05) or "result", "some device")
    assert result == "result" and device.work.unfinished_tasks == 0


class Slow(Table):
    """A table whose passes are put on the device and not waited for."""

    def __init__(self, device, seconds):
        super().__init__(random_law(0, 8))
        self.launch = lambda: device.launch(seconds)

    def logits(self, ids):
        self.launch()
        return super().logits(ids)


def test_a35_rounds_time_each_pass_to_its_end(device):
    out = speculative(
        Slow(device, 0.05), ModelDraft(Slow(device, 0.01)), [1, 2], k=2, max_new_tokens=9, sampling=GREEDY
    )
    assert out.prefill_seconds >= 0.06
    for r in out.rounds:
        assert r.verify_seconds >= 0.05
        assert r.draft_seconds >= 0.01 * r.drafted
        assert r.forward_seconds >= 0.05 + 0.01 * r.drafted
        assert r.forward_seconds <= r.seconds and r.draft_seconds + r.verify_seconds <= r.seconds
    # Draft and target are told apart: with the roles exchanged the draft is the dear one.
    out = speculative(
        Slow(device, 0.01), ModelDraft(Slow(device, 0.05)), [1, 2], k=2, max_new_tokens=6, sampling=GREEDY
    )
    assert all(r.verify_seconds < 0.05 <= r.draft_seconds for r in out.rounds if r.asked)


@pytest.mark.parametrize("device", [None, "cpu", torch.device("cpu")])
def test_a_cpu_has_nothing_to_wait_for(device):
    assert devices.synchronise(device) is None and not devices.is_gpu(device)
    begin = devices.mark(device)
    time.sleep(0.01)
    assert 0.01 <= devices.seconds_between(begin, devices.mark(device)) < 1


def test_a35_forward_times_visits_every_cell_in_turn():
    models = {"target": TorchModel(tiny(0)), "draft": TorchModel(tiny(1))}
    context = list(range(3, 13))
    cells = list(latency.forward_times(models, (1, 2, 5, 15), context, repeats=3))
    assert [(c["repeat"], c["model"], c["n"]) for c in cells] == [
        (repeat, name, n) for repeat in range(3) for name in models for n in (1, 2, 5, 15)
    ]
    assert all(c["seconds"] > 0 and c["context"] == 10 for c in cells)
    assert all(model.length == 0 for model in models.values())


def test_a35_a_warm_up_of_every_shape_behind_the_context():
    class Watched(TorchModel):
        def logits(self, ids):
            shapes.append((self.length, len(ids)))
            return super().logits(ids)

    shapes = []
    model = Watched(tiny(0))
    model.prefill([1, 2, 3])  # what another left there
    list(latency.forward_times({"m": model}, (1, 4), [5, 6, 7, 8], repeats=2))
    assert shapes == [(4, 1), (4, 4)] * 3


def test_bandwidth_is_a_rate():
    rates = latency.read_bandwidth("cpu", 0.01, 3)
    assert len(rates) == 3 and all(1e7 < rate < 1e14 for rate in rates)


def test_measured_costs_are_medians_of_ratios_within_a_repeat(monkeypatch):
    def times(models, lengths, context, repeats):
        for repeat in range(repeats):
            slow = 1 + 9 * (repeat == 1)  # a busy spell, shared by all that is timed in it
            for model in models:
                for n in lengths:
                    own = 0.2 if model == "draft" else 1.0
                    yield {"model": model, "n": n, "repeat": repeat, "seconds": slow * own * (1 + 0.1 * (n - 1))}

    monkeypatch.setattr(latency, "forward_times", times)
    target, draft = TorchModel(tiny(0)), ModelDraft(TorchModel(tiny(1)))
    costs = latency.measure_costs(target, draft, [5, 6, 7], 6)
    assert costs.c == pytest.approx(0.2) and costs.overhead == 0
    assert costs.v == pytest.approx({1: 1.0, 2: 1.1, 3: 1.2, 4: 1.3, 5: 1.4, 7: 1.6})
    assert latency.measure_costs(target, PromptLookup(), [5, 6, 7], 6).c == 0


@pytest.mark.parametrize("k_max", [1, 2, 4, 8])
def test_measured_costs_are_what_adaptive_k_asks_for(k_max):
    target, draft = TorchModel(tiny(0)), ModelDraft(TorchModel(tiny(1)))
    adaptive = AdaptiveK(latency.measure_costs(target, draft, [5, 6, 7], k_max, repeats=2), k_max)
    assert target.length == 0
    assert len(speculative(target, draft, [5, 6, 7], adaptive, 9, GREEDY).tokens) == 9
