"""Attempts of one real user to cross the boundary to another user, to root, or to CARMA itself.

A root daemon on virtual GPUs serves two users that the tests create. Attacks are carried out by processes with the
credentials of such a user (people.py), never by root in disguise. docs/security.md lists the guarantees and names the
test files that show them.
"""
