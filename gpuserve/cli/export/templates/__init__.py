"""Manifests as YAML files with placeholders, which ``manifest_templates`` fills.

- ``<name>`` is the value of that name. Alone and without quotes the value may have any type, and None leaves
  out its key or entry; everywhere else the value is text.
- ``!if:name`` or ``!unless:name`` before a value leaves out its key, entry or document.
- ``!each:name`` before an entry repeats the entry, with the further values that each element of ``name`` has.
- The keys of a mapping at ``<<`` become keys of the surrounding mapping.
- A comment directly above a key or an entry is a reason, and appears in the manifest. All other comments are
  for readers here.

The unit files of ``systemd`` are no YAML, and ``str.format`` fills them.
"""
