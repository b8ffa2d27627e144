"""The list itself: ``MEANT``. Data only; ``expected`` says how it is read.

The words are those of docs/compatibility.md, which has a row for each entry.
"""

from __future__ import annotations

from triton_differences.expected import Meant, Rule
from triton_differences.model_py.meant import MODEL_PY

_NEWER = "As newer releases of Triton do."
_STRICT = "A request that says two things, or something that cannot be, is refused."
#: Cases that end Triton, always or now and then.
_ENDINGS = (
    *("*: huge dimension", "http index: deep", "stream error: model raised"),
    *("* classification of BYTES", "* classification without a batch"),
)

HTTP: tuple[Meant, ...] = (
    Meant(
        "JSON that is malformed or has a value of the wrong type",
        "500",
        "400",
        "The request is wrong, not the server. (One test of Triton's own insists on 500 for a negative "
        "dimension.)",
        (
            Rule(
                (
                    *("http json: *", "http inputs: *", "http request: *", "http body: *"),
                    "http binary: negative dimension",
                ),
                "1.status",
                "500",
                "400",
            ),
            Rule(("header length *", "http parameter: *", "http classification *"), "1.status", "500", "400"),
            Rule(("generate*", "shm *", "cuda shm *", "http trace*", "http log*"), "*.status", "500", "400"),
            Rule(("http index*", "http load*", "trace not JSON", "log not JSON"), "*.status", "500", "400"),
            Rule(("gzip and a wrong header length", "accept-encoding of an error"), "1.status", "500", "400"),
        ),
    ),
    Meant(
        "JSON that is ambiguous: a member twice, a byte order mark, bytes that are not UTF-8",
        "accepted",
        "400",
        _STRICT,
        (Rule(("http body: byte order mark", "http body: member twice", "http body: not UTF-8")),),
    ),
    Meant(
        "`data` nested deeper than 100 levels",
        "accepted; the process ends at some depth",
        "400",
        _NEWER,
        (Rule(("http inputs: data 120 deep", "http index: deep", "http body: deep")),),
    ),
    Meant(
        "A request for inference without a body",
        "200, an empty output",
        "400",
        "An empty `curl -d ''` is a mistake.",
        (Rule(("no body",)),),
    ),
    Meant(
        "A body or `parameters` that is a JSON list where an object belongs",
        "ignored",
        "400",
        "A mistake is told rather than passed over.",
        (Rule(("http inputs: parameters as list", "http index: list", "trace not JSON", "log not JSON")),),
    ),
    Meant(
        "Numbers that do not fit the datatype, as JSON or as contents",
        "cut to the low bytes, or infinity",
        "INVALID_ARGUMENT / 400",
        "A wrong number is worse than an error.",
        (
            Rule(
                (
                    "http json: INT32 from [2147483648, 1]",
                    "http json: INT8 from *",
                    "http json: FP32 from [1e+60*",
                )
            ),
            Rule(("grpc: contents INT8 *", "grpc: contents UINT8 *", "grpc: contents INT16 *")),
            Rule(("http parameter: large int", "http parameter: larger int")),
        ),
    ),
    Meant(
        "`Content-Encoding` whose data is damaged, cut or followed by more",
        "decodes what it can and goes on",
        "400",
        "Half of a tensor is no tensor.",
        (Rule(("gzip that is not", "gzip cut", "gzip with more behind", "deflate that is not")),),
    ),
    Meant(
        "Names of content codings",
        "lower case only; an empty header is an error",
        "any case; an empty header means none",
        "RFC 9110.",
        (Rule(("content-encoding 'GZIP'", "content-encoding ''", "accept-encoding 'GZIP'")),),
    ),
    Meant(
        "Binary outputs that are all empty",
        "`application/json`, without `Inference-Header-Content-Length`",
        "`application/octet-stream`, with it",
        "The answer has the form that was asked for whatever the size; clients read both.",
        (
            Rule(
                where="1.headers.content-type", triton="application/json", gpuserve="application/octet-stream"
            ),
            Rule(where="1.binary", triton="(absent)", gpuserve=""),
        ),
    ),
    Meant(
        "405",
        "no `Allow` header",
        "with `Allow`",
        "RFC 9110.",
        (Rule(where="1.headers.allow", triton="(absent)"),),
    ),
    Meant(
        "Paths",
        "compared as they were sent",
        "names in them are percent-decoded; `/v2/` is `/v2`",
        "Clients quote the names of models.",
        (Rule(("http path /v2/", "http quoted name")),),
    ),
    Meant(
        "`/` and `/v2/models`",
        "404",
        "where to go from here, a page for browsers; the names of the models",
        "Who meets a server for the first time asks there.",
        (Rule(("http path /", "http path /v2/models", "http path /v2/models/")),),
    ),
    Meant(
        "A version in the index that there is nothing to say of",
        "no `reason`",
        'a `reason` of ""',
        "MLServer's client requires it.",
        (Rule(("http index*",), "*.reason"),),
    ),
    Meant(
        "A body with both `Transfer-Encoding` and `Content-Length`, or two lengths",
        "the first is used, or the connection hangs",
        "400, and the connection is closed",
        "Two readings of one body are how requests are smuggled past a proxy.",
        (Rule(("chunked and a length", "two lengths")),),
    ),
)

INFERENCE: tuple[Meant, ...] = (
    Meant(
        "Order of outputs",
        "as the model made them",
        "as they were asked for",
        "Clients look for outputs by name.",
        (Rule(("*: outputs in another order",)),),
    ),
    Meant(
        "An output asked for twice",
        "given once",
        "INVALID_ARGUMENT / 400",
        _NEWER,
        (Rule(("*: output twice",)),),
    ),
    Meant(
        "A required input missing while an optional one makes up the number",
        "the model is called without it",
        "INVALID_ARGUMENT / 400",
        "The model cannot run.",
        (Rule(("*: only the optional",)),),
    ),
    Meant(
        "A shape whose product overflows; classes of BYTES, or of a model without batches; very deep JSON",
        "the process ends",
        "an answer",
        "No request may end the server.",
        (Rule(_ENDINGS, "1.no answer"), Rule(_ENDINGS, triton="(absent)")),
    ),
    Meant(
        "Version 0; in a path, a version of more than 18 digits",
        "NOT_FOUND / 404; 400",
        "INVALID_ARGUMENT / 400; 404",
        "As newer releases of Triton do; no path has such a version.",
        (Rule(("* of version 0", "http * of version 99999999999999999999")),),
    ),
    Meant(
        "A request that cannot be decoded",
        "INTERNAL",
        "INVALID_ARGUMENT",
        "The request is wrong, not the server.",
        (Rule(("grpc message *", "grpc name not UTF-8", "grpc nonsense for *"), "1.code", "INTERNAL"),),
    ),
    Meant(
        "A model that answers CANCELLED",
        "HTTP 400",
        "HTTP 499",
        "A request that was taken back is told apart from a wrong one.",
        (Rule(("http * failure 5",), "1.status", "400", "499"),),
    ),
    Meant(
        "The parameter `timeout`",
        "without effect unless the queue policy has a timeout and allows overriding; gRPC takes only int64",
        "the request's deadline in every model but those of sequences, where it is as in Triton; "
        "uint64 is taken too; a negative one is an error",
        "A client that names a time means it.",
        (
            Rule(
                (
                    "* parameter: negative timeout",
                    "* parameter: small timeout",
                    "* parameter: timeout as uint64",
                )
            ),
        ),
    ),
    Meant(
        "Status of a failing model in `generate` and `generate_stream`",
        "400; 200 where there are none or several responses",
        "that of the error, as for `infer`; 500",
        "A proxy can tell a busy model from a wrong request.",
        (
            Rule(("generate*: model *",), "1.*"),
            Rule(("generate: no response", "generate: three responses")),
        ),
    ),
    Meant(
        "Order of members in the JSON of `generate` and of statistics",
        "by name; `response_stats` first",
        "`model_name`, `model_version`, `id`, outputs; `response_stats` last",
        "The order of members means nothing in JSON.",
        (Rule(("generate*", "http statistics *"), "*.order"),),
    ),
    Meant(
        "Errors of a stream with `triton_grpc_error`",
        "a message where the request never reached the model, a status otherwise",
        "always a status",
        "What the option says.",
        (Rule(("stream error as status: *",)),),
    ),
    Meant(
        "A sequence id as text for a model that takes numbers",
        "accepted",
        "INVALID_ARGUMENT / 400",
        _NEWER,
        (Rule(("* id as text",)),),
    ),
)

EXTENSIONS: tuple[Meant, ...] = (
    Meant(
        "`ready` of a model that is not there",
        "HTTP 400",
        "HTTP 404",
        _NEWER,
        (
            Rule(
                where="*.status", triton="400", gpuserve="404", cases=("http ready of *", "http after unload")
            ),
        ),
    ),
    Meant(
        "Health of a service that is not known (grpc.health.v1)",
        "SERVING, whatever the name",
        "NOT_FOUND",
        "The protocol of grpc.health says so. Known are the empty name, `readiness`, `liveness` and more.",
        (Rule(("grpc health check 'unknown'",)),),
    ),
    Meant(
        "`response_cache` in a model's configuration",
        "only where it is set",
        "always",
        "PyTriton's configurations have it always.",
        (Rule(("* config of *",), "*.response_cache", "(absent)"),),
    ),
    Meant(
        "`classification` 0 by HTTP",
        "the output is given whole",
        "400",
        "As both servers do by gRPC.",
        (Rule(("http classification 0",)),),
    ),
    Meant(
        "Statistics of failures",
        "an error that the model answers with counts as success; a call that raised counts as an execution",
        "both are failures; an execution is a call that gave answers",
        "Who watches the failures of a model wants to see them all, and the counts add up.",
        (
            Rule(("grpc statistics after failures",), "4.*.success.count"),
            Rule(("grpc statistics after failures",), "4.*.fail.count"),
            Rule(("grpc statistics after failures",), "4.*_count"),
            Rule(("grpc statistics after failures",), "4.*.batch_stats*.count"),
            Rule(("grpc statistics after failures",), "4.*.inference_stats.*.count"),
        ),
    ),
    Meant(
        "`response_stats` of decoupled models",
        "none with the Python backend",
        "told",
        "As Triton's other backends do.",
        (Rule(("* statistics after a stream",), "*.response_stats*", "(absent)"),),
    ),
    Meant(
        "Metrics",
        "the pool of pinned memory; 200 and nothing on other paths",
        "cache, loading and first-response metrics of newer releases, and our own; 404 on other paths",
        "There is no such pool here.",
        (
            Rule(("metrics*",), "1.metrics.nv_pinned_memory_pool_*", gpuserve="(absent)"),
            Rule(("metrics*",), "1.metrics.*", triton="(absent)"),
            Rule(("metrics*",), "1.headers.content-type"),
            Rule(("metrics unknown path",)),
        ),
    ),
    Meant(
        "Registering shared memory under an empty name, with a key that no object can have, or that none has",
        "accepted, or INTERNAL",
        "INVALID_ARGUMENT / 400, or NOT_FOUND / 404",
        "The request is wrong, not the server; the names are checked as newer releases of Triton do.",
        (
            Rule(
                (
                    "shm register: * key",
                    "shm register: key *",
                    "shm register: empty name",
                    "shm asked for as cuda",
                )
            ),
        ),
    ),
    Meant(
        "Settings of trace and log that cannot be: a negative rate, a value without a type",
        "taken modulo 2³², or INVALID_ARGUMENT",
        "INVALID_ARGUMENT / 400, or left as it is",
        "A negative rate means nothing; null in JSON leaves a setting as it is, so no value does in gRPC.",
        (Rule(("* rate negative", "grpc log: null")),),
    ),
    Meant(
        "Index, load and unload of a named repository",
        "answered, the name is passed over",
        "UNIMPLEMENTED / 501",
        _NEWER,
        (Rule(("http index of a repository",)),),
    ),
    Meant(
        "Load and unload with a body that is not JSON, an unknown parameter, no name, a path for a name, a "
        "config that is none, or files",
        "the body of an unload is not read; INTERNAL or OK",
        "INVALID_ARGUMENT / 400; of a model that there is not NOT_FOUND / 404",
        "A mistake is told rather than passed over.",
        (
            Rule(("http unload not JSON", "http unload of a path", "http unload with an unknown parameter")),
            Rule(("grpc load without a name", "grpc unload without a name", "grpc load of a path")),
            Rule(("* load unknown", "grpc load and unload of *")),
            Rule(("grpc load with config {", "grpc load with a file and no config")),
        ),
    ),
)

#: What no single answer shows, so that no rule can name it.
UNSEEN: tuple[Meant, ...] = (
    Meant(
        "CUDA shared memory that cannot be registered: a handle that cannot be opened, more bytes than "
        "its allocation has, a device without a model",
        "`failed to register shared memory region: invalid args` and the like",
        "INVALID_ARGUMENT / 400; the text says what CUDA or the driver said, or which devices there are",
        "One can see what to change.",
        (),
    ),
    Meant(
        "Registering system shared memory of another user than the client's",
        "accepted where the server can open it",
        "NOT_FOUND / 404, unless `shared_memory_owners` has its owner",
        "The server must not read and write for a user what that user cannot.",
        (),
    ),
    Meant(
        "A request of a page in a browser on the server's machine, for a host whose name could be anybody's",
        "answered",
        "421, unless `allowed_hosts` has the name",
        "A page could otherwise read what this machine alone may.",
        (),
    ),
    Meant(
        "A request whose CUDA shared memory is on another GPU than all instances of the model, or on two"
        " GPUs",
        "accepted",
        "INVALID_ARGUMENT / 400",
        "Who puts a tensor on a GPU wants it used there; the model's instances on that GPU are chosen "
        "where there are any.",
        (),
    ),
    Meant(
        "Batches of `oldest` without a delay",
        "of what has arrived; its tests hold the scheduler up by a variable for debugging",
        "of what has arrived",
        "There is no such variable; with `max_queue_delay_us` both form the same batches.",
        (),
    ),
    Meant(
        '`"ready": null` in a request for the index',
        "400",
        "as if it was left out",
        "MLServer's client writes all fields.",
        (),
    ),
    Meant(
        "`nv_inference_request_failure` of an ensemble whose step fails",
        "2 for one request",
        "1",
        "It is one request.",
        (),
    ),
    Meant(
        "`nv_cache_num_entries`, `nv_cache_util` and the like; `nv_pinned_memory_pool_…`",
        "of the server; counters stay at 0",
        "`gpuserve_cache_bytes`",
        "What the cache holds is said by its own name, and there is no such pool.",
        (),
    ),
    Meant(
        "Idle time of a sequence",
        "from its last request",
        "from its last answer",
        "A slow model would drop the sequences that it works on.",
        (),
    ),
    Meant(
        "The first state of a sequence without an `initial_state`",
        "uninitialized",
        "zero",
        "Uninitialized memory may hold the tensors of another client.",
        (),
    ),
    Meant(
        "Free slots of iterative sequences (strategy `direct`)",
        "empty requests in the batches of the model",
        "none",
        "A model needs no READY control to tell requests apart.",
        (),
    ),
    Meant(
        "A sequence that was dropped",
        "the model is not told",
        "the callable is told, by `sequence_dropped`",
        "What it keeps for a sequence would grow with every client that goes away.",
        (),
    ),
    Meant(
        "More than 131,072 values in a request's JSON beside the arrays of numbers in `data`",
        "accepted",
        "RESOURCE_EXHAUSTED / 413",
        "Nobody else is answered while they are read; long arrays of numbers are read in slices, other data "
        "has the binary form.",
        (),
    ),
    Meant(
        "FP32 in a response's JSON",
        "the digits of the same number in 64 bits",
        "the fewest digits that make the same FP32",
        "Half the text; clients that read it as FP32 have the same bits.",
        (),
    ),
    Meant(
        "`/v1/…`",
        "unknown paths, 404; a front of its own for OpenAI's API is another program",
        "OpenAI's API, with its form of errors",
        "Clients of both ask one port.",
        (),
    ),
)

MEANT: tuple[Meant, ...] = (*HTTP, *INFERENCE, *EXTENSIONS, *UNSEEN, *MODEL_PY)
