"""One guest of another kernel is booted where it was made ready (`make test-vm`); what it takes is read from its rungs."""

import pytest

from tests.vm.guest import GUESTS, climb, lacking, results, version_key

QUICK = next(guest for guest in GUESTS if guest.quick)


def test_the_newest_kernel_of_a_series_comes_first() -> None:
    names = ["linux-image-6.1.0-9-cloud-amd64", "linux-image-6.1.0-56-cloud-amd64", "linux-image-6.1.0-10-cloud-amd64"]
    assert sorted(names, key=version_key)[-1] == "linux-image-6.1.0-56-cloud-amd64"


def test_what_rungs_say_is_found_between_what_else_a_console_prints() -> None:
    printed = 'Booting\nRUNG {"rung": "programs", "ok": true, "seen": "142 of 142"}\r\n[ 9.1] oops\nRUNG lost\n'
    assert results(printed) == [{"rung": "programs", "ok": True, "seen": "142 of 142"}]


@pytest.mark.skipif(bool(lacking(QUICK)), reason=lacking(QUICK))
def test_a_guest_of_an_older_kernel_takes_every_program_and_counts_every_call() -> None:
    rows = climb(QUICK, ("programs", "steps"), echo=False)
    assert [row["rung"] for row in rows if not row["ok"]] == []
