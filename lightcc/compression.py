"""What a compressor is, for every framework. Names as in Horovod's modules compression."""
from typing import Any, Tuple


class Compressor:
    """The interface of a compressor: two static methods. The ranks must make tensors of equal shape and dtype."""

    @staticmethod
    def compress(tensor: Any) -> Tuple[Any, Any]:
        """Returns the tensor to send, and what decompress needs to undo it.

        >>> NoneCompressor.compress("a tensor")
        ('a tensor', None)
        """
        raise NotImplementedError

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        """Undoes compress.

        >>> NoneCompressor.decompress(*NoneCompressor.compress("a tensor"))
        'a tensor'
        """
        raise NotImplementedError


class NoneCompressor(Compressor):
    """Sends tensors as they are.

    >>> NoneCompressor.compress("a tensor")
    ('a tensor', None)
    """

    @staticmethod
    def compress(tensor):
        return tensor, None

    @staticmethod
    def decompress(tensor, ctx):
        return tensor
