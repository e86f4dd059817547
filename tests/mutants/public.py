"""Mutants of what completion shows, and of the table of the examples."""

COMPLETION = "tests/test_public.py::test_completion_shows_what_is_listed_and_nothing_else"

MUTANTS = [
    (
        "rooms complete to all that they import",
        "rft_fn/__init__.py",
        "partial(sorted, _room.__all__)",
        "partial(sorted, vars(_room))",
        COMPLETION,
    ),
    (
        "the root completes to rooms that it does not list",
        "rft_fn/__init__.py",
        "__dir__ = partial(sorted, __all__)",
        "",
        COMPLETION,
    ),
    (
        "a metric that nobody uses is public again",
        "rft_fn/metric/__init__.py",
        "__all__ = [",
        '__all__ = ["Mean", ',
        "tests/test_public.py::test_every_public_name_is_for_somebody[metric]",
    ),
    (
        "the end of a run is taken for its start",
        "tests/bench/examples.py",
        "values[-LAST:]",
        "values[:LAST]",
        "tests/test_examples.py::test_ends_are_means_of_the_first_and_of_the_last_steps",
    ),
    (
        "the meta-gradient stops at the limit",
        "rft_fn/loss/policy.py",
        "ratio(logp.detach(), old_logp), 1 - low, 1 + high)\n    return -weight * adv",
        "ratio(logp.detach(), old_logp), 1 - low, 1 + high).detach()\n    return -weight * adv",
        "tests/test_examples.py::test_the_limit_of_cispo_has_a_meta_gradient_and_that_of_ppo_has_none",
    ),
]
