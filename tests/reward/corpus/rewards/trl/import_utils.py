import importlib.util


def is_math_verify_available():
    return importlib.util.find_spec("math_verify") is not None
