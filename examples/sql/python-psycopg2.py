"""Settles invoice 42 under a lease, with psycopg2."""

import os
import socket
import uuid

import psycopg2

name = "invoice:42"
holder = f"{socket.gethostname()}:{os.getpid()}:{uuid.uuid4()}"

# Without autocommit the first statement begins a transaction: the lease exists
# for others when that commits, and never if the connection is closed before.
conn = psycopg2.connect("")
conn.autocommit = True
cursor = conn.cursor()


def value(sql, *args):
    cursor.execute(sql, args)
    return cursor.fetchone()[0]


acquired = value("SELECT acquire_lock(%s, %s, 60)", name, holder)
if not acquired:
    print(f"busy: {acquired!r}")
    raise SystemExit

try:
    total = value("SELECT invoice_total(42)")  # slow
    with conn:  # a transaction, with autocommit too since psycopg2 2.9
        value("SELECT assert_lock_held(%s, %s)", name, holder)
        cursor.execute("UPDATE invoices SET total = %s WHERE id = 42", (total,))
    print("settled")
except psycopg2.Error as e:
    if e.pgcode != "LK001":
        raise
    print("lost")
finally:
    value("SELECT release_lock(%s, %s)", name, holder)
    value("SELECT wake_lock_waiter(%s)", name)
