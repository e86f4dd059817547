from .sandbox import get_provider

__all__ = ["get_provider"]
