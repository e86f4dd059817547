"""Where the code of a completion runs: a sandbox of a provider, which has a package of its own."""

import importlib.util


class E2BProvider:
    """Runs scripts in E2B's sandboxes."""

    def __init__(self, num_parallel):
        if importlib.util.find_spec("e2b_code_interpreter") is None:
            raise ImportError("code rewards run in E2B's sandbox: pip install e2b-code-interpreter")
        self.num_parallel = num_parallel

    def execute_scripts(self, scripts, languages):
        from e2b_code_interpreter import Sandbox

        scores = []
        for script, language in zip(scripts, languages):
            with Sandbox.create(timeout=30) as sandbox:
                scores.append(float(sandbox.run_code(script, language=language).text))
        return scores


def get_provider(provider_type="e2b", num_parallel=2, **kwargs):
    if provider_type != "e2b":
        raise ValueError(f"unknown provider {provider_type}")
    return E2BProvider(num_parallel)
