#!/bin/sh
# The entrypoint of the image that scripts/image makes. It understands what the tests use of the official image:
# POSTGRES_USER, POSTGRES_PASSWORD, POSTGRES_DB and the server's arguments as the command.
set -eu

# as_server runs a command as the server's user.
as_server() {
  setpriv --reuid=postgres --regid=postgres --init-groups "$@"
}

case ${1-} in
'' | -*) set -- postgres "$@" ;; # arguments alone are the server's
postgres) ;;
*) exec "$@" ;;
esac

user=${POSTGRES_USER:-postgres}
database=${POSTGRES_DB:-$user}

mkdir -p "$PGDATA" /var/run/postgresql
chown postgres:postgres "$PGDATA" /var/run/postgresql
chmod 700 "$PGDATA"

if [ ! -s "$PGDATA/PG_VERSION" ]; then
  password=/var/run/postgresql/password
  (umask 077 && printf '%s\n' "${POSTGRES_PASSWORD:?set POSTGRES_PASSWORD to the password of $user}" >"$password")
  chown postgres:postgres "$password"
  as_server initdb --pgdata="$PGDATA" --username="$user" --pwfile="$password" \
    --encoding=UTF8 --locale=C --auth-local=trust --auth-host=scram-sha-256 --no-sync
  rm "$password"
  echo "listen_addresses = '*'" >>"$PGDATA/postgresql.conf"
  echo "host all all all scram-sha-256" >>"$PGDATA/pg_hba.conf"
  if [ "$database" != postgres ]; then
    # Single-user mode needs no server that listens, so nobody can take a half-made one for ready.
    echo "create database \"$(printf %s "$database" | sed 's/"/""/g')\"" | as_server postgres --single -D "$PGDATA" postgres
  fi
fi

exec setpriv --reuid=postgres --regid=postgres --init-groups "$@"
