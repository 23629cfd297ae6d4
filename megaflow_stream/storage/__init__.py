"""Objects: small immutable blobs and a few pointers moved by compare-and-set."""

from megaflow_stream.storage.api import ObjectInfo, ObjectStore, Precondition
from megaflow_stream.storage.connect import connect

__all__ = ["ObjectInfo", "ObjectStore", "Precondition", "connect"]
