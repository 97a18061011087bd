"""An OCI registry on a free port of this host, for as long as a `with` block (docker-registry)."""

import contextlib
import shutil
import socket
import subprocess
import time

CONFIGURATION = """\
version: 0.1
log: {{level: error, accesslog: {{disabled: true}}}}
storage: {{filesystem: {{rootdirectory: "{directory}/data"}}}}
http: {{addr: "127.0.0.1:{port}"}}
"""


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


@contextlib.contextmanager
def serve(directory):
    """Yields HOST:PORT."""
    program = shutil.which("docker-registry")
    assert program, "docker-registry is missing: apt-get install docker-registry"
    port = free_port()
    (directory / "registry.yml").write_text(CONFIGURATION.format(directory=directory, port=port))
    with (directory / "registry.log").open("w") as log:
        server = subprocess.Popen(
            [program, "serve", str(directory / "registry.yml")], stdout=log, stderr=log
        )
        try:
            wait_for(server, port)
            yield f"127.0.0.1:{port}"
        finally:
            server.terminate()
            server.wait()


def wait_for(server, port):
    while True:
        assert server.poll() is None, "the registry ended: registry.log says why"
        try:
            socket.create_connection(("127.0.0.1", port)).close()
            return
        except ConnectionRefusedError:
            time.sleep(0.02)
