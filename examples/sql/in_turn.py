"""Waits in turn for a lease, with psycopg 3. With psycopg2 it is the same, on a cursor."""

import os
import socket
import time
import uuid

import psycopg

name = "invoice:42"
holder = f"{socket.gethostname()}:{os.getpid()}:{uuid.uuid4()}"
conn = psycopg.connect("", autocommit=True)  # a ticket counts once it is committed


def acquire_in_turn(name, holder):
    call = "SELECT acquired, fencing_token, ticket, ask_again_ms FROM acquire_in_turn(%s, %s, 60, %s)"
    ticket = None
    while True:
        acquired, token, ticket, pause = conn.execute(call, (name, holder, ticket)).fetchone()
        if acquired:
            return token
        time.sleep(pause / 1000)


token = acquire_in_turn(name, holder)
print(f"acquired with token {token}")
conn.execute("SELECT release_lock(%s, %s)", (name, holder))
conn.execute("SELECT wake_lock_waiter(%s)", (name,))
