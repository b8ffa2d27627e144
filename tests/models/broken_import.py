"""Cannot be imported: a package that it needs is not there."""

import a_package_that_is_not_installed  # noqa: F401
