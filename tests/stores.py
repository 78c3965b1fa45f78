"""A server that speaks S3, on this machine: moto's, in a process of its own."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from tests.processes import free_port

BUCKET = "steel"


@contextmanager
def s3_server() -> Iterator[dict[str, str]]:
    """The environment with which clients reach it; there is an empty bucket."""
    if importlib.util.find_spec("moto") is None or importlib.util.find_spec("flask") is None:
        pytest.skip("needs moto: pip install 'moto[server]'")
    port = free_port()
    command = [sys.executable, "-m", "moto.server", "-p", str(port)]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    variables = {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
    }
    try:
        make_bucket(variables, server)
        yield variables
    finally:
        server.kill()
        server.wait()


def make_bucket(variables: dict[str, str], server: subprocess.Popen[bytes]) -> None:
    from pyarrow.fs import S3FileSystem

    client = S3FileSystem(
        access_key="test",
        secret_key="test",
        region="us-east-1",
        scheme="http",
        endpoint_override=variables["AWS_ENDPOINT_URL"].removeprefix("http://"),
        allow_bucket_creation=True,
    )
    deadline = time.monotonic() + 300
    while True:
        assert server.poll() is None and time.monotonic() < deadline, "the server does not come up"
        try:
            client.create_dir(BUCKET)
            return
        except OSError:
            time.sleep(0.2)


@pytest.fixture(scope="module")
def s3() -> Iterator[str]:
    """s3://BUCKET of a server that this process and its children are told of."""
    with s3_server() as variables:
        before = {name: os.environ.get(name) for name in variables}
        os.environ.update(variables)
        yield f"s3://{BUCKET}"
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})
