"""A Hub on loopback, in memory, that speaks to an unmodified huggingface_hub client over HTTP.

Two listeners, as on the real Hub: one has the repositories and answers `/api/...`, `/<repo>/resolve/...` and the LFS
batch; the other is the storage, which keeps large files under their sha256 behind signed URLs and must never see a
token. Only model repositories, without Xet (a client needs `HF_HUB_DISABLE_XET=1`), pull requests and pages of lists.

`Hub.inject` makes the next requests fail: connections cut in the middle, answers lost or short, rate limits.
"""

import base64
import hashlib
import json
import re
import secrets
import socket
import struct
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Literal
from urllib.parse import parse_qs, quote, unquote, urlsplit

import yaml


MAIN = "main"
LARGE_SUFFIXES = (".safetensors", ".bin", ".pt", ".h5", ".msgpack", ".onnx")
LARGE_SIZE = 10_000_000  # bytes from which on a file is stored as a large one, whatever its name
DATE = "2024-01-01T00:00:00.000Z"
HANDLERS = ("GET", "HEAD", "POST", "PUT", "DELETE")

FaultKind = Literal["cut request", "cut response", "reset response", "lose response", "short response", "rate limit"]


class HubError(Exception):
    """Error response of the server.

    Args:
        status (`int`): The HTTP status.
        message (`str`): For the person who reads the error.
        code (`str`, *optional*): Value of `X-Error-Code`, by which the client chooses its exception.
        headers (`dict[str, str]`, *optional*): Further headers of the answer.
    """

    def __init__(self, status: int, message: str, code: str | None = None, headers: dict[str, str] | None = None):
        super().__init__(message)
        self.status, self.message, self.code, self.headers = status, message, code, headers or {}


@dataclass(frozen=True)
class Blob:
    """A file of a commit: its content, and whether it is stored as a large file."""

    content: bytes
    is_large: bool = False

    @property
    def sha256(self) -> str:
        """Name in the storage."""
        return hashlib.sha256(self.content).hexdigest()

    @property
    def pointer(self) -> bytes:
        """Pointer that git stores in place of a large file."""
        lines = [
            "version https://git-lfs.github.com/spec/v1",
            f"oid sha256:{self.sha256}",
            f"size {len(self.content)}",
        ]
        return "".join(f"{line}\n" for line in lines).encode()

    @property
    def git_id(self) -> str:
        """The id of git's blob, which of a large file is that of its pointer."""
        stored = self.pointer if self.is_large else self.content
        return hashlib.sha1(b"blob %d\0" % len(stored) + stored).hexdigest()

    @property
    def etag(self) -> str:
        """Name in the client's cache."""
        return self.sha256 if self.is_large else self.git_id


@dataclass(frozen=True)
class Commit:
    """An immutable state of a repository."""

    id: str
    parent: str | None
    title: str
    message: str
    files: dict[str, Blob]


@dataclass
class Repository:
    """Commits, and the names that point at them. The first commit has only `.gitattributes`, as on the real Hub."""

    name: str
    private: bool
    commits: dict[str, Commit] = field(default_factory=dict)
    branches: dict[str, str] = field(default_factory=dict)
    tags: dict[str, str] = field(default_factory=dict)

    def __post_init__(self):
        attributes = "".join(f"*{suffix} filter=lfs diff=lfs merge=lfs -text\n" for suffix in LARGE_SUFFIXES)
        self.branches[MAIN] = self.add(None, "initial commit", "", {".gitattributes": Blob(attributes.encode())}).id

    def add(self, parent: str | None, title: str, message: str, files: dict[str, Blob]) -> Commit:
        """A new commit, which no branch points at yet."""
        tree = json.dumps([self.name, len(self.commits), parent, title, message])
        tree += "".join(f"{path} {blob.git_id}\n" for path, blob in sorted(files.items()))
        commit = Commit(hashlib.sha1(tree.encode()).hexdigest(), parent, title, message, files)
        self.commits[commit.id] = commit
        return commit

    def at(self, revision: str) -> Commit:
        """The commit that a branch, a tag, or at least 7 characters of an id mean.

        Raises:
            HubError: There is none.
        """
        if commit_id := self.branches.get(revision) or self.tags.get(revision):
            return self.commits[commit_id]
        found = [commit for commit_id, commit in self.commits.items() if commit_id.startswith(revision)]
        if len(revision) < 7 or len(found) != 1:
            raise HubError(404, f"Invalid rev id: {revision}", "RevisionNotFound")
        return found[0]

    def history(self, revision: str = MAIN) -> list[Commit]:
        """The commits of a revision, newest first."""
        commits = [self.at(revision)]
        while commits[-1].parent is not None:
            commits.append(self.commits[commits[-1].parent])
        return commits


@dataclass
class Fault:
    """Failure of the next `times` matching requests.

    Args:
        kind (`FaultKind`): `"cut request"`: the connection is reset when half of the request's body is read, and
            nothing is done. `"cut response"`: done, and ended in the middle of the answer's body; `"reset response"`:
            the same with a reset. `"lose response"`: done, and reset before the answer. `"short response"`: half of
            the body, as if it were all. `"rate limit"`: nothing is done, status 429.
        method (`str`): Of the requests that fit.
        path (`str`): A regular expression that the path of a request that fits contains.
        times (`int`): How many requests it still happens to.
        after (`float`): How much of the body is read or sent before the connection is cut.
        retry_after (`int`): Seconds that a limited client is told to wait.
    """

    kind: FaultKind
    method: str
    path: str
    times: int = 1
    after: float = 0.5
    retry_after: int = 0


@dataclass(frozen=True)
class Request:
    """A request as it came; header names in lower case. No `body` where the connection was cut before its end."""

    to: Literal["hub", "storage"]
    method: str
    path: str
    query: dict[str, list[str]]
    headers: dict[str, str]
    body: bytes | None = None

    @property
    def token(self) -> str | None:
        """The bearer token, if any."""
        scheme, _, token = self.headers.get("authorization", "").partition(" ")
        return token if scheme == "Bearer" else None

    def json(self) -> dict:
        """The body, parsed."""
        return json.loads(self.body)


@dataclass
class Answer:
    """Status, headers and body."""

    body: bytes = b""
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, value, status: int = 200, **headers: str) -> "Answer":
        """A value as JSON."""
        return cls(json.dumps(value).encode(), status, {"Content-Type": "application/json", **headers})


def content_range(content: bytes, wanted: str | None, headers: dict[str, str]) -> Answer:
    """A file, or the one range of its bytes that was asked for."""
    headers = {"Accept-Ranges": "bytes", "Content-Type": "application/octet-stream", **headers}
    if wanted is None:
        return Answer(content, headers=headers)
    match = re.fullmatch(r"bytes=(\d*)-(\d*)", wanted)
    if match is None or match[1] + match[2] == "":
        raise HubError(400, f"Cannot read the range {wanted!r}")
    start = int(match[1]) if match[1] else max(0, len(content) - int(match[2]))
    stop = min(int(match[2]) + 1, len(content)) if match[1] and match[2] else len(content)
    if start >= stop:
        raise HubError(416, "Range not satisfiable", headers={"Content-Range": f"bytes */{len(content)}"})
    headers["Content-Range"] = f"bytes {start}-{stop - 1}/{len(content)}"
    return Answer(content[start:stop], 206, headers)


class Hub:
    """The server. A context manager: it listens inside the `with`, on ports of 127.0.0.1 that the system chooses.

    Args:
        users (`dict[str, str]`): The name of each user by token. A user may write to repositories `<name>/...` only.

    Attributes:
        repositories (`dict[str, Repository]`): By `<user>/<name>`.
        objects (`dict[str, bytes]`): The storage: large files by sha256.
        requests (`list[Request]`): Everything that was asked, in order, faults included.
        faults (`list[Fault]`): What was injected.
        failures (`list[Exception]`): Mistakes of this server itself; a test can assert that there are none.
        multipart_size (`int`, *optional*): Large files are uploaded in parts of so many bytes; otherwise in one.
    """

    def __init__(self, users: dict[str, str]):
        self.users = users
        self.repositories: dict[str, Repository] = {}
        self.objects: dict[str, bytes] = {}
        self.requests: list[Request] = []
        self.faults: list[Fault] = []
        self.failures: list[Exception] = []
        self.multipart_size: int | None = None
        self._signatures: dict[str, str] = {}
        self._parts: dict[tuple[str, int], bytes] = {}
        self._lock = threading.RLock()
        self._listeners: list[ThreadingHTTPServer] = []

    def __enter__(self) -> "Hub":
        self._listeners = [_listen(self, "hub", HUB_ROUTES), _listen(self, "storage", STORAGE_ROUTES)]
        self.url, self.storage_url = (f"http://127.0.0.1:{each.server_address[1]}" for each in self._listeners)
        return self

    def __exit__(self, *exception):
        for listener in self._listeners:
            listener.shutdown()
            listener.server_close()

    def inject(self, kind: FaultKind, method: str, path: str, **options) -> Fault:
        """Make the next requests fail, as `Fault` says; its `times` tells later how many are still to come."""
        fault = Fault(kind, method, path, **options)
        with self._lock:
            self.faults.append(fault)
        return fault

    def take_fault(self, method: str, path: str) -> Fault | None:
        """The fault that happens to this request, if any."""
        with self._lock:
            for fault in self.faults:
                if fault.times > 0 and fault.method == method and re.search(fault.path, path):
                    fault.times -= 1
                    return fault
        return None

    def answer(self, request: Request, routes: list["Route"]) -> Answer:
        """Answer to a request, possibly an error."""
        try:
            for route in routes:
                match = re.fullmatch(route.path, request.path)
                if match and request.method in route.methods:
                    with self._lock:
                        return route.handle(self, request, *(unquote(part or "") for part in match.groups()))
            raise HubError(404, f"Nothing answers {request.method} {request.path}")
        except HubError as error:
            headers = {"X-Error-Message": error.message, **error.headers}
            if error.code:
                headers["X-Error-Code"] = error.code
            return Answer.of({"error": error.message}, error.status, **headers)
        except Exception as error:
            self.failures.append(error)
            return Answer.of({"error": repr(error)}, 500)

    # Who may do what

    def user(self, request: Request) -> str | None:
        """Who asks; `None` for nobody."""
        if request.token is None:
            return None
        if request.token not in self.users:
            raise HubError(401, "Invalid credentials in Authorization header")
        return self.users[request.token]

    def readable(self, request: Request, name: str) -> Repository:
        """The repository, if it exists for who asks: to others, a private one looks as if it did not."""
        user = self.user(request)
        repository = self.repositories.get(name)
        if repository is None or (repository.private and user != name.split("/")[0]):
            raise HubError(401 if user is None else 404, "Repository not found", "RepoNotFound")
        return repository

    def writable(self, request: Request, name: str) -> Repository:
        """The repository, if who asks may write to it."""
        repository = self.readable(request, name)
        self.check_owner(request, name)
        return repository

    def check_owner(self, request: Request, name: str) -> None:
        """Refuse everybody but the owner."""
        user = self.user(request)
        if user is None:
            raise HubError(401, "Invalid username or password.")
        if user != name.split("/")[0]:
            raise HubError(403, "You don't have the rights to write to this namespace")

    def signed(self, path: str, purpose: str) -> str:
        """A URL of the storage that allows one purpose, without a token."""
        signature = secrets.token_hex(8)
        self._signatures[signature] = f"{purpose} {path}"
        return f"{self.storage_url}{path}?signature={signature}"

    def check_signature(self, request: Request, purpose: str) -> None:
        """Refuse a URL that was not signed for this."""
        signature = request.query.get("signature", [""])[0]
        if self._signatures.get(signature) != f"{purpose} {request.path}":
            raise HubError(403, "The signature does not allow this")

    # Repositories

    def whoami(self, request: Request) -> Answer:
        """`GET /api/whoami-v2`"""
        user = self.user(request)
        if user is None:
            raise HubError(401, "Invalid username or password.")
        return Answer.of({"type": "user", "name": user, "orgs": [], "auth": {"type": "access_token"}})

    def create_repository(self, request: Request) -> Answer:
        """`POST /api/repos/create`"""
        wanted = request.json()
        user = self.user(request)
        name = f"{wanted.get('organization') or user}/{wanted['name']}"
        self.check_owner(request, name)
        if wanted.get("type", "model") != "model":
            raise HubError(400, f"This server has models only, not {wanted['type']}")
        url = f"{self.url}/{name}"
        if name in self.repositories:
            message = "You already created this model repo"
            return Answer.of({"error": message, "url": url}, 409, **{"X-Error-Message": message})
        self.repositories[name] = Repository(name, private=wanted.get("visibility") == "private")
        return Answer.of({"url": url, "name": name, "id": name})

    def delete_repository(self, request: Request) -> Answer:
        """`DELETE /api/repos/delete`"""
        wanted = request.json()
        name = f"{wanted.get('organization') or self.user(request)}/{wanted['name']}"
        self.writable(request, name)
        del self.repositories[name]
        return Answer.of({})

    def change_settings(self, request: Request, name: str) -> Answer:
        """`PUT /api/models/<repo>/settings`: who sees it."""
        repository = self.writable(request, name)
        repository.private = request.json()["visibility"] == "private"
        return Answer.of({"private": repository.private})

    def information(self, request: Request, name: str, revision: str) -> Answer:
        """`GET /api/models/<repo>`, with or without `/revision/<revision>`"""
        repository = self.readable(request, name)
        commit = repository.at(revision or MAIN)
        with_blobs = request.query.get("blobs", ["false"])[0].lower() == "true"
        siblings = [
            {"rfilename": path, **({"size": len(blob.content), "blobId": blob.git_id} if with_blobs else {})}
            for path, blob in sorted(commit.files.items())
        ]
        card = commit.files.get("README.md", Blob(b"")).content.decode()
        header = re.match(r"---\r?\n(.*?)\r?\n---", card, re.DOTALL)
        card_data = yaml.safe_load(header[1]) if header else {}
        return Answer.of(
            {
                "id": name,
                "modelId": name,
                "author": name.split("/")[0],
                "sha": commit.id,
                "private": repository.private,
                "gated": False,
                "disabled": False,
                "createdAt": DATE,
                "lastModified": DATE,
                "tags": card_data.get("tags") or [],
                "pipeline_tag": card_data.get("pipeline_tag"),
                "library_name": card_data.get("library_name"),
                "cardData": card_data,
                "siblings": siblings,
            }
        )

    def references(self, request: Request, name: str) -> Answer:
        """`GET /api/models/<repo>/refs`"""
        repository = self.readable(request, name)

        def entries(names: dict[str, str], folder: str) -> list[dict]:
            return [{"name": each, "ref": f"refs/{folder}/{each}", "targetCommit": at} for each, at in names.items()]

        branches, tags = entries(repository.branches, "heads"), entries(repository.tags, "tags")
        return Answer.of({"branches": branches, "tags": tags, "converts": [], "pullRequests": []})

    def create_branch(self, request: Request, name: str, branch: str) -> Answer:
        """`POST /api/models/<repo>/branch/<branch>`"""
        repository = self.writable(request, name)
        if branch in repository.branches:
            raise HubError(409, f"Reference already exists: {branch}")
        repository.branches[branch] = repository.at(request.json().get("startingPoint") or MAIN).id
        return Answer.of({}, 201)

    def delete_branch(self, request: Request, name: str, branch: str) -> Answer:
        """`DELETE /api/models/<repo>/branch/<branch>`"""
        repository = self.writable(request, name)
        if branch == MAIN or branch not in repository.branches:
            raise HubError(403 if branch == MAIN else 404, f"Cannot delete the branch {branch}")
        del repository.branches[branch]
        return Answer.of({})

    def create_tag(self, request: Request, name: str, revision: str) -> Answer:
        """`POST /api/models/<repo>/tag/<revision>`"""
        repository = self.writable(request, name)
        tag = request.json()["tag"]
        if tag in repository.tags:
            raise HubError(409, f"Tag reference exists already: {tag}")
        repository.tags[tag] = repository.at(revision).id
        return Answer.of({}, 201)

    def delete_tag(self, request: Request, name: str, tag: str) -> Answer:
        """`DELETE /api/models/<repo>/tag/<tag>`"""
        if self.writable(request, name).tags.pop(tag, None) is None:
            raise HubError(404, f"There is no tag {tag}", "RevisionNotFound")
        return Answer.of({})

    def commits(self, request: Request, name: str, revision: str) -> Answer:
        """`GET /api/models/<repo>/commits/<revision>`"""
        authors = [{"user": name.split("/")[0]}]
        return Answer.of(
            [
                {"id": each.id, "title": each.title, "message": each.message, "date": DATE, "authors": authors}
                for each in self.readable(request, name).history(revision)
            ]
        )

    # Files

    def tree(self, request: Request, name: str, revision: str, folder: str) -> Answer:
        """`GET /api/models/<repo>/tree/<revision>[/<folder>]`, recursively or not"""
        commit = self.readable(request, name).at(revision)
        prefix = f"{folder.strip('/')}/" if folder.strip("/") else ""
        inside = [path for path in sorted(commit.files) if path.startswith(prefix)]
        if prefix and not inside:
            raise HubError(404, f"{folder} does not exist on {revision!r}", "EntryNotFound")
        recursive = request.query.get("recursive", ["false"])[0].lower() == "true"
        entries = {}
        for path in inside:
            steps = path.removeprefix(prefix).split("/")
            for depth in range(1, len(steps)):
                above = prefix + "/".join(steps[:depth])
                if recursive or depth == 1:
                    entries[above] = {"type": "directory", "oid": _folder_id(commit, above), "size": 0, "path": above}
            if recursive or len(steps) == 1:
                entries[path] = _entry(path, commit.files[path])
        return Answer.of(list(entries.values()))

    def paths_information(self, request: Request, name: str, revision: str) -> Answer:
        """`POST /api/models/<repo>/paths-info/<revision>`; paths that do not exist are left out."""
        commit = self.readable(request, name).at(revision)
        entries = []
        for path in parse_qs(request.body.decode()).get("paths", []):
            if path in commit.files:
                entries.append(_entry(path, commit.files[path]))
            elif any(other.startswith(f"{path}/") for other in commit.files):
                entries.append({"type": "directory", "oid": _folder_id(commit, path), "size": 0, "path": path})
        return Answer.of(entries)

    def resolve(self, request: Request, name: str, revision: str, path: str) -> Answer:
        """`GET` or `HEAD /<repo>/resolve/<revision>/<path>`: the file, or of a large one the way to the storage."""
        commit = self.readable(request, name).at(revision)
        headers = {"X-Repo-Commit": commit.id}
        if path not in commit.files:
            raise HubError(404, "Entry not found", "EntryNotFound", headers)
        blob = commit.files[path]
        headers["ETag"] = f'"{blob.etag}"'
        if blob.is_large:
            headers |= {"X-Linked-Etag": f'"{blob.etag}"', "X-Linked-Size": str(len(blob.content))}
            location = self.signed(f"/lfs/{blob.sha256}", "download")
            return Answer(f"Redirecting to {path}".encode(), 302, {**headers, "Location": location})
        return content_range(blob.content, request.headers.get("range"), headers)

    def validate_card(self, request: Request) -> Answer:
        """`POST /api/validate-yaml`: only whether the header of a model card is YAML."""
        header = re.match(r"---\r?\n(.*?)\r?\n---", request.json()["content"], re.DOTALL)
        try:
            yaml.safe_load(header[1] if header else "")
        except yaml.YAMLError as error:
            return Answer.of({"errors": [{"message": str(error)}], "warnings": []}, 400)
        return Answer.of({"errors": [], "warnings": []})

    # Uploads and commits

    def preupload(self, request: Request, name: str, revision: str) -> Answer:
        """`POST /api/models/<repo>/preupload/<revision>`: which files are large, and what is there already."""
        commit = self.writable(request, name).at(revision)
        files = []
        for wanted in request.json()["files"]:
            path = wanted["path"]
            is_binary = b"\0" in base64.b64decode(wanted["sample"])
            is_large = path.endswith(LARGE_SUFFIXES) or is_binary or wanted["size"] >= LARGE_SIZE
            mode = "lfs" if is_large else "regular"
            there = commit.files.get(path)
            entry = {"path": path, "uploadMode": mode, "shouldIgnore": False}
            files.append({**entry, "oid": there.etag if there else None})
        return Answer.of({"files": files, "commitOid": commit.id})

    def large_files_batch(self, request: Request, name: str) -> Answer:
        """`POST /<repo>.git/info/lfs/objects/batch`: where to put the large files that the storage does not have."""
        self.writable(request, name)
        wanted = request.json()
        if wanted["operation"] != "upload":
            raise HubError(400, "Large files are downloaded through /resolve/")
        answers = []
        for item in wanted["objects"]:
            answer = {"oid": item["oid"], "size": item["size"]}
            if item["oid"] not in self.objects:
                answer["actions"] = {"upload": self._upload_action(item["oid"], item["size"])}
            answers.append(answer)
        return Answer.of({"transfer": "multipart" if self.multipart_size else "basic", "objects": answers})

    def _upload_action(self, oid: str, size: int) -> dict:
        if not self.multipart_size:
            return {"href": self.signed(f"/lfs/{oid}", "upload")}
        parts = range(1, -(-size // self.multipart_size) + 1)
        urls = {str(number): self.signed(f"/lfs/{oid}/{number}", "upload") for number in parts}
        return {
            "href": self.signed(f"/lfs/{oid}/complete", "upload"),
            "header": {"chunk_size": str(self.multipart_size), **urls},
        }

    def commit(self, request: Request, name: str, branch: str) -> Answer:
        """`POST /api/models/<repo>/commit/<branch>`: all operations, or nothing."""
        repository = self.writable(request, name)
        if branch not in repository.branches:
            raise HubError(404, f"Invalid rev id: {branch}", "RevisionNotFound")
        if "create_pr" in request.query:
            raise HubError(400, "This server has no pull requests")
        head = repository.at(branch)
        files, header = dict(head.files), None
        for line in request.body.splitlines():
            operation = json.loads(line)
            key, value = operation["key"], operation["value"]
            if key == "header":
                header = value
            elif key == "file":
                files[value["path"]] = Blob(base64.b64decode(value["content"], validate=True))
            elif key == "lfsFile":
                if value["oid"] not in self.objects:
                    raise HubError(400, f"The content of {value['path']} was not uploaded")
                files[value["path"]] = Blob(self.objects[value["oid"]], is_large=True)
            elif key in ("deletedFile", "deletedFolder"):
                gone = [each for each in files if each == value["path"] or each.startswith(value["path"] + "/")]
                if not gone:
                    raise HubError(404, f"A file with this name doesn't exist: {value['path']}", "EntryNotFound")
                for each in gone:
                    del files[each]
            else:
                raise HubError(400, f"Cannot do {key}")
        if header is None:
            raise HubError(400, "The commit has no header")
        parent = header.get("parentCommit")
        if parent is not None and not head.id.startswith(parent):
            raise HubError(412, "A commit has happened since. Please refresh and try again.")
        commit = repository.add(head.id, header["summary"], header.get("description", ""), files)
        repository.branches[branch] = commit.id
        url = f"{self.url}/{name}/commit/{commit.id}"
        return Answer.of({"success": True, "commitOid": commit.id, "commitUrl": url, "hookOutput": ""})

    # Storage

    def store(self, request: Request, oid: str) -> Answer:
        """`PUT /lfs/<sha256>`"""
        self.check_signature(request, "upload")
        self._keep(oid, request.body)
        return Answer(headers={"ETag": f'"{oid}"'})

    def store_part(self, request: Request, oid: str, number: str) -> Answer:
        """`PUT /lfs/<sha256>/<number>`"""
        self.check_signature(request, "upload")
        self._parts[oid, int(number)] = request.body
        return Answer(headers={"ETag": f'"{hashlib.md5(request.body).hexdigest()}"'})

    def complete(self, request: Request, oid: str) -> Answer:
        """`POST /lfs/<sha256>/complete`: put the parts together."""
        self.check_signature(request, "upload")
        content = b""
        for part in request.json()["parts"]:
            body = self._parts.get((oid, part["partNumber"]))
            if body is None or part["etag"] != f'"{hashlib.md5(body).hexdigest()}"':
                raise HubError(400, f"Part {part['partNumber']} is missing or another one")
            content += body
        self._keep(oid, content)
        return Answer.of({"success": True})

    def _keep(self, oid: str, content: bytes) -> None:
        if hashlib.sha256(content).hexdigest() != oid:
            raise HubError(400, f"The content's sha256 is not {oid}")
        self.objects[oid] = content

    def load(self, request: Request, oid: str) -> Answer:
        """`GET` or `HEAD /lfs/<sha256>`"""
        self.check_signature(request, "download")
        return content_range(self.objects[oid], request.headers.get("range"), {"ETag": f'"{oid}"'})


def _entry(path: str, blob: Blob) -> dict:
    entry = {"type": "file", "oid": blob.git_id, "size": len(blob.content), "path": path}
    if blob.is_large:
        entry["lfs"] = {"oid": blob.sha256, "size": len(blob.content), "pointerSize": len(blob.pointer)}
    return entry


def _folder_id(commit: Commit, folder: str) -> str:
    inside = [f"{path} {blob.git_id}" for path, blob in sorted(commit.files.items()) if path.startswith(f"{folder}/")]
    return hashlib.sha1("\n".join(inside).encode()).hexdigest()


@dataclass(frozen=True)
class Route:
    """Methods and a pattern of paths, whose groups go unquoted to `handle` after the hub and the request."""

    methods: str
    path: str
    handle: Callable[..., Answer]


_API = "/api/models/([^/]+/[^/]+)"
HUB_ROUTES = [
    Route("GET", "/api/whoami-v2", Hub.whoami),
    Route("POST", "/api/validate-yaml", Hub.validate_card),
    Route("POST", "/api/repos/create", Hub.create_repository),
    Route("DELETE", "/api/repos/delete", Hub.delete_repository),
    Route("GET", f"{_API}(?:/revision/([^/]+))?", Hub.information),
    Route("PUT", f"{_API}/settings", Hub.change_settings),
    Route("GET", f"{_API}/refs", Hub.references),
    Route("POST", f"{_API}/branch/([^/]+)", Hub.create_branch),
    Route("DELETE", f"{_API}/branch/([^/]+)", Hub.delete_branch),
    Route("POST", f"{_API}/tag/([^/]+)", Hub.create_tag),
    Route("DELETE", f"{_API}/tag/([^/]+)", Hub.delete_tag),
    Route("GET", f"{_API}/commits/([^/]+)", Hub.commits),
    Route("GET", f"{_API}/tree/([^/]+)(/.*)?", Hub.tree),
    Route("POST", f"{_API}/paths-info/([^/]+)", Hub.paths_information),
    Route("POST", f"{_API}/preupload/([^/]+)", Hub.preupload),
    Route("POST", f"{_API}/commit/([^/]+)", Hub.commit),
    Route("POST", r"/([^/]+/[^/]+)\.git/info/lfs/objects/batch", Hub.large_files_batch),
    Route("GET HEAD", "/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", Hub.resolve),
]
STORAGE_ROUTES = [
    Route("PUT", "/lfs/([0-9a-f]{64})", Hub.store),
    Route("PUT", r"/lfs/([0-9a-f]{64})/(\d+)", Hub.store_part),
    Route("POST", "/lfs/([0-9a-f]{64})/complete", Hub.complete),
    Route("GET HEAD", "/lfs/([0-9a-f]{64})", Hub.load),
]


class _ConnectionCut(Exception):
    """Nothing more is to be sent on this connection."""


def _listen(hub: Hub, name: str, routes: list[Route]) -> ThreadingHTTPServer:
    """One listener, on a thread of its own."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True

        def serve(self):
            try:
                self._serve()
            except _ConnectionCut:
                # A reset, not an orderly end: this is how a broken line looks to the client.
                self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                self.connection.close()
                self.close_connection = True

        def _serve(self):
            url = urlsplit(self.path)
            fault = hub.take_fault(self.command, url.path)
            kind = fault.kind if fault else None
            headers = {key.lower(): value for key, value in self.headers.items()}
            request = (name, self.command, url.path, parse_qs(url.query), headers)
            if kind == "cut request":
                hub.requests.append(Request(*request))
                self.rfile.read(int(int(headers.get("content-length", 0)) * fault.after))
                raise _ConnectionCut
            request = Request(*request, self._read_body())
            hub.requests.append(request)
            if kind == "rate limit":
                limited = {"Retry-After": str(fault.retry_after)}
                answer = Answer.of({"error": "You have been rate limited"}, 429, **limited)
            else:
                answer = hub.answer(request, routes)
            if kind == "lose response":
                raise _ConnectionCut
            if kind == "short response":
                answer.body = answer.body[: int(len(answer.body) * fault.after)]
            self.send_response(answer.status)
            for key, value in answer.headers.items():
                self.send_header(key, value if value.isascii() else quote(value))
            self.send_header("Content-Length", str(len(answer.body)))
            self.end_headers()
            if kind in ("cut response", "reset response"):
                self.wfile.write(answer.body[: int(len(answer.body) * fault.after)])
                if kind == "reset response":
                    raise _ConnectionCut
                # The client gets what was sent, and then the end of the connection.
                self.connection.shutdown(socket.SHUT_RDWR)
                self.close_connection = True
            elif self.command != "HEAD":
                self.wfile.write(answer.body)

        def _read_body(self) -> bytes:
            if self.headers.get("Transfer-Encoding", "").lower() != "chunked":
                return self.rfile.read(int(self.headers.get("Content-Length", 0)))
            body = b""
            while size := int(self.rfile.readline().split(b";")[0], 16):
                body += self.rfile.read(size)
                self.rfile.readline()
            while self.rfile.readline().strip():
                pass
            return body

        def log_message(self, *arguments):
            pass  # Hub.requests has it

    for method in HANDLERS:
        setattr(Handler, f"do_{method}", Handler.serve)

    class Listener(ThreadingHTTPServer):
        def handle_error(self, request, client_address):
            pass  # a client that went away in the middle; mistakes of the server are in Hub.failures

    listener = Listener(("127.0.0.1", 0), Handler)
    threading.Thread(target=listener.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
    return listener
