# SPDX-License-Identifier: Apache-2.0
"""Old names raise an error that gives the new name."""

import functools


def renamed(**names):
    """Decorates a function. A call with a keyword of `names` (old=new) raises TypeError."""
    def decorate(function):
        @functools.wraps(function)
        def call(*arguments, **keywords):
            for old in names.keys() & keywords.keys():
                raise TypeError("%s: the keyword %s is now %s"
                                % (function.__qualname__, old, names[old]))
            return function(*arguments, **keywords)
        return call
    return decorate


def renamed_fields(**names):
    """Decorates a class. An attribute of `names` (old=new) raises AttributeError."""
    def decorate(record):
        def get(self, name):
            text = "%r has no attribute %r" % (type(self).__name__, name)
            raise AttributeError(text + "; it is now %r" % names[name] if name in names else text)
        record.__getattr__ = get
        return record
    return decorate
