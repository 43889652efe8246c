"""What compressors make of text, to compare a model's bits per byte with."""

import concurrent.futures
import gzip

PRIMED_XZ = "primed xz"
"""The name of xz's figure where it has read the training text first, as a model has."""


def compressed_bits_per_byte(content: bytes, training_text: bytes | None = None) -> dict[str, float]:
    """Return the bits per byte that `gzip -9` and `xz -9` reach on some bytes, headers included.

    Args:
        content: The bytes.
        training_text: What a model is trained on before it reads the content. With it, the result also has
            `PRIMED_XZ`: by how much the content makes the compressed training text longer. Both have to fit into the
            64 MiB that xz looks back; gzip looks back 32 KiB, so that priming it makes no difference.

    Returns:
        The bits per byte by name.
    """
    import lzma  # some builds of Python lack it, which matters only here

    compressed = {"gzip": gzip.compress(content, 9, mtime=0), "xz": lzma.compress(content, preset=9)}
    sizes = {name: len(result) for name, result in compressed.items()}
    if training_text is not None:
        with concurrent.futures.ThreadPoolExecutor(2) as pool:  # Compression does not hold the GIL.
            texts = (training_text, training_text + content)
            before, after = pool.map(lambda text: len(lzma.compress(text, preset=9)), texts)
        sizes[PRIMED_XZ] = after - before
    return {name: 8 * size / len(content) for name, size in sizes.items()}
