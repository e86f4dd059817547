"""A family of small cases as one test, which runs them all and names every one that fails."""

import inspect

import pytest

__all__ = ["each"]


def each(names, cases, ids=None):
    """As `pytest.mark.parametrize`, in one test, in which every case has a `tmp_path` of its own."""
    names = [name.strip() for name in names.split(",")] if isinstance(names, str) else names
    cases = [*cases]

    def family(test):
        def all_of_them(**fixtures):
            failed = {}
            for number, case in enumerate(cases):
                values = dict(zip(names, case if len(names) > 1 else [case], strict=True))
                if "tmp_path" in fixtures:
                    values["tmp_path"] = fixtures["tmp_path"] / str(number)
                    values["tmp_path"].mkdir()
                try:
                    test(**fixtures | values)
                except (Exception, pytest.fail.Exception) as error:
                    failed[named(number)] = error
            if failed:
                lines = "".join(f"\n{name}: {error!r}" for name, error in failed.items())
                raise BaseExceptionGroup(f"{len(failed)} of {len(cases)} cases{lines}", list(failed.values()))

        def named(number):
            return str(ids(cases[number]) if callable(ids) else ids[number] if ids else cases[number])

        parameters = inspect.signature(test).parameters.values()
        all_of_them.__signature__ = inspect.Signature([x for x in parameters if x.name not in names])
        all_of_them.__name__, all_of_them.__doc__ = test.__name__, test.__doc__
        all_of_them.__module__, all_of_them.__qualname__ = test.__module__, test.__qualname__
        all_of_them.pytestmark = getattr(test, "pytestmark", [])
        return all_of_them

    return family
