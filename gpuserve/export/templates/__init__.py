"""Manifests as YAML files with places to fill, and what fills them.

- ``<place>`` is a value by its name. Alone and without quotes it may be of any kind, and None leaves its key
  or entry out; everywhere else it is text.
- ``!if:place`` or ``!unless:place`` before a value leaves its key, entry or document out.
- ``!each:place`` before an entry repeats it, with the further places that each of these has.
- The keys of a mapping at ``<<`` become keys of the one around it.
- A comment directly above a key or an entry is a reason, and is in the manifest. Others are for readers here.
"""
