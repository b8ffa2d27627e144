-- One POST, over and over. Arguments: file of the body, then the names and values of its headers in turn.
-- The last line on stdout is the summary as JSON.

function init(args)
  local file = assert(io.open(args[1], "rb"))
  wrk.method = "POST"
  wrk.body = file:read("*a")
  wrk.headers["Content-Type"] = "application/octet-stream"
  for i = 2, #args, 2 do
    wrk.headers[args[i]] = args[i + 1]
  end
  file:close()
end

function done(summary, latency)
  local errors = summary.errors
  print(string.format(
    '{"requests": %d, "duration_us": %d, "median_us": %.1f, "p99_us": %.1f, ' ..
    '"errors": {"connect": %d, "read": %d, "write": %d, "status": %d, "timeout": %d}}',
    summary.requests, summary.duration, latency:percentile(50), latency:percentile(99),
    errors.connect, errors.read, errors.write, errors.status, errors.timeout))
end
