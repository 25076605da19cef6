"""Schedules of GPU kernels: chosen, told, timed, and smaller where there is no room."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from kvcompile.codegen.gpu.schedule import (
    MOST_SPLITS,
    Schedule,
    candidate_schedules,
    choose_schedule,
    choose_splits,
)
from kvcompile.codegen.spec import KernelSpec
from kvcompile.runtime.scheduling import (
    Override,
    ScheduledKernel,
    ScheduleError,
    read_override,
    schedule_of,
    tuned_schedule,
)
from tests.support.gpu_pages import GpuCase

INT4 = GpuCase(k="int4", dims=(128, 128), page_size=64).spec
BF16 = GpuCase(dims=(128, 128), page_size=64).spec


def test_the_environment_overrides_what_it_names(monkeypatch: pytest.MonkeyPatch) -> None:
    assert read_override() == Override()
    monkeypatch.setenv("KVCOMPILE_SCHEDULE", "warps=8, splits=5")
    override = read_override()
    assert override == Override(warps=8, splits=5)
    assert schedule_of(INT4, override) == Schedule(8, choose_schedule(INT4).num_stages)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("wraps=2", "did you mean 'warps'"),
        ("stages=0", "stages must be a number from 1, not '0'"),
        ("splits", "splits must be a number from 1, not ''"),
        ("warps=6", "power of two, not 6; nearest: 4"),
    ],
)
def test_what_cannot_be_understood(text: str, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVCOMPILE_SCHEDULE", text)
    with pytest.raises(ScheduleError, match=words):
        read_override()


@pytest.mark.parametrize("spec", [INT4, BF16], ids=str)
def test_splits_fill_the_device_and_no_more(spec: KernelSpec) -> None:
    extra = int(spec.is_grouped)

    def splits(programs: int, kv_len: int) -> int:
        return choose_splits(spec, processors=132, programs=programs, kv_len=kv_len) - extra

    assert splits(8, 131072) == MOST_SPLITS - 1
    assert splits(64, 131072) == 9  # 132 * 4 / 64, up
    assert splits(1024, 131072) == 1
    assert splits(8, 65) == 2
    assert splits(8, 0) == 1


def test_the_fastest_is_kept_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVCOMPILE_CACHE_DIR", str(tmp_path))
    candidates = candidate_schedules(INT4)
    assert candidates[0] == choose_schedule(INT4)
    assert len(set(candidates)) == len(candidates) > 3
    timed: list[Schedule] = []

    def measure(schedule: Schedule) -> float:
        timed.append(schedule)
        return math.inf if schedule != candidates[2] else 1.0

    for _ in range(2):
        assert tuned_schedule(INT4, "some GPU", measure) == candidates[2]
    assert timed == candidates
    tuned_schedule(INT4, "another GPU", measure)
    assert len(timed) == 2 * len(candidates)
    (file,) = (f for f in tmp_path.rglob("schedule.json") if "some GPU" in f.read_text())
    file.write_text("{")
    assert tuned_schedule(INT4, "some GPU", measure) == candidates[2]
    assert len(timed) == 3 * len(candidates)


class NoRoomError(Exception):
    pass


class FakeKernel:
    """Has room for a number of stages."""

    def __init__(self, room: int) -> None:
        self.room = room
        self.launches: list[tuple[tuple[int, ...], int]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> FakeKernel:
        self.grid = grid
        return self

    def __call__(self, *arguments: object, num_warps: int, num_stages: int) -> None:
        if num_stages > self.room:
            raise NoRoomError
        self.launches.append((self.grid, num_stages))


def test_where_there_is_no_room_a_smaller_schedule_is_taken() -> None:
    fake = FakeKernel(room=2)
    kernel = ScheduledKernel(fake, Schedule(4, 4), NoRoomError)
    kernel.launch((3, 2, 1), "argument")
    kernel.launch((1,))
    assert fake.launches == [((3, 2, 1), 2), ((1,), 2)]
    assert kernel.schedule == Schedule(4, 2)
    with pytest.raises(NoRoomError):
        ScheduledKernel(FakeKernel(room=0), Schedule(4, 3), NoRoomError).launch((1,))
