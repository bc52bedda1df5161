#!/bin/sh
# Settles invoice 42 under a lease, with psql.
set -eu

name=invoice:42
holder=$(uname -n):$$:$(psql -XqtA -c "SELECT gen_random_uuid()")

# Each statement of a script is a transaction of its own, unless it says BEGIN.
# Several statements in one -c are one transaction.
sql() { psql -XqtA -v ON_ERROR_STOP=1 -v VERBOSITY=sqlstate -v name="$name" -v holder="$holder" "$@"; }

# psql prints f and exits with 0: the exit code says only that the statement ran.
acquired=$(echo "SELECT acquire_lock(:'name', :'holder', 60)" | sql)
if [ "$acquired" != t ]; then
	echo "busy: $acquired"
	exit
fi

release() {
	sql >/dev/null <<-'SQL'
		SELECT release_lock(:'name', :'holder');
		SELECT wake_lock_waiter(:'name');
	SQL
}
trap release EXIT

total=$(echo "SELECT invoice_total(42)" | sql) # slow
if output=$(
	sql -v total="$total" 2>&1 <<-'SQL'
		BEGIN;
		SELECT assert_lock_held(:'name', :'holder');
		UPDATE invoices SET total = :'total' WHERE id = 42;
		COMMIT;
	SQL
); then
	echo settled
else
	case $output in
	*LK001*) echo lost ;;
	*) echo "$output" >&2; exit 1 ;;
	esac
fi
