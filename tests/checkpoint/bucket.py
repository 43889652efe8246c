"""Google Cloud Storage in this process: one dictionary of objects behind the file system and the HTTP server."""

import contextlib
import http.server
import itertools
import json
import threading
import urllib.parse

from fsspec.implementations.memory import MemoryFileSystem


class BucketFileSystem(MemoryFileSystem):
    """What fsspec sees, and with it `epath`."""

    protocol = ("gs", "gcs")
    store = {}  # noqa: RUF012
    pseudo_dirs = [""]  # noqa: RUF012

    @classmethod
    def _strip_protocol(cls, path):
        path = "/" + str(path).partition("://")[2].strip("/") if "://" in str(path) else str(path).rstrip("/")
        return "" if path == "/" else path


class _Server(http.server.BaseHTTPRequestHandler):
    """What TensorStore sees: the part of the JSON API that reads, lists, writes and deletes objects."""

    protocol_version = "HTTP/1.1"
    generations = itertools.count(1)
    versions = {}  # noqa: RUF012

    def do_GET(self):
        bucket, key, query = self._request()
        if key is None:
            prefix = f"/{bucket}/"
            found = sorted(name for name in BucketFileSystem.store if name.startswith(prefix + query.get("prefix", "")))
            items = [{"name": name.removeprefix(prefix), "generation": self._version(name)} for name in found]
            self._reply(200, json.dumps({"items": items}).encode())
        elif key not in BucketFileSystem.store:
            self._reply(404)
        elif query.get("ifGenerationNotMatch") == self._version(key):
            self._reply(304)
        else:
            self._reply_data(BucketFileSystem.store[key].getvalue(), self._version(key))

    def do_POST(self):
        bucket, _, query = self._request()
        key = f"/{bucket}/{query['name']}"
        data = self.rfile.read(int(self.headers["Content-Length"]))
        if query.get("ifGenerationMatch", self._version(key)) != self._version(key):
            self._reply(412)
            return
        files = BucketFileSystem()
        files.makedirs(key.rpartition("/")[0], exist_ok=True)
        files.pipe_file(key, data)
        self.versions[key] = next(self.generations)
        self._reply(200, json.dumps({"name": query["name"], "generation": self._version(key)}).encode())

    def do_DELETE(self):
        _, key, _ = self._request()
        self._reply(204 if BucketFileSystem.store.pop(key, None) else 404)

    def log_message(self, *_):
        """Stay silent."""

    def _request(self):
        url = urllib.parse.urlsplit(self.path)
        _, _, place = url.path.partition("/b/")
        bucket, _, key = place.partition("/o")
        query = dict(urllib.parse.parse_qsl(url.query, keep_blank_values=True))
        return bucket, f"/{bucket}{urllib.parse.unquote(key)}" if key else None, query

    def _version(self, key):
        return str(self.versions.get(key, 1)) if key in BucketFileSystem.store else "0"

    def _reply_data(self, data, version):
        headers = {"x-goog-generation": version}
        if "Range" not in self.headers:
            self._reply(200, data, headers)
            return
        start, _, end = self.headers["Range"].removeprefix("bytes=").partition("-")
        first = int(start) if start else max(0, len(data) - int(end))
        last = min(int(end), len(data) - 1) if start and end else len(data) - 1
        headers["Content-Range"] = f"bytes {first}-{last}/{len(data)}"
        self._reply(206, data[first : last + 1], headers)

    def _reply(self, status, data=b"", headers=()):
        self.send_response(status)
        for name, value in {**dict(headers), "Content-Length": str(len(data))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data)


@contextlib.contextmanager
def serve():
    """Run the server; yield its address."""
    with http.server.ThreadingHTTPServer(("localhost", 0), _Server) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://localhost:{server.server_port}"
        server.shutdown()
