"""Files of checkpoints and commits."""


def flip_a_bit(path, position: int) -> None:
    content = bytearray(path.read_bytes())
    content[position] ^= 0x10
    path.write_bytes(content)


def contents(commit) -> dict[str, bytes]:
    return {path: blob.content for path, blob in commit.files.items()}
