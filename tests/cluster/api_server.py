"""An API server for kubectl to talk to: enough of Kubernetes' protocol, in memory, with faults on demand.

Objects are kept as they were sent. A pod runs as soon as it is created; `exec` runs the command here, with the paths of
its mounts replaced by folders. kubectl up to 1.30 speaks SPDY for that, later ones websockets: both are spoken here.
"""

from __future__ import annotations

import base64
import hashlib
import json
import struct
import subprocess
import threading
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

RESOURCES = {
    "v1": [
        ("pods", "Pod"),
        ("configmaps", "ConfigMap"),
        ("secrets", "Secret"),
        ("persistentvolumeclaims", "PersistentVolumeClaim"),
    ],
    "networking.k8s.io/v1": [("networkpolicies", "NetworkPolicy")],
    "kubeflow.org/v1": [("pytorchjobs", "PyTorchJob")],
    "kubeflow.org/v2beta1": [("mpijobs", "MPIJob")],
    "trainer.kubeflow.org/v1alpha1": [("trainjobs", "TrainJob"), ("trainingruntimes", "TrainingRuntime")],
    "apiextensions.k8s.io/v1": [("customresourcedefinitions", "CustomResourceDefinition")],
}
_VERBS = ["create", "delete", "get", "list", "watch"]
Key = tuple[str, str, str]  # resource, namespace, name


@dataclass
class Cluster:
    """What the server holds, and how it misbehaves."""

    resources: dict[str, list[tuple[str, str]]] = field(default_factory=lambda: dict(RESOURCES))
    objects: dict[Key, dict[str, Any]] = field(default_factory=dict)
    logs: dict[str, str] = field(default_factory=dict)
    mounts: dict[str, Path] = field(default_factory=dict)
    # What to run instead, by a command's first word.
    replies: dict[str, list[str]] = field(default_factory=dict)
    # (method, path) → (status, reason, message), or "drop" to cut the connection.
    fault: Callable[[str, str], tuple[int, str, str] | str | None] = lambda method, path: None
    # How many bytes of a command's output arrive before the connection drops; None: all.
    cut: int | None = None
    requests: list[tuple[str, str]] = field(default_factory=list)
    changed: threading.Condition = field(default_factory=threading.Condition)

    def put(self, resource: str, value: dict[str, Any], namespace: str = "default") -> None:
        value["metadata"].setdefault("namespace", namespace)
        value["metadata"].setdefault("resourceVersion", "1")
        with self.changed:
            self.objects[resource, namespace, value["metadata"]["name"]] = value
            self.changed.notify_all()

    def kinds(self, resource: str) -> list[dict[str, Any]]:
        return [value for (kind, _, _), value in self.objects.items() if kind == resource]


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    cluster: Cluster

    def log_message(self, *words: Any) -> None:
        pass

    def do_GET(self) -> None:
        self._answer("GET")

    def do_POST(self) -> None:
        self._answer("POST")

    def do_DELETE(self) -> None:
        self._answer("DELETE")

    def _answer(self, method: str) -> None:
        url = urlsplit(self.path)
        path, query = unquote(url.path), parse_qs(url.query)
        length = int(self.headers.get("Content-Length") or 0)
        body = self.rfile.read(length) if length else b""
        self.cluster.requests.append((method, path))
        fault = self.cluster.fault(method, path)
        if fault == "drop":
            self.close_connection = True
            self.connection.shutdown(2)
        elif isinstance(fault, tuple):
            self._failure(*fault)
        else:
            self._route(method, path, query, body)

    def _route(self, method: str, path: str, query: dict[str, list[str]], body: bytes) -> None:
        words = path.strip("/").split("/")
        if words == ["version"]:
            self._json({"major": "1", "minor": "32", "gitVersion": "v1.32.0"})
        elif words == ["api"]:
            self._json({"kind": "APIVersions", "versions": ["v1"]})
        elif words == ["apis"]:
            self._json({"kind": "APIGroupList", "apiVersion": "v1", "groups": list(self._groups())})
        elif words == ["openapi", "v2"]:
            self._text(b"", "application/com.github.proto-openapi.spec.v2.v1.0+protobuf")  # a document of no schemas
        elif words[0] == "openapi":
            self._failure(404, "NotFound", "no schemas here")
        else:
            version, rest = ("v1", words[2:]) if words[0] == "api" else ("/".join(words[1:3]), words[3:])
            if not rest:
                self._resources(version)
            else:
                self._objects(method, version, rest, query, body)

    def _groups(self) -> Iterator[dict[str, Any]]:
        found: dict[str, list[str]] = {}
        for version in self.cluster.resources:
            if "/" in version:
                found.setdefault(version.partition("/")[0], []).append(version)
        for group, versions in found.items():
            rows = [{"groupVersion": version, "version": version.partition("/")[2]} for version in versions]
            yield {"name": group, "versions": rows, "preferredVersion": rows[0]}

    def _resources(self, version: str) -> None:
        if version not in self.cluster.resources:
            self._failure(404, "NotFound", "the server could not find the requested resource")
            return
        rows: list[dict[str, Any]] = [
            {"name": name, "singularName": kind.lower(), "namespaced": not name.startswith("custom"), "kind": kind,
             "verbs": _VERBS}
            for name, kind in self.cluster.resources[version]
        ]  # fmt: skip
        self._json({"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": version, "resources": rows})

    def _objects(self, method: str, version: str, rest: list[str], query: dict[str, list[str]], body: bytes) -> None:
        namespace = ""
        if rest[0] == "namespaces":
            namespace, rest = rest[1], rest[2:]
        resource, name, part = (*rest, "", "")[:3]
        if resource not in [row[0] for row in self.cluster.resources.get(version, ())]:
            self._failure(404, "NotFound", "the server could not find the requested resource")
        elif part == "log":
            self._log(name)
        elif part == "exec":
            self._exec(query["command"])
        elif method == "POST":
            self._create(resource, namespace, json.loads(body), query)
        elif name:
            self._one(method, resource, namespace, name)
        else:
            self._many(method, version, resource, namespace, query)

    def _create(self, resource: str, namespace: str, value: dict[str, Any], query: dict[str, list[str]]) -> None:
        name = value["metadata"]["name"]
        if (resource, namespace, name) in self.cluster.objects:
            self._failure(409, "AlreadyExists", f'{resource} "{name}" already exists')
            return
        if resource == "pods":
            ready = [{"type": "Ready", "status": "True"}]
            value["status"] = {"phase": "Running", "conditions": ready}
        if "dryRun" not in query:
            self.cluster.put(resource, value, namespace)
        self._json(value, 201)

    def _one(self, method: str, resource: str, namespace: str, name: str) -> None:
        found = self.cluster.objects.get((resource, namespace, name))
        if found is None:
            self._failure(404, "NotFound", f'{resource} "{name}" not found')
        elif method == "DELETE":
            with self.cluster.changed:
                del self.cluster.objects[resource, namespace, name]
                self.cluster.changed.notify_all()
            self._json({"kind": "Status", "apiVersion": "v1", "status": "Success", "details": {"name": name}})
        else:
            self._json(found)

    def _many(self, method: str, version: str, resource: str, namespace: str, query: dict[str, list[str]]) -> None:
        found = [value for key, value in self.cluster.objects.items() if key[:2] == (resource, namespace)]
        for text in query.get("labelSelector", ()):
            wanted = dict(pair.split("=", 1) for pair in text.split(","))
            found = [value for value in found if wanted.items() <= value["metadata"].get("labels", {}).items()]
        for text in query.get("fieldSelector", ()):
            found = [value for value in found if value["metadata"]["name"] == text.removeprefix("metadata.name=")]
        if "watch" in query:
            self._watch(found)
            return
        kind = next(kind for name, kind in self.cluster.resources[version] if name == resource)
        self._json({"kind": f"{kind}List", "apiVersion": version, "metadata": {"resourceVersion": "1"}, "items": found})

    def _watch(self, found: list[dict[str, Any]]) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for value in found:
            line = json.dumps({"type": "ADDED", "object": value}).encode() + b"\n"
            self.wfile.write(f"{len(line):x}\r\n".encode() + line + b"\r\n")
        self.wfile.write(b"0\r\n\r\n")

    def _log(self, name: str) -> None:
        self._text(self.cluster.logs.get(name, "").encode(), "text/plain")

    def _json(self, value: dict[str, Any], code: int = 200) -> None:
        self._text(json.dumps(value).encode(), "application/json", code)

    def _text(self, text: bytes, kind: str, code: int = 200) -> None:
        self.send_response(code)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def _failure(self, code: int, reason: str, message: str) -> None:
        value = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": reason, "code": code}
        self._json({**value, "message": message}, code)

    # --- exec --------------------------------------------------------------------------------------------------

    def _exec(self, command: list[str]) -> None:
        words = self.cluster.replies.get(command[0], list(command))
        for mount, folder in self.cluster.mounts.items():
            words = [word.replace(mount, str(folder), 1) if word.startswith(mount) else word for word in words]
        answer = subprocess.run(words, capture_output=True, check=False)
        if answer.returncode:
            causes = {"causes": [{"reason": "ExitCode", "message": str(answer.returncode)}]}
            status = {"status": "Failure", "reason": "NonZeroExitCode", "details": causes, "message": "command failed"}
        else:
            status = {"status": "Success"}
        upgrade = self.headers.get("Upgrade", "").lower()
        speak = self._spdy if upgrade.startswith("spdy") else self._websocket
        with suppress(ConnectionError):  # a client that has heard enough hangs up first
            speak(answer.stdout[: self.cluster.cut], answer.stderr, json.dumps({"metadata": {}, **status}).encode())
        self.close_connection = True

    def _switch(self, **headers: str) -> None:
        self.send_response(101)
        self.send_header("Connection", "Upgrade")
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.flush()

    def _websocket(self, out: bytes, err: bytes, status: bytes) -> None:
        key = self.headers["Sec-WebSocket-Key"] + "258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
        accept = base64.b64encode(hashlib.sha1(key.encode()).digest()).decode()
        protocol = self.headers["Sec-WebSocket-Protocol"].split(",")[0].strip()
        self._switch(Upgrade="websocket", Sec_WebSocket_Accept=accept, Sec_WebSocket_Protocol=protocol)
        for channel, data in ((1, out), (2, err), (3, status)):
            for start in range(0, len(data), 30000):
                self._frame(2, bytes([channel]) + data[start : start + 30000])
            if self._drops():
                return
        self._frame(8, struct.pack(">H", 1000))

    def _drops(self) -> bool:
        """Whether the connection ends after the output, with no word about how the command ended."""
        if self.cluster.cut is None:
            return False
        self.wfile.flush()
        self.connection.shutdown(2)
        return True

    def _frame(self, opcode: int, data: bytes) -> None:
        size = bytes([len(data)]) if len(data) < 126 else bytes([126]) + struct.pack(">H", len(data))
        self.wfile.write(bytes([0x80 | opcode]) + size + data)

    def _spdy(self, out: bytes, err: bytes, status: bytes) -> None:
        self._switch(Upgrade="SPDY/3.1", X_Stream_Protocol_Version="v4.channel.k8s.io")
        packer, streams = zlib.compressobj(), []
        while len(streams) < 3:  # kubectl opens, in this order: errors, standard output, standard error
            head = self.rfile.read(8)
            kind, size = struct.unpack(">H", head[2:4])[0], int.from_bytes(head[5:8], "big")
            body = self.rfile.read(size)
            if head[0] & 0x80 and kind == 1:  # SYN_STREAM
                streams.append(struct.unpack(">I", body[:4])[0])
                headers = packer.compress(struct.pack(">I", 0)) + packer.flush(zlib.Z_SYNC_FLUSH)
                reply = struct.pack(">I", streams[-1]) + headers
                self.wfile.write(b"\x80\x03\x00\x02\x00" + len(reply).to_bytes(3, "big") + reply)
        for stream, data in ((streams[1], out), (streams[2], err), (streams[0], status)):
            for start in range(0, len(data), 30000):
                piece = data[start : start + 30000]
                self.wfile.write(struct.pack(">IB", stream, 0) + len(piece).to_bytes(3, "big") + piece)
            if self._drops():
                return
            self.wfile.write(struct.pack(">IB", stream, 1) + b"\0\0\0")  # FIN
        self.wfile.flush()
        self.rfile.read(1)  # until kubectl has gone


@contextmanager
def served(folder: Path) -> Iterator[tuple[Cluster, Path]]:
    """A cluster, and the kubeconfig that leads to it."""
    cluster = Cluster()
    handler = type("BoundHandler", (Handler,), {"cluster": cluster})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "test", "cluster": {"server": f"http://127.0.0.1:{server.server_port}"}}],
        "users": [{"name": "test", "user": {}}],
        "contexts": [{"name": "test", "context": {"cluster": "test", "user": "test", "namespace": "default"}}],
        "current-context": "test",
    }
    path = folder / "kubeconfig"
    path.write_text(json.dumps(config))
    try:
        yield cluster, path
    finally:
        server.shutdown()
        server.server_close()
