from types import SimpleNamespace

Response = ResponseMessage = SimpleNamespace
