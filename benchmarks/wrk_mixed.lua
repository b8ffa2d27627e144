-- Several POSTs in turn. Arguments: for each, the file of its body, the number of its headers, and their names
-- and values. The summary is that of wrk.lua.

local folder = debug.getinfo(1, "S").source:match("^@(.*/)") or ""
dofile(folder .. "wrk.lua")

local requests, at = {}, 0

function init(args)
  local i = 1
  while i <= #args do
    local file = assert(io.open(args[i], "rb"))
    local headers = {["Content-Type"] = "application/octet-stream"}
    local last = i + 1 + 2 * tonumber(args[i + 1])
    for j = i + 2, last, 2 do
      headers[args[j]] = args[j + 1]
    end
    requests[#requests + 1] = wrk.format("POST", nil, headers, file:read("*a"))
    file:close()
    i = last + 1
  end
end

function request()
  at = at % #requests + 1
  return requests[at]
end
