"""Settles invoice 42 under a lease, with psycopg 3."""

import os
import socket
import uuid

import psycopg

name = "invoice:42"
holder = f"{socket.gethostname()}:{os.getpid()}:{uuid.uuid4()}"

# Without autocommit the first statement begins a transaction: the lease exists
# for others when that commits, and never if the connection is closed before.
conn = psycopg.connect("", autocommit=True)


def value(sql, *args):
    return conn.execute(sql, args).fetchone()[0]


acquired = value("SELECT acquire_lock(%s, %s, 60)", name, holder)
if not acquired:
    print(f"busy: {acquired!r}")
    raise SystemExit

try:
    total = value("SELECT invoice_total(42)")  # slow
    with conn.transaction():
        value("SELECT assert_lock_held(%s, %s)", name, holder)
        conn.execute("UPDATE invoices SET total = %s WHERE id = 42", (total,))
    print("settled")
except psycopg.Error as e:
    if e.sqlstate != "LK001":
        raise
    print("lost")
finally:
    value("SELECT release_lock(%s, %s)", name, holder)
    value("SELECT wake_lock_waiter(%s)", name)
