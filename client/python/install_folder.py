# SPDX-License-Identifier: Apache-2.0
"""Prints where this Python looks for packages under a prefix, relative to it.

Debian's Python has one folder for /usr, whatever its version, and others for /usr/local."""
import sys
import sysconfig

debian = "deb_system" in sysconfig.get_scheme_names()
if debian and sys.argv[1] == "/usr":
    print("lib/python3/dist-packages")
else:
    print("lib/python%d.%d/%s-packages" % (*sys.version_info[:2], "dist" if debian else "site"))
